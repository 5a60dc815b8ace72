"""What a model holds in memory now and what it has moved; giving back what is for speed alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_c import _text
from fsdp_c._diagnostics import _links, _traffic, _waits
from fsdp_c._diagnostics._links import Link
from fsdp_c._diagnostics._traffic import Traffic
from fsdp_c._diagnostics._waits import WaitStats
from fsdp_c._fully_shard import _fqns, _fsdp_init
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._native import _C

# The legend of `stats`, `memory_plan` and `estimate`.
PURPOSES = {
    "parameters": "shards, and parameters and buffers that are not sharded",
    "gradients": "of the shards",
    "optimizer": "its state",
    "unsharded": "units in another dtype or layout than the shards', one copy per host",
    "gather slots": "private copies of unsharded units",
    "reduce slots": "outgoing gradients, and sums of shards that replicas add up",
    "control": "clocks and headers of the ranks",
}
_OF_CORE = {
    "objects": "units, plans and tables",
    "slots": "gather slots",
    "gradients": "of shards",
    "messages": "parts and packs of collectives, where ranks share no memory",
    "shared": "mappings that ranks of a host share, whole",
}


@dataclass(frozen=True)
class MemoryStats:
    """What `stats` counts, in bytes; and this rank's waits.

    Examples:
        >>> held = fsdp_c.stats(model, optimizer)
        >>> print(held.rank["optimizer"], held.rank_total, held.traffic_total)
    """

    rank: dict[str, int]  # this model's, by the purposes of `MemoryPlan`
    process: dict[str, int] = field(default_factory=dict)  # of the core, for all models
    waits: WaitStats = field(default_factory=WaitStats)
    traffic: tuple[Traffic, ...] = ()  # of this model's units, since they were made
    links: tuple[Link, ...] = ()  # over rails, for all models

    @property
    def rank_total(self) -> int:
        return sum(self.rank.values())

    @property
    def traffic_total(self) -> Traffic:
        return _traffic.total(self.traffic)

    def __str__(self) -> str:
        lines = ["held by this rank now"]
        lines += [_text.row(name, PURPOSES[name], n) for name, n in self.rank.items()]
        lines.append(_text.row("in all", "the sum, without activations", self.rank_total))
        if self.process:
            lines.append("held by the core in this process, for all models")
            lines += [_text.row(name, _OF_CORE[name], n) for name, n in self.process.items()]
        moved = self.traffic_total
        lines += [
            "moved since the units were made",
            _text.row(f"{moved.gathers} all-gathers", "of the peers' shards", moved.gathered),
            _text.row(f"{moved.reductions} reduce-scatters", "of gradients", moved.reduced),
            _text.row(
                f"{moved.all_reductions} all-reduces",
                "of gradients, between replicas",
                moved.all_reduced,
            ),
            _text.row("really copied", "what this rank wrote to move all that", moved.copied),
            *(
                _text.row(
                    f"to host {one.host}", f"{one.messages:,} messages of all models", one.bytes
                )
                for one in self.links
            ),
            str(self.waits),
        ]
        return "\n".join(lines)


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    groups = []
    for module in model.modules():
        for group in _fsdp_init.groups_of(module):
            if isinstance(group, FSDPParamGroup) and group not in groups:
                groups.append(group)
    return groups


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Shards, whatever is registered for them now, other parameters and buffers."""
    managed = [p for group in groups_of(model) for p in group.fsdp_params]
    wholes = {id(p.__dict__.get("_unsharded_param")) for p in managed}
    found: dict[int, torch.Tensor] = {id(p.sharded_param): p.sharded_param for p in managed}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in wholes:
            found[id(tensor)] = tensor
    return list(found.values())


def _waiting(groups: Iterable[FSDPParamGroup]) -> list[torch.Tensor]:
    """Whole gradients of backwards without synchronization."""
    found = []
    for group in groups:
        for index, fsdp_param in enumerate(group.fsdp_params):
            unsharded = fsdp_param.__dict__.get("_unsharded_param")
            found += [group._core_accumulated(index), None if unsharded is None else unsharded.grad]
    return [grad for grad in found if grad is not None]


def _stored(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _domains_of(groups: Iterable[FSDPParamGroup]) -> list[tuple[Any, int, bool]]:
    """Each domain with its ranks, and whether it is between replicas."""
    found: dict[int, tuple[Any, int, bool]] = {}
    for group in groups:
        if group._binding is None:
            continue
        shard, _, replicate, smaller = group._binding
        info = group.mesh_info
        found[id(shard)] = shard, info.shard_mesh_size, False
        if replicate is not None:
            found[id(replicate)] = replicate, info.replicate_mesh_size, True
        if smaller is not None:
            ranks = group.post_forward_mesh_info or info
            found[id(smaller)] = smaller, ranks.shard_mesh_size, False
    return list(found.values())


def stats(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, reset: bool = False
) -> MemoryStats:
    """What the model holds in this rank's memory now, by the purposes of `memory_plan`. Local.

    ``.traffic`` has a row per unit of what its collectives have moved so far, ``.traffic_total``
    the sum; subtract an earlier one for what happened since. ``.links`` says what this rank has
    sent to each other host, where ranks of several hosts talk over rails.

    ``.process`` is the core's own account, over all models of the process: bytes that it holds for
    small objects, gather slots, gradients of shards, messages, and shared mappings (whole, with the
    parts of all ranks).

    ``.waits`` says how often and how long this rank waited for others since the first forward, unit
    by unit: for the shards of a forward or backward, for gradients to add up, and at the ends of
    both. With ``reset`` it is counted from here on. Empty where torch's implementation runs.

    Examples:
        >>> before = fsdp_c.stats(model).traffic_total
        >>> model(x).sum().backward()
        >>> print(fsdp_c.stats(model).traffic_total - before)
    """
    groups = groups_of(model)
    params = tensors_of(model)
    grads = [t.grad for t in params if t.grad is not None] + _waiting(groups)
    state = optimizer.state.values() if optimizer is not None else ()
    rank = dict.fromkeys(PURPOSES, 0)
    rank["parameters"] = _stored(params)
    rank["gradients"] = _stored(grads)
    for group in groups:  # sums over shards: gradients while they wait for the replicas
        name = "gradients" if group._core_has_partial_sums else "reduce slots"
        rank[name] += group._core_partial_bytes
    rank["optimizer"] = _stored(value for one in state for value in one.values())
    domains = _domains_of(groups)
    for domain, n_ranks, is_replicate in domains:
        sizes = domain.sizes()
        rank["reduce slots"] += sizes["arena"]
        rank["control"] += sizes["control"] // n_ranks
        if not is_replicate:
            rank["unsharded"] += max(sizes["full"] - n_ranks * sizes["aliased"], 0) // n_ranks
    account = _C.Domain.account()
    rank["gather slots"] = account["slots"]
    waits = _waits.collect(((domain, is_replicate) for domain, _, is_replicate in domains), reset)
    return MemoryStats(rank, account, waits, _traffic.traffic_of(groups), _links.links_of(groups))


def release_buffers(model: nn.Module) -> int:
    """Gives back what the model's units hold for speed alone, between two steps; local.

    Free gather slots, memory of gradients that were set to None, copies of peers' gradients, room
    for sums that replicas add up, and the pages of this rank's reduce slots, unless a peer has not
    read them yet. The next step takes them again. Returns the bytes (of reduce slots: at most so
    many).

    Raises:
        RuntimeError: in a forward or backward.

    Examples:
        >>> print(fsdp_c.release_buffers(model), "bytes")
    """
    groups = [group for group in groups_of(model) if group._is_bound]
    for group in groups:
        if group._core_in_phase:
            raise RuntimeError(
                f"release_buffers in a forward or backward of unit '{_fqns.unit_name(group)}': call"
                " it between two steps"
            )
    before = sum(_C.Domain.account().values()) + _bytes_of_sums(groups)
    for group in groups:
        group._core_release_gradients()
        group._core_release_sums()
    released = sum(domain.trim() for domain, _, _ in _domains_of(groups))
    _C.Domain.trim_slots()
    return released + before - sum(_C.Domain.account().values()) - _bytes_of_sums(groups)


def _bytes_of_sums(groups: Iterable[FSDPParamGroup]) -> int:
    """Of the room for sums over shards, whether or not some wait in it."""
    return sum(group._core_partial_bytes for group in groups)
