"""torch.nn.utils' gradient norms and clipping, over tensors of several meshes and plain ones.

torch's functions take one mesh at a time: the norms of several cannot be stacked. Here each mesh,
and the plain tensors, give one number, which is the same on every rank; the rest is arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from fsdp_c import _clip, _delegate, _env

_FUNCTIONS: tuple[Any, ...] = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
_originals: dict[Any, Callable[..., Any]] = {}  # what torch's functions have inside


def install() -> None:
    """Everybody who holds torch's functions gets these: the decorated functions change inside."""
    replacements = ((_total_norm, _clip.total_norm), (_clip_with_norm, _clip.clip_with_norm))
    for function, (over_meshes, in_one_pass) in zip(_FUNCTIONS, replacements, strict=True):
        cell = _delegate.decorated(function)
        if cell is not None and function not in _originals:
            original = _originals[function] = cell.cell_contents
            one_mesh = functools.partial(in_one_pass, original)
            cell.cell_contents = functools.partial(over_meshes, one_mesh)


def uninstall() -> None:
    """Gives torch's functions back, until the next fully_shard."""
    for function, original in _originals.items():
        _delegate.decorated(function).cell_contents = original
    _originals.clear()


def _by_mesh(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of the tensors, those of one mesh together; plain tensors count as a mesh."""
    found: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(i)
    return list(found.values())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _total_norm(
    original: Callable[..., Tensor],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    parts = _by_mesh(tensors)
    if len(parts) < 2 or _env.is_strict():
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    norms = [
        _whole(original([tensors[i] for i in part], norm_type, False, foreach)) for part in parts
    ]
    if float(norm_type) == 0:  # counts tensors
        return torch.stack(norms).sum()
    return original(norms, norm_type, error_if_nonfinite, None)


def _clip_with_norm(
    original: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [param for param in parameters if param.grad is not None]
    parts = _by_mesh([param.grad for param in with_grad])
    if len(parts) < 2 or _env.is_strict():
        return original(parameters, max_norm, total_norm, foreach)
    for part in parts:
        original([with_grad[i] for i in part], max_norm, _whole(total_norm), foreach)
    return None
