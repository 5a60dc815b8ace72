"""Gradient clipping over the local tensors of sharded gradients.

`torch.nn.utils.clip_grad_norm_` takes the norm of every gradient, stacks them, adds up squares over
ranks, takes the norm of that, and multiplies every gradient. Here the first and the last are one
pass each. What lies between is torch's code on one DTensor the first time, and then the same
arithmetic on its local tensor, so that results have torch's type and bits; over more than two ranks
sums are added in rank order instead of the backend's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c import _comm, _modes
from fsdp_c._native import _C


class _Layout:
    """Gradients on one mesh with the same placements."""

    def __init__(self, grad: DTensor) -> None:
        spec = grad._spec
        self.locals = _C.Layout(spec)
        self._mesh = spec.mesh
        self._placements = spec.placements
        self._shard_dims = [
            dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()
        ]
        self._is_whole = all(spec.mesh.size(dim) == 1 for dim in self._shard_dims)
        self._norm_placements: dict[float, tuple[Any, ...]] = {}
        self._total_specs: dict[float, DTensorSpec] = {}  # as torch lays results out

    def total(self, found: Any, norm_type: float) -> Tensor | None:
        """The norm of all gradients; None if torch has to find it. Collective, like torch's."""
        is_ready = found is not None and norm_type in self._total_specs
        if norm_type > 0 and math.isfinite(norm_type):
            comm = None if self._is_whole else self._communicator()
            # The short way has to be open to all ranks.
            if comm.all_agree(is_ready) if comm is not None else is_ready and self._is_whole:
                return self._short_total(found, norm_type, comm)
        return None if found is None else self._total_by_torch(found, norm_type)

    def _communicator(self) -> _comm.Communicator | None:
        """Between the ranks that hold parts; None unless these share memory already."""
        if len(self._shard_dims) != 1:
            return None
        group = self._mesh.get_group(self._shard_dims[0])
        return _comm.communicator_for(group) if _comm.transport_kind(group) == "shm" else None

    def _short_total(self, found: Any, norm_type: float, comm: _comm.Communicator | None) -> Tensor:
        """What torch computes, without its dispatch, and over shared memory."""
        norms = self._norms(found, norm_type)
        if comm is not None:
            sums = torch.pow(norms, norm_type)
            comm.all_reduce(sums)
            norms = torch.pow(sums, 1.0 / norm_type)
        if norm_type == 2.0:
            total = _C.norm(norms)
        else:
            total = torch.linalg.vector_norm(norms, norm_type)
        return DTensor(total, self._total_specs[norm_type], requires_grad=False)

    def _total_by_torch(self, found: Any, norm_type: float) -> Tensor:
        norms = self._norms(found, norm_type)
        meta = TensorMeta(norms.shape, norms.stride(), norms.dtype)
        spec = DTensorSpec(self._mesh, self._placements_of_norms(norm_type), tensor_meta=meta)
        total = torch.linalg.vector_norm(DTensor(norms, spec, requires_grad=False), norm_type)
        if all(placement.is_replicate() for placement in total.placements):
            self._total_specs[norm_type] = total._spec
        return total

    def _placements_of_norms(self, norm_type: float) -> tuple[Any, ...]:
        if norm_type not in self._norm_placements:
            n_dims = 1 + max((placement.dim for placement in self._sharded()), default=0)
            one = DTensor.from_local(
                torch.ones((1,) * n_dims), self._mesh, self._placements, run_check=False
            )
            placements = torch.linalg.vector_norm(one, norm_type).placements
            self._norm_placements[norm_type] = placements
        return self._norm_placements[norm_type]

    def _sharded(self) -> list[Any]:
        return [self._placements[dim] for dim in self._shard_dims]

    @staticmethod
    def _norms(found: Any, norm_type: float) -> Tensor:
        if norm_type == 2.0:
            return found.norms()
        # The largest of no elements is refused by torch, on the ranks that have none.
        parts = [t if t.numel() > 0 else t.new_zeros(1) for t in found.tensors()]
        return torch.stack([torch.linalg.vector_norm(part, norm_type) for part in parts])


_layouts: dict[tuple[Any, Any], _Layout] = {}
_last: tuple[Any, _Layout | None] = (None, None)  # a spec and its layout


def layout_of(grads: Iterable[Tensor | None]) -> _Layout | None:
    """The layout of the first gradient; None if torch has to do it all."""
    global _last
    first: Any = next((grad for grad in grads if grad is not None), None)
    if type(first) is not DTensor or torch.compiler.is_compiling():
        return None
    # A fake tensor has nothing to send, and other ranks may have real ones.
    if type(first._local_tensor) is not Tensor:
        return None
    spec = first._spec
    if _last[0] is not spec:
        if any(placement.is_partial() for placement in spec.placements):
            return None
        key = (spec.mesh, spec.placements)
        if key not in _layouts:
            _layouts[key] = _Layout(first)
        _last = (spec, _layouts[key])
    return _last[1]


def collect(layout: _Layout | None, grads: list[Tensor]) -> Any:
    """Local tensors of the gradients; None unless all of them have the layout and are float32."""
    return layout.locals.collect(grads) if _may_collect(layout) else None


def collect_gradients(layout: _Layout | None, params: list[Tensor]) -> Any:
    """`collect` for the gradients that the parameters have."""
    return layout.locals.collect_gradients(params) if _may_collect(layout) else None


def _may_collect(layout: _Layout | None) -> bool:
    return layout is not None and not _modes.see_operations() and _agrees()


def multiply(found: Any, max_norm: float, norm: Tensor) -> bool:
    """Clips the collected gradients; False if torch has to."""
    factor = None if found is None else _factor(float(max_norm), norm)
    if factor is None:
        return False
    found.multiply(factor)
    return True


def _factor(max_norm: float, norm: Any) -> float | None:
    """What gradients are multiplied by, as torch computes it; None if this rank does not know."""
    if norm.dtype != torch.float32:
        return None
    if type(norm) is DTensor and all(placement.is_replicate() for placement in norm.placements):
        norm = norm._local_tensor
    if type(norm) is Tensor and norm.device.type == "cpu" and norm.numel() == 1:
        return _C.clip_factor(max_norm, norm.item())
    factor = _factor_by_torch(max_norm, norm)
    if type(factor) is DTensor:
        if not all(placement.is_replicate() for placement in factor.placements):
            return None
        factor = factor._local_tensor
    return float(factor) if type(factor) is Tensor else None


def _factor_by_torch(max_norm: float, norm: Tensor) -> Any:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@functools.cache
@torch.inference_mode(False)
def _agrees() -> bool:
    """Whether norms and factors have this torch's bits on this CPU, tried on a few numbers."""
    layout = _C.Layout(None)
    values = torch.arange(5000.0, device="cpu", dtype=torch.float32).add(1).sin()
    for numel in (*range(17), 75, 4099):
        for start, scale in ((0, 1.0), (11, 1.0), (23, 10.0), (35, 1e-30), (47, 0.1)):
            tensor = values[start : start + numel] * scale
            if not torch.equal(
                layout.collect([tensor]).norms()[0], torch.linalg.vector_norm(tensor)
            ):
                return False
    for norm in (0.0, 1e-7, 0.3, 0.999999, 7.7, 1e30, math.inf):
        tensor = torch.tensor(norm, device="cpu", dtype=torch.float32)
        for max_norm in (-0.1, 0.0, 0.1, 1.0, 3.3, 1e300, math.inf):
            factor = torch.tensor(_C.clip_factor(max_norm, norm), device="cpu")
            if not torch.allclose(
                factor, _factor_by_torch(max_norm, tensor), rtol=0, atol=0, equal_nan=True
            ):
                return False
    return True
