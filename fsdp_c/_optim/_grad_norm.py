"""Gradient clipping over the local tensors of sharded gradients.

`torch.nn.utils.clip_grad_norm_` takes the norm of every gradient, stacks them, adds up squares over
ranks, takes the norm of that, and multiplies every gradient. Here the first and the last are done
to local tensors: float32 in CPU memory in a pass each, others by the functions that torch calls for
plain tensors. What lies between is torch's code on one DTensor the first time, and then the same
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
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
)

from fsdp_c._comm import _communicator, _transport
from fsdp_c._native import _C
from fsdp_c._optim import _dispatch_modes

# A norm as torch returns it, and the same as a plain tensor; None: this rank has only a part of it.
Total = tuple[Tensor, Tensor | None]


class _Layout:
    """Gradients on one mesh with the same placements."""

    def __init__(self, spec: DTensorSpec) -> None:
        self.mesh = spec.mesh
        self.is_partial = any(placement.is_partial() for placement in spec.placements)
        self._placements = spec.placements
        self._shard_dims = [
            dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()
        ]
        self.n_parts = math.prod(spec.mesh.size(dim) for dim in self._shard_dims)
        self.is_whole = self.n_parts == 1
        self._norm_placements: dict[float, tuple[Any, ...]] = {}

    def communicator(self) -> _communicator.Communicator | None:
        """Between the ranks that hold parts; None unless these share memory already."""
        if self.is_whole or len(self._shard_dims) != 1:
            return None
        group = self.mesh.get_group(self._shard_dims[0])
        return (
            _communicator.communicator_for(group)
            if _transport.transport_kind(group) == "shm"
            else None
        )

    def placements_of_norms(self, norm_type: float) -> tuple[Any, ...]:
        if norm_type not in self._norm_placements:
            sharded = [self._placements[dim] for dim in self._shard_dims]
            n_dims = 1 + max((placement.dim for placement in sharded), default=0)
            one = DTensor.from_local(
                torch.ones((1,) * n_dims), self.mesh, self._placements, run_check=False
            )
            placements = torch.linalg.vector_norm(one, norm_type).placements
            self._norm_placements[norm_type] = placements
        return self._norm_placements[norm_type]


class _Totals:
    """Total norms of gradients with these layouts, which are on one mesh."""

    def __init__(self, layouts: list[_Layout]) -> None:
        self._layouts = layouts
        self._mesh = layouts[0].mesh
        self._is_whole = all(layout.is_whole for layout in layouts)
        # Of results, as torch lays them out; where the short way is open.
        self._specs: dict[tuple[float, torch.dtype], DTensorSpec] = {}
        self._rows: tuple[Any, Tensor | None] = (None, None)  # what `_rows_of` was asked for last

    def short_spec(
        self, norms: Tensor, norm_type: float, comm: _communicator.Communicator | None
    ) -> DTensorSpec | None:
        """Of the result; None if torch has to find it."""
        is_open = self._is_whole or (comm is not None and norms.is_cpu)
        return self._specs.get((norm_type, norms.dtype)) if is_open else None

    def short(
        self,
        norms: Tensor,
        norm_type: float,
        spec: DTensorSpec,
        comm: _communicator.Communicator | None,
    ) -> Total:
        """What torch computes, without its dispatch, and over shared memory."""
        is_extreme = math.isinf(norm_type)
        if comm is not None and not is_extreme:
            sums = norms if norm_type == 0 else torch.pow(norms, norm_type)
            comm.all_reduce(sums)
            norms = sums if norm_type == 0 else torch.pow(sums, 1.0 / norm_type)
        if norm_type == 2.0 and norms.is_cpu and norms.dtype == torch.float32 and _agrees():
            total = _C.norm(norms)
        else:
            total = torch.linalg.vector_norm(norms, norm_type)
        whole = total
        if comm is not None and is_extreme:
            parts = total.new_empty(self._layouts[0].n_parts)
            comm.all_gather(parts, total.reshape(1))
            whole = parts.amax() if norm_type > 0 else parts.amin()
        return DTensor(total, spec, requires_grad=False), whole

    def by_torch(self, norms: Tensor, norm_type: float, found: Any) -> Total | None:
        placements = [layout.placements_of_norms(norm_type) for layout in self._layouts]
        are_alike = placements.count(placements[0]) == len(placements)
        if are_alike:
            stacked = self._dtensor(norms, placements[0])
        elif found.is_uniform:
            stacked = self._merged(norms, placements, found.numbers())
        else:
            return None
        total = torch.linalg.vector_norm(stacked, norm_type)
        if are_alike or self._is_whole:
            self._specs[norm_type, norms.dtype] = total._spec
        return total, whole_of(total)

    def _dtensor(self, norms: Tensor, placements: tuple[Any, ...]) -> DTensor:
        meta = TensorMeta(norms.shape, norms.stride(), norms.dtype)
        spec = DTensorSpec(self._mesh, placements, tensor_meta=meta)
        return DTensor(norms, spec, requires_grad=False)

    def _merged(
        self, norms: Tensor, placements: list[tuple[Any, ...]], numbers: tuple[int, ...]
    ) -> DTensor:
        """As torch stacks norms that are laid out differently: all of them in every layout, of
        which each norm's own is taken."""
        every = torch.stack([self._dtensor(norms, each) for each in placements])
        rows = self._rows_of(numbers, norms.device)
        return self._dtensor(every._local_tensor.gather(0, rows)[0], every.placements)

    def _rows_of(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """[1, n], for each tensor which of the layouts it has."""
        if self._rows[0] != (numbers, device):
            layouts = list(dict.fromkeys(numbers))
            rows = [[layouts.index(number) for number in numbers]]
            self._rows = ((numbers, device), torch.tensor(rows, device=device))
        return self._rows[1]


_known = _C.Layouts()
_layouts: dict[int, _Layout] = {}  # by their numbers there
_totals: dict[tuple[int, ...], _Totals | None] = {}  # by numbers of layouts; None: torch's


def _layout_at(number: int) -> _Layout:
    if number not in _layouts:
        _layouts[number] = _Layout(_known.spec(number))
    return _layouts[number]


def layout_of(tensors: Iterable[Tensor | None]) -> _Layout | None:
    """The layout of the first one; None if torch has to do it all."""
    first: Any = next((tensor for tensor in tensors if tensor is not None), None)
    if type(first) is not DTensor or torch.compiler.is_compiling():
        return None
    # A fake tensor has nothing to send, and other ranks may have real ones.
    if type(first._local_tensor) is not Tensor:
        return None
    layout = _layout_at(_known.number(first._spec))
    return None if layout.is_partial else layout


def first_layout(found: Any) -> _Layout | None:
    """`layout_of` what was collected."""
    number = found.layouts[0]
    if number < 0 or (layout := _layout_at(number)).is_partial:
        return None
    return layout


def collect(tensors: list[Tensor]) -> Any:
    """Local tensors; None if some are of unusual kinds, none is sharded, or somebody looks on."""
    return _usable(_known.collect(tensors)) if _may_collect() else None


def collect_gradients(params: list[Tensor]) -> Any:
    """`collect` for the gradients that the parameters have."""
    return _usable(_known.collect_gradients(params)) if _may_collect() else None


def has_dtensors(tensors: list[Tensor], gradients: bool = False) -> bool:
    """Among the tensors, or among the gradients that they have."""
    given = (tensor for tensor in tensors if isinstance(tensor, Tensor))
    return any(isinstance(t.grad if gradients else t, DTensor) for t in given)


def _may_collect() -> bool:
    return not torch.compiler.is_compiling() and not _dispatch_modes.see_operations()


def _usable(found: Any) -> Any:
    """torch computes norms of other types in float32 under autocast."""
    if found is None or found.is_flat:
        return found
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return None if is_cast else found


def total(
    first: _Layout | None, found: Any, norm_type: float, foreach: bool | None
) -> Total | None:
    """The norm of all tensors on a mesh, the first of which has the layout `first`; None if torch
    has to find it. Collective, like torch's."""
    if first is None:
        return None
    totals = None if found is None else _totals_of(found.layouts)
    norms = None if totals is None else _norms(found, norm_type, foreach)
    comm = first.communicator()
    spec = None if norms is None else totals.short_spec(norms, norm_type, comm)
    # The short way has to be open to all ranks.
    if comm.all_agree(spec is not None) if comm is not None else spec is not None:
        return totals.short(norms, norm_type, spec, comm)
    return None if norms is None else totals.by_torch(norms, norm_type, found)


def _totals_of(numbers: tuple[int, ...]) -> _Totals | None:
    if numbers not in _totals:
        layouts = [_layout_at(number) for number in numbers]
        is_partial = any(layout.is_partial for layout in layouts)
        _totals[numbers] = None if is_partial else _Totals(layouts)
    return _totals[numbers]


def _norms(found: Any, norm_type: float, foreach: bool | None) -> Tensor:
    """That of each local tensor."""
    if norm_type == 2.0 and found.is_flat and _agrees():
        return found.norms()
    locals_ = found.tensors()
    groups = _groups(found, locals_)
    norms: list[Tensor] = []
    for tensors in groups:
        if norm_type < 0 or math.isinf(norm_type):
            # torch refuses these of no elements, on the ranks that have none.
            fill = 0.0 if norm_type > 0 else math.inf
            tensors = [t if t.numel() > 0 else t.new_full((1,), fill) for t in tensors]
        # As plain tensors are taken: torch takes DTensors one by one, with launches for each. On a
        # CPU the function for many does too.
        if foreach or (foreach is None and _device_has_foreach_support(tensors[0].device)):
            norms.extend(torch._foreach_norm(tensors, norm_type))
        else:
            norms.extend(torch.linalg.vector_norm(t, norm_type) for t in tensors)
    if len(groups) > 1:
        norms = [norm.to(locals_[0].device) for norm in norms]
    return torch.stack(norms)


def _groups(found: Any, locals_: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and dtype, in torch's order."""
    if found.is_uniform:
        return [locals_]
    grouped: Any = _group_tensors_by_device_and_dtype([locals_])
    return [tensors for (tensors,), _ in grouped.values()]


def multiply(
    found: Any, max_norm: float, norm: Tensor, whole: Tensor | None, foreach: bool | None
) -> bool:
    """Clips what was collected; False if torch has to. `whole`: of `norm`, where it is known."""
    max_norm = float(max_norm)
    if whole is None:
        whole = whole_of(norm)
    if whole is None:
        factor = whole_of(_factor_by_torch(max_norm, norm))
        if factor is None:
            return False
    elif found.is_flat and whole.is_cpu and whole.dtype == torch.float32 and _agrees():
        found.multiply(_C.clip_factor(max_norm=max_norm, norm=whole.item()))
        return True
    else:
        factor = _factor_by_torch(max_norm, whole)
    for tensors in _groups(found, found.tensors()):
        there = factor.to(tensors[0].device)
        if foreach is None or foreach:
            torch._foreach_mul_(tensors, there)
        else:
            for tensor in tensors:
                tensor.mul_(there)
    found.count_versions()
    return True


def _factor_by_torch(max_norm: float, norm: Tensor) -> Any:
    """What gradients are multiplied by."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def whole_of(number: Any) -> Tensor | None:
    """A number as a plain tensor, without asking other ranks; None if that cannot be."""
    if type(number) is DTensor:
        spec, number = number._spec, number._local_tensor
        for dim, placement in enumerate(spec.placements):
            if not placement.is_replicate() and spec.mesh.size(dim) > 1:
                return None
    is_usual = type(number) is Tensor and number.dim() == 0 and number.is_floating_point()
    return number if is_usual else None


@functools.cache
@torch.inference_mode(False)
def _agrees() -> bool:
    """Whether norms and factors have this torch's bits on this CPU, tried on a few numbers."""
    values = torch.arange(5000.0, device="cpu", dtype=torch.float32).add(1).sin()
    for numel in (*range(17), 75, 4099):
        for start, scale in ((0, 1.0), (11, 1.0), (23, 10.0), (35, 1e-30), (47, 0.1)):
            tensor = values[start : start + numel] * scale
            if not torch.equal(_C.norm(tensor), torch.linalg.vector_norm(tensor)):
                return False
    for norm in (0.0, 1e-7, 0.3, 0.999999, 7.7, 1e30, math.inf):
        tensor = torch.tensor(norm, device="cpu", dtype=torch.float32)
        for max_norm in (-0.1, 0.0, 0.1, 1.0, 3.3, 1e300, math.inf):
            factor = torch.tensor(_C.clip_factor(max_norm=max_norm, norm=norm), device="cpu")
            if not torch.allclose(
                factor, _factor_by_torch(max_norm, tensor), rtol=0, atol=0, equal_nan=True
            ):
                return False
    return True
