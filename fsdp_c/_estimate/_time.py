"""Seconds of a step: the work of each stretch, collectives by latency and bandwidth, in streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_c._estimate._hardware import NCCL_RING, Hardware
from fsdp_c._estimate._segments import Segment
from fsdp_c._estimate._volume import Unit
from fsdp_c.strategy import Strategy


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step on one rank."""

    compute: float
    optimizer: float
    communication: float  # of all collectives, had they the links to themselves
    exposed: float  # of it, what no computation hides

    @property
    def step(self) -> float:
        return self.compute + self.optimizer + self.exposed


@dataclass(frozen=True)
class World:
    """Who talks to whom: ranks of a host are next to each other, shard groups first."""

    hardware: Hardware
    n_shards: int
    n_replicas: int
    ranks_per_host: int

    @property
    def turns(self) -> float:
        """How many ranks share what one had alone: ranks of a host over its cores."""
        cores = self.hardware.cores
        return max(1.0, self.ranks_per_host / cores) if cores else 1.0


def times_of(
    segments: Sequence[Segment],
    units: Sequence[Unit],
    strategy: Strategy,
    world: World,
    dtype: str,
    state_bytes: int,
    micro_batches: int,
    offload: bool,
    sent_over_rails: int,
) -> Times:
    hardware = world.hardware
    seconds = [work_of(segment, hardware, dtype) * world.turns for segment in segments]
    run = _on_core if hardware.engine == "core" else _on_streams
    last = run(segments, seconds, units, strategy, world, True)
    compute = sum(seconds) * micro_batches
    step, communication = last
    if micro_batches > 1:
        keeps = strategy.keeps_unsharded_gradients
        other = run(segments, seconds, units, strategy, world, not keeps)
        step += (micro_batches - 1) * other[0]
        communication += (micro_batches - 1) * other[1]
    rails = sent_over_rails / hardware.network  # nothing is computed meanwhile
    step += rails
    communication += rails
    optimizer = _optimizer_seconds(units, state_bytes, hardware, offload) * world.turns
    return Times(compute, optimizer, communication, max(step - compute, 0.0))


def work_of(segment: Segment, hardware: Hardware, dtype: str) -> float:
    """Matrix products are bound by arithmetic or by memory, the rest by memory."""
    products = max(
        segment.flops / hardware.flops_of(dtype), segment.matrix_bytes / hardware.bandwidth
    )
    rest = segment.other_bytes / hardware.bandwidth + segment.n_ops * hardware.per_op
    return products + rest


def _optimizer_seconds(
    units: Sequence[Unit], state_bytes: int, hardware: Hardware, offload: bool
) -> float:
    """A pass over memory: parameters and state are read and written, gradients read."""
    params = sum(unit.shard for unit in units)
    grads = sum(unit.shard_gradient for unit in units)
    moved = 2 * params + grads + 2 * state_bytes
    if not offload:
        return moved / hardware.bandwidth
    # On the host: memory there is slower than the link, which parameters and gradients cross too.
    return moved / hardware.host_link


# ---- NCCL: a stream of collectives beside the one that computes ----


def ring_seconds(n_bytes: float, n: int, per_host: int, hardware: Hardware) -> float:
    """An all-gather or reduce-scatter of `n_bytes` in all over n ranks, `per_host` on each host."""
    if n == 1 or n_bytes == 0:
        return 0.0
    hosts = -(-n // per_host)
    bandwidth = _ring_bandwidth(n, per_host, hardware)
    best = float("inf")
    for name, (share, begin, nvlink, pcie, network) in NCCL_RING.items():
        if name == "LL128" and hardware.link_kind != "nvlink":
            continue
        inside = nvlink if hardware.link_kind == "nvlink" else pcie
        hops_outside = hosts - 1
        latency = begin + (n - 1 - hops_outside) * inside + hops_outside * network
        moved = n_bytes * (n - 1) / n / (bandwidth * share)
        best = min(best, latency * 1e-6 + moved)
    return best


def _ring_bandwidth(n: int, per_host: int, hardware: Hardware) -> float:
    """A ring leaves a host once; there are as many rings as network ports of devices in it."""
    inside = hardware.link
    if n <= per_host:
        return inside
    outside = per_host * hardware.network
    return min(inside, outside) if per_host > 1 else outside


def _shard_seconds(n_bytes: int, world: World) -> float:
    per_host = min(world.n_shards, world.ranks_per_host)
    return ring_seconds(n_bytes, world.n_shards, per_host, world.hardware)


def _replica_seconds(unit: Unit, world: World) -> float:
    """An all-reduce of a rank's part: twice a ring; devices of a host do theirs side by side."""
    n = world.n_replicas
    per_host = max(1, world.ranks_per_host // world.n_shards)
    part = unit.unsharded_reduce / world.n_shards
    hardware = world.hardware
    return 2 * ring_seconds(part, n, min(per_host, n), hardware)


def _on_streams(
    segments: Sequence[Segment],
    seconds: Sequence[float],
    units: Sequence[Unit],
    strategy: Strategy,
    world: World,
    reduces: bool,
) -> tuple[float, float]:
    """One micro-batch: when it ends, and how long collectives took. Gathers run one unit ahead."""
    by_name = {unit.name: unit for unit in units}
    compute = comm = total = 0.0
    gathered: dict[tuple[str, str], float] = {}
    sequence = _needs(segments, by_name, strategy)

    def gather(key: tuple[str, str], ready: float) -> None:
        nonlocal comm, total
        if key not in gathered:
            unit = by_name[key[1]]
            took = _shard_seconds(unit.unsharded_compute, world)
            if unit.is_recomputed and key[0] == "backward":
                took *= 2
            comm = max(comm, ready) + took
            total += took
            gathered[key] = comm

    def reduce(unit: Unit, ready: float) -> None:
        nonlocal comm, total
        if reduces and unit.unsharded_reduce:
            took = _shard_seconds(unit.unsharded_reduce, world) + _replica_seconds(unit, world)
            comm = max(comm, ready) + took
            total += took

    done: set[str] = set()
    last_backward = {s.module: i for i, s in enumerate(segments) if s.phase == "backward"}
    for i, (segment, cost) in enumerate(zip(segments, seconds, strict=True)):
        key = (segment.phase, segment.module)
        began = compute
        if key in sequence:
            gather(key, compute)
            compute = began = max(compute, gathered[key])
            place = sequence.index(key) + 1
            if place < len(sequence) and sequence[place][0] == segment.phase:
                gather(sequence[place], began)
        compute += cost
        name = segment.module
        if name in by_name and last_backward.get(name) == i and not by_name[name].is_root:
            reduce(by_name[name], compute)
            done.add(name)
    for unit in units:
        if unit.name not in done:
            reduce(unit, compute)
    return max(compute, comm), total


def _needs(
    segments: Sequence[Segment], by_name: dict[str, Unit], strategy: Strategy
) -> list[tuple[str, str]]:
    """Units in the order in which they are gathered."""
    keys = dict.fromkeys((s.phase, s.module) for s in segments if s.module in by_name)
    return [
        (phase, name)
        for phase, name in keys
        if phase == "forward" or strategy.reshard_after_forward
    ]


# ---- the core: ranks of a host copy and add up in shared memory, in the stream that computes ----


def _on_core(
    segments: Sequence[Segment],
    seconds: Sequence[float],
    units: Sequence[Unit],
    strategy: Strategy,
    world: World,
    reduces: bool,
) -> tuple[float, float]:
    hardware, n = world.hardware, world.n_shards
    moved = messages = 0.0
    for unit in units:
        if unit.casts:  # each rank casts its own shard; nothing is copied otherwise
            moved += unit.shard + unit.unsharded_compute / n
            messages += 1
        if reduces and unit.unsharded_reduce:
            moved += core_reduce_bytes(unit.unsharded_reduce, n, unit.shard_gradient)
            moved += core_reduce_bytes(
                unit.unsharded_reduce / n * world.n_replicas, world.n_replicas, unit.shard_gradient
            )
            messages += 1 + (world.n_replicas > 1)
    took = moved / hardware.bandwidth * world.turns + messages * hardware.latency * world.turns
    return sum(seconds) + took, took


def core_reduce_bytes(unsharded: float, n: int, result: float) -> float:
    """Peers' parts are read and written, then all parts of the own shard read, the sum written."""
    if n == 1:
        return 0.0
    return 2 * unsharded * (n - 1) / n + unsharded + result
