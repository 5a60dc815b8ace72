"""Gradient clipping over the local tensors of sharded gradients, with torch's own collectives.

`torch.nn.utils.clip_grad_norm_` takes the norm of every gradient, stacks them, takes the norm of
that, and multiplies every gradient. The first and the last are done here in one pass each; what
lies between is torch's code on one DTensor, so that results have torch's bits and type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c._native import _C


class _Layout:
    """Gradients on one mesh with the same placements."""

    def __init__(self, grad: DTensor) -> None:
        self.locals = _C.Layout(grad._spec)
        self.mesh = grad._spec.mesh
        self.placements = grad._spec.placements
        self._norm_placements: dict[float, tuple[Any, ...]] = {}

    def stacked_norms(self, grads: list[Any], norm_type: float) -> DTensor | None:
        norms = self._norms(grads, norm_type)
        if norms is None:
            return None
        if norm_type not in self._norm_placements:
            one = DTensor.from_local(
                torch.ones((1,) * grads[0].dim()), self.mesh, self.placements, run_check=False
            )
            placements = torch.linalg.vector_norm(one, norm_type).placements
            self._norm_placements[norm_type] = placements
        meta = TensorMeta(norms.shape, norms.stride(), norms.dtype)
        placements = self._norm_placements[norm_type]
        spec = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return DTensor(norms, spec, requires_grad=False)

    def _norms(self, grads: list[Any], norm_type: float) -> Tensor | None:
        if norm_type == 2.0:
            return self.locals.norms(grads)
        tensors = self.locals.locals(grads)
        if tensors is None:
            return None
        # The largest of no elements is refused by torch, on the ranks that have none.
        found = [t if t.numel() > 0 else t.new_zeros(1) for t in tensors]
        return torch.stack([torch.linalg.vector_norm(t, norm_type) for t in found])


_layouts: dict[tuple[Any, Any], _Layout] = {}


def _layout_of(grads: list[Any]) -> _Layout | None:
    """The layout of the first gradient; None if torch has to do it all."""
    if not grads or type(grads[0]) is not DTensor or torch._C._len_torch_dispatch_stack() != 0:
        return None
    spec = grads[0]._spec
    if any(placement.is_partial() for placement in spec.placements) or not _agrees():
        return None
    key = (spec.mesh, spec.placements)
    if key not in _layouts:
        _layouts[key] = _Layout(grads[0])
    return _layouts[key]


def total_norm(
    original: Callable[..., Tensor],
    grads: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """`original`, torch's `_get_total_norm`, or the same in one pass; without autograd."""
    norm_type = float(norm_type)
    layout = None if error_if_nonfinite else _layout_of(grads)
    norms = None if layout is None else layout.stacked_norms(grads, norm_type)
    if norms is None:
        return original(grads, norm_type, error_if_nonfinite, foreach)
    return torch.linalg.vector_norm(norms, norm_type)


def clip_with_norm(
    original: Callable[..., None],
    params: list[Tensor],
    max_norm: float,
    norm: Tensor,
    foreach: bool | None,
) -> None:
    """`original`, torch's `_clip_grads_with_norm_`, or the same in one pass; without autograd."""
    grads = [param.grad for param in params if param.grad is not None]
    layout = _layout_of(grads)
    factor = None if layout is None else _factor(float(max_norm), norm)
    if factor is None or not layout.locals.multiply(grads, factor):
        original(params, max_norm, norm, foreach)


def _factor(max_norm: float, norm: Tensor) -> float | None:
    """What gradients are multiplied by, as torch computes it; None if this rank does not know."""
    if norm.dtype != torch.float32:
        return None
    factor: Any = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if type(factor) is DTensor:
        if not all(placement.is_replicate() for placement in factor.placements):
            return None
        factor = factor._local_tensor
    return float(factor) if type(factor) is Tensor else None


@functools.cache
def _agrees() -> bool:
    """Whether norms have this torch's bits on this CPU, tried on a few numbers."""
    layout = _C.Layout(None)
    for numel in (0, 1, 7, 8, 75, 4099):
        values = torch.arange(float(numel), device="cpu", dtype=torch.float32).add(1).sin()
        for scale in (1.0, 1e-30):
            tensor = values * scale
            if not torch.equal(layout.norms([tensor])[0], torch.linalg.vector_norm(tensor)):
                return False
    return True
