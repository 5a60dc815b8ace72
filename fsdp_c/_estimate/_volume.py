"""Units as estimates see them: bytes in each form, and what collectives move per step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_c._estimate._segments import Trace
from fsdp_c._fully_shard._param_spec import ParamSpec
from fsdp_c._memory import _memory_plan
from fsdp_c._memory._optimizer_state import shard_numel
from fsdp_c.strategy import Strategy

Rows = list[ParamSpec]
_RAILS_SMALL = 32 << 10  # ALL_REDUCE_SMALL_BYTES in csrc/comm/rails_collectives.c


@dataclass(frozen=True)
class Unit:
    """Bytes of one unit on a rank. `unsharded_*` with the padding that equal shards need."""

    name: str  # dotted name of its module; "" is the model itself
    numel: int
    rows: Rows  # as fsdp_c._memory._memory_plan makes them; trained: gets a gradient
    planned: Rows  # the same; trained: wants one
    shard: int  # in the original dtype
    shard_gradient: int
    unsharded_compute: int  # gathered
    unsharded_reduce: int  # sent to a reduction
    casts: bool  # computes in another dtype than the original
    is_root: bool  # runs from the beginning to the end
    is_recomputed: bool = False  # inside a checkpointed module: gathered to compute it again too
    forwards: int = 1  # per micro-batch
    backwards: int = 1

    def gathers(self, strategy: Strategy) -> int:
        """Per micro-batch. Each backward gives the parameters up, also if more are to come."""
        if strategy.reshard_after_forward:
            return self.forwards + self.backwards + (self.is_recomputed and self.forwards)
        return min(self.forwards, 1) + max(self.backwards - 1, 0)

    def reductions(self, engine: str) -> int:
        """Per backward: the core adds up what a unit's calls leave, torch sends each."""
        if not self.unsharded_reduce:
            return 0
        return 1 if engine == "core" else max(self.backwards, 1)


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step of one rank."""

    kind: str
    over: str  # "shard" or "replicate": the mesh dim
    count: int
    received: int  # bytes that it brings to the rank, whatever the algorithm
    sent: int = 0  # of the core: bytes that the rank sends to other hosts


def units_of(
    model: nn.Module,
    units: Sequence[nn.Module],
    policy: MixedPrecisionPolicy,
    n_shards: int,
    stored: torch.dtype | None = None,
    gathered_again: Iterable[nn.Module] = (),
    trace: Trace | None = None,
) -> list[Unit]:
    """Units in the order given, the model itself last if it has parameters of its own.

    `stored`: the dtype of all floating-point parameters, if it is not the one that they have now.
    `gathered_again`: modules that are computed again, and the units inside gathered for it.
    `trace`: how often units run, and what gets no gradient; default: each once, and all do.
    """
    names = {module: name for name, module in model.named_modules()}
    recomputed = {m for outer in gathered_again for m in outer.modules() if m is not outer}
    found = []
    unreached = {model.get_parameter(name) for name in trace.unreached} if trace else set()
    rows_given = functools.partial(_memory_plan.rows_by_module, model, units, policy, n_shards)
    for (module, planned), (_, rows) in zip(rows_given(), rows_given(unreached), strict=True):
        if stored is not None:
            planned, rows = _stored_in(stored, planned), _stored_in(stored, rows)
        unit = _unit(names[module], rows, n_shards, module is model)
        unit = replace(unit, planned=planned, is_recomputed=module in recomputed)
        if trace is not None:
            calls = [trace.calls(phase, unit.name) for phase in ("forward", "backward")]
            unit = replace(unit, forwards=calls[0], backwards=calls[1])
        found.append(unit)
    return found


def _stored_in(dtype: torch.dtype, rows: Rows) -> Rows:
    dtypes = dict.fromkeys(("orig", "compute", "reduce", "grad"), dtype)
    return [row._replace(**dtypes) if row.has_grad else row for row in rows]


def _unit(name: str, rows: Rows, n_shards: int, is_root: bool) -> Unit:
    numels = [shard_numel(row, n_shards) for row in rows]
    trained = [(n, row) for n, row in zip(numels, rows, strict=True) if row.trainable]
    return Unit(
        name,
        sum(n * n_shards for n in numels),
        rows,
        rows,
        shard=sum(n * row.orig.itemsize for n, row in zip(numels, rows, strict=True)),
        shard_gradient=sum(n * row.grad.itemsize for n, row in trained),
        unsharded_compute=sum(
            n * n_shards * row.compute.itemsize for n, row in zip(numels, rows, strict=True)
        ),
        unsharded_reduce=sum(n * n_shards * row.reduce.itemsize for n, row in trained),
        casts=any(row.orig != row.compute for row in rows),
        is_root=is_root,
    )


def traffic_of(
    units: Sequence[Unit],
    engine: str,
    strategy: Strategy,
    n_shards: int,
    n_replicas: int,
    micro_batches: int = 1,
    rank: int = 0,
    per_host: int = 0,
) -> list[Traffic]:
    """What a rank of a shard group takes part in during one optimizer step.

    As `fsdp_c._diagnostics._traffic.Traffic` counts: peers' chunks of an all-gather, a chunk per
    peer of a reduce-scatter, twice (n-1)/n of what replicas all-reduce; without padding. With
    `per_host` ranks on each host, shard groups next to each other, the core's rails carry what is
    in the note of csrc/comm/rails.h.
    """
    gathers = reduces = gathered = scattered = replicas = summed = 0
    shard_hosts, replica_hosts = _other_hosts(n_shards, n_replicas, per_host)
    sent = dict.fromkeys(("gather", "reduce", "all-reduce"), 0)
    for unit in units:
        if n_shards > 1:
            n_gathers = micro_batches * unit.gathers(strategy)
            gathers += n_gathers
            sent["gather"] += n_gathers * shard_hosts * unit.unsharded_compute // n_shards
            gathered += n_gathers * sum(
                (row.outer * row.rows * row.inner - own_numel(row, n_shards, rank))
                * row.compute.itemsize
                for row in unit.rows
            )
        if unit.unsharded_reduce:
            n_reduced = 1 if strategy.keeps_unsharded_gradients else micro_batches
            n_reduced *= unit.reductions(engine)
            chunk = sum(
                own_numel(row, n_shards, rank) * row.reduce.itemsize
                for row in unit.rows
                if row.trainable
            )
            if n_shards > 1:
                reduces += n_reduced
                sent["reduce"] += n_reduced * shard_hosts * unit.unsharded_reduce // n_shards
                scattered += n_reduced * chunk * (n_shards - 1)
            if n_replicas > 1:  # once per step: until then sums over shards wait
                replicas += 1
                summed += 2 * (n_replicas - 1) * chunk // n_replicas
                sent["all-reduce"] += replica_hosts * _rails_all_reduce(
                    unit.unsharded_reduce // n_shards, n_replicas
                )
    if engine != "core":
        sent = dict.fromkeys(sent, 0)
    rows = [
        Traffic("all-gather", "shard", gathers, gathered, sent["gather"]),
        Traffic("reduce-scatter", "shard", reduces, scattered, sent["reduce"]),
        Traffic("all-reduce", "replicate", replicas, summed, sent["all-reduce"]),
    ]
    return [row for row in rows if row.count]


def _other_hosts(n_shards: int, n_replicas: int, per_host: int) -> tuple[int, int]:
    """How many hosts a rank's shard group and its replicas have beside its own."""
    if per_host == 0:
        return 0, 0
    replicas_here = max(1, per_host // n_shards)
    return -(-n_shards // per_host) - 1, -(-n_replicas // replicas_here) - 1


def _rails_all_reduce(n_bytes: int, n: int) -> int:
    """Bytes to each other host: a part of n there and back, or all if that is little."""
    return n_bytes if n_bytes <= _RAILS_SMALL else 2 * -(-n_bytes // n)


def own_numel(row: tuple[Any, ...], n_shards: int, rank: int) -> int:
    """Elements of a rank's chunk, without padding: later ranks may have less, or nothing."""
    outer, n_rows, inner = row.outer, row.rows, row.inner
    chunk = -(-n_rows // n_shards)
    return outer * inner * max(0, min(chunk, n_rows - chunk * rank))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
