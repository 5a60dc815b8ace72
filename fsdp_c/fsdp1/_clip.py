"""Clipping of gradients as FSDP1 gives it: one norm over all meshes, as a plain tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip(params: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clips in place; returns the norm before, in the gradients' widest dtype."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    if len(by_mesh) == 1:
        return _plain(nn.utils.clip_grad_norm_(*by_mesh.values(), max_norm, norm_type))
    norms = [
        _plain(nn.utils.get_total_norm([param.grad for param in members], norm_type))
        for members in by_mesh.values()
    ]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for members in by_mesh.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
