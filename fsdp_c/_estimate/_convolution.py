"""What torch's convolutions on CPU ranks hold while they run: copies in the library's layout."""

from __future__ import annotations

from typing import Any

import torch

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
# oneDNN's blocks of channels; inputs of fewer than a few channels are taken as they are.
_BLOCK = 16
_PLAIN = 4


def scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes on top of the operation's results, at the moment when most are held."""
    if func is _FORWARD:
        x, weight = _blocked(args[0]), _blocked(args[1])
        y = _blocked(out)
        return max(x + weight + y - out.nbytes, y)
    if func is _BACKWARD:
        grad, x, weight = (_blocked(tensor) for tensor in args[:3])
        return max(weight, x + grad)
    return 0


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a copy with its channels in blocks."""
    channels = tensor.shape[1]
    if tensor.dim() < 4 or channels < _PLAIN:
        return 0
    return tensor.nbytes // channels * (-(-channels // _BLOCK) * _BLOCK)
