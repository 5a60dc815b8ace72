"""Collectives of units that tools and users see: torch's calls, sizes, dtypes and order.

The engine packs shards and gradients and takes out what came back. In between a unit calls what
torch's group would call: its `_all_gather_comm` and `_reduce_scatter_comm`, `dist.all_reduce`,
then the all-reduce hook. Where nobody looks, the package's own collectives stand in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c._comm import _communicator, _transport
from fsdp_c._compat import _versions

Collective = Callable[..., Any]


class VisibleMessages(_transport.Messages):
    """What the engine calls to move units between the ranks of one dimension of their mesh.

    Tensors are 1-d, of the engine's memory, and valid during the call.

    Args:
        param_groups: whose collectives these are, in the domain's order.
        process_group: the ranks: of their shards or of their replicas.
        is_last: no other dimension sums after this one.
        shards: the ranks over which the engine has summed up what replicas are given, undivided.
        stands_in: the package's own collectives are there for those that nobody looks at.
    """

    def __init__(
        self,
        param_groups: Sequence[Any],
        process_group: dist.ProcessGroup,
        is_last: bool,
        shards: dist.ProcessGroup | None = None,
        stands_in: bool = True,
    ) -> None:
        super().__init__(process_group)
        self._param_groups = [weakref.ref(group) for group in param_groups]
        self._is_last = is_last
        self._shards = shards
        self._stands_in = stands_in
        self._index = 0

    def begin(self, unit: int) -> None:
        """The next collective is of this unit."""
        self._index = unit

    def _unit(self) -> Any:
        unit = self._param_groups[self._index]()
        if unit is None:
            raise RuntimeError("the module of the unit is gone")
        return unit

    # ---- gathers ----

    @torch.no_grad()
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        unit, process_group = self._unit(), self._live_group()
        n_ranks = process_group.size()
        if n_ranks == 1:
            output.copy_(input)
            return
        if self._stands_in and not unit.visible.sees_gathers:
            _communicator.communicator_for(process_group).all_gather(output, input)
            return
        dtype, comm = _gathered_dtype(unit), unit._all_gather_comm
        input = input.view(dtype)
        gathered = comm.allocate((n_ranks * input.numel(),), dtype=dtype, device=unit.device)
        own = gathered.narrow(0, process_group.rank() * input.numel(), input.numel())
        own.copy_(input)
        work = comm(
            output_tensor=gathered,
            input_tensor=own,
            group=process_group,
            async_op=unit.gathers_async,
        )
        if isinstance(work, dist.distributed_c10d.Work):
            work.wait()
        output.view(dtype).copy_(gathered)

    # ---- sums ----

    @torch.no_grad()
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """The sum, or what torch's group has at this place: an average, hooked and divided."""
        unit, process_group = self._unit(), self._live_group()
        before, after, op, _ = _versions.divide_factors(unit, input.dtype)
        divisor = _divisor_of(op, process_group, unit.gradient_divide_factor)
        if self._stands_in and not unit.visible.sees_sums:
            _divide(input, before)
            _communicator.communicator_for(process_group).reduce_scatter(output, input, divisor)
            self._finish(unit, output, after)
            return
        comm = unit._reduce_scatter_comm
        input, output = _as_gradients(unit, input), _as_gradients(unit, output)
        sent = comm.allocate((input.numel(),), dtype=input.dtype, device=unit.device)
        sent.copy_(input)
        received = comm.allocate((output.numel(),), dtype=input.dtype, device=unit.device)
        _divide(sent, before)
        if process_group.size() > 1:
            comm(
                output_tensor=received,
                input_tensor=sent,
                group=unit._reduce_scatter_process_group,
                op=op,
            )
        else:
            received.copy_(sent)
            _divide(received, divisor)
        self._finish(unit, received, after)
        output.copy_(received)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor) -> None:
        unit, process_group = self._unit(), self._live_group()
        before, after, shard_op, op = _versions.divide_factors(unit, tensor.dtype)
        if self._shards is not None:
            _divide(tensor, before)
            _divide(tensor, _divisor_of(shard_op, self._shards, unit.gradient_divide_factor))
        if unit.visible.sees_sums or not self._stands_in:
            tensor = _as_gradients(unit, tensor)
            dist.all_reduce(tensor, group=process_group, op=op)
        else:
            divisor = _divisor_of(op, process_group, None)
            _communicator.communicator_for(process_group).all_reduce(tensor, divisor)
        self._finish(unit, tensor, after)

    def _finish(self, unit: Any, tensor: torch.Tensor, after: float | None) -> None:
        if not self._is_last:
            return
        if unit._all_reduce_hook is not None:
            with _stream_of_hook(unit):
                unit._all_reduce_hook(_as_gradients(unit, tensor))
        _divide(tensor, after)


@contextmanager
def _stream_of_hook(unit: Any) -> Iterator[None]:
    """The one that was given with it, between what is in the current one before and afterwards."""
    stream = unit._all_reduce_hook_stream
    if stream is None or unit.device.type == "cpu":
        yield
        return
    current = torch.accelerator.current_stream(unit.device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def _gathered_dtype(unit: Any) -> torch.dtype:
    dtypes = set()
    for fsdp_param in unit.fsdp_params:
        dtypes |= {tensor.dtype for tensor in fsdp_param.inputs} or {
            _versions.compute_dtype(fsdp_param)
        }
    return dtypes.pop() if len(dtypes) == 1 else torch.uint8


def _as_gradients(unit: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Of complex numbers where all parameters have them: the engine adds up pairs."""
    if not tensor.is_complex() and all(p.orig_dtype.is_complex for p in unit.fsdp_params):
        return torch.view_as_complex(tensor.view(tensor.numel() // 2, 2))
    return tensor


def _divisor_of(op: Any, process_group: dist.ProcessGroup, factor: float | None) -> float:
    """What `op` divides by; one that scales is of the unit's divide factor."""
    if op == dist.ReduceOp.AVG:
        return process_group.size()
    return 1.0 if op == dist.ReduceOp.SUM or factor is None else factor


def _divide(tensor: torch.Tensor, factor: float | None) -> None:
    if factor is not None and factor != 1:
        tensor.div_(factor)
