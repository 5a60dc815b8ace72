"""Bytes of a rank by purpose: what is held between steps, and on top at the worst moment of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_c._diagnostics import _stats
from fsdp_c._estimate._segments import Rules, Segment, Trace
from fsdp_c._estimate._volume import Unit
from fsdp_c._fully_shard._param_spec import UnitSpec
from fsdp_c._memory import _memory_plan
from fsdp_c._memory._optimizer_state import StateSize
from fsdp_c._native import _C
from fsdp_c.strategy import Strategy
from fsdp_c.strategy._strategies import REPLICATE

PURPOSES = {
    **_stats.PURPOSES,
    "activations": "kept from forward for backward",
    "in backward": "on top: whole gradients and temporaries",
}


@dataclass(frozen=True)
class Memory:
    """Bytes. `device` by purpose, at the moment when most is held; `host`: what is offloaded."""

    device: dict[str, int]
    host: int
    state: int  # of the optimizer, wherever it lies
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.device.values())


def rules_of(
    engine: str, strategy: Strategy, n_shards: int, dtype: Any, accumulates: bool
) -> Rules:
    """How unsharded gradients live in a step."""
    if engine == "core":
        borrowed = _C.BORROWED_BYTES_MAX if n_shards > 1 else 0
        keeps = accumulates and strategy.keeps_unsharded_gradients
        return Rules(dtype, keeps, borrowed_bytes=borrowed, on_cpu=True)
    return Rules(dtype, keeps_gradients=accumulates and strategy.keeps_unsharded_gradients)


def memory_of(
    engine: str,
    model: nn.Module,
    units: Sequence[Unit],
    strategy: Strategy,
    n_shards: int,
    n_replicas: int,
    ranks_per_host: int,
    optimizer: Callable[[Any], Any] | None,
    trace: Trace,
    offload: bool,
) -> Memory:
    state_size = StateSize(optimizer)
    outside = _memory_plan._outside(model, ())
    state = sum(state_size(row, n_shards) for unit in units for row in unit.rows)
    if engine == "core":
        plan = _memory_plan._planned(
            [UnitSpec(unit.name, unit.planned) for unit in units],
            outside,
            n_shards,
            n_replicas,
            ranks_per_host,
            state_size,
            (),
            has_replicas=REPLICATE in strategy.dims,
        )
        device = {**plan.rank, "optimizer": state, **_of_trace(trace, trace.peak)}
        device["gradients"] -= _never_made(units, n_shards, n_replicas)
        return Memory(_ordered(device), 0, state, (*plan.notes, *_on_unreached(trace)))
    held = {
        "parameters": sum(unit.shard for unit in units),
        "gradients": sum(unit.shard_gradient for unit in units),
        "optimizer": state,
    }
    host = 0
    if offload:
        host = sum(held.values())
        # What is copied to the device for a unit, and from it, is one shard of it at a time.
        held = dict.fromkeys(held, 0)
        held["parameters"] = max((unit.shard for unit in units), default=0)
    held["parameters"] += outside
    largest = max((unit.unsharded_reduce for unit in units), default=0)
    held["reduce slots"] = largest if n_shards * n_replicas > 1 else 0
    slots, live = _worst_moment(trace.segments, units, strategy, n_shards)
    device = {**held, "gather slots": slots, **_of_trace(trace, live)}
    return Memory(_ordered(device), host, state, _on_unreached(trace))


def _never_made(units: Sequence[Unit], n_shards: int, n_replicas: int) -> int:
    """Planned gradients of units of which no parameter gets one."""
    specs = [UnitSpec(unit.name, unit.planned) for unit in units if not unit.unsharded_reduce]
    if not specs:
        return 0
    sizes = _C.Domain.plan(
        is_replicate=False,
        units=specs,
        n_shards=n_shards,
        n_ranks=n_shards * n_replicas,
        is_mapped=True,
    )
    return sizes["grads"]


def _on_unreached(trace: Trace) -> tuple[str, ...]:
    names = sorted(trace.unreached)
    if not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"No gradient reaches {', '.join(names[:3])}{more}: counted without one",)


def _ordered(device: dict[str, int]) -> dict[str, int]:
    return {name: device.get(name, 0) for name in PURPOSES}


def _of_trace(trace: Trace, live: int) -> dict[str, int]:
    kept = min(trace.kept, live)
    return {"activations": kept, "in backward": live - kept}


def _worst_moment(
    segments: Sequence[Segment], units: Sequence[Unit], strategy: Strategy, n_shards: int
) -> tuple[int, int]:
    """Bytes of gathered units, and of activations with gradients, when the sum is largest.

    As torch's implementation does it: beside the unit that runs there is the buffer of a further
    one, in forward the one that it was gathered into, in backward the one that is gathered ahead.
    """
    by_name = {unit.name: unit for unit in units}
    sizes = {unit.name: _gathered(unit, n_shards) for unit in units}
    order = list(dict.fromkeys(s.module for s in segments if s.module in by_name))
    stays = [n for n in order if by_name[n].is_root or not strategy.reshard_after_forward]
    worst = (0, 0)
    begun: list[str] = []
    for segment in segments:
        name = segment.module if segment.module in by_name else ""
        if segment.phase == "forward":
            if name not in begun:
                begun.append(name)
            further = sizes.get(name, 0)
            unsharded = [one for one in stays if one in begun]
        else:
            place = order.index(name) if name in order else 0
            before = order[max(place - 1, 0)] if order else ""
            further = sizes.get(before, 0) if before not in stays else 0
            # In backward units are given up from the last one on; the root at the very end.
            unsharded = [one for one in stays if one == "" or order.index(one) <= place or not name]
        slots = sum(sizes[one] for one in unsharded) + further
        if name not in unsharded:
            slots += sizes.get(name, 0)
        if n_shards == 1:
            slots -= further
        if slots + segment.peak > sum(worst):
            worst = slots, segment.peak
    return worst


def _gathered(unit: Unit, n_shards: int) -> int:
    """Of parameters that are unsharded anyway only those that are cast take memory again."""
    return unit.unsharded_compute if n_shards > 1 or unit.casts else 0
