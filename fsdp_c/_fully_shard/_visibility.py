"""Who looks at a unit's collectives: then it makes those that torch's group would make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_c._comm import _agreement, _process_group, _rendezvous
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _replaced_functions


class Visible(NamedTuple):
    """Whether a unit's collectives are in sight, and why; as its ranks have agreed."""

    reason: str = ""  # empty: nobody looks
    # Seen as they are made; else at most what they bring is.
    sees_gathers: bool = False
    sees_sums: bool = False
    is_of_all: bool = True  # nobody looks on some ranks alone

    @property
    def is_watched(self) -> bool:
        return self.sees_gathers or self.sees_sums


def why_watched(group: Any) -> str:
    """What sees all of the unit's collectives, on this rank; empty if nothing does."""
    if reason := _replaced_functions.replaced_collective():
        return reason
    if torch._C._len_torch_dispatch_stack() != 0:
        return "a dispatch mode is active"
    process_groups = _agreement.process_groups_of([group.mesh_info])
    if any(dist.get_backend(process_group) == "fake" for process_group in process_groups):
        return "a fake process group"
    return ""


def why_visible(group: Any) -> str:
    """The same, or that something has a part in what the collectives bring."""
    return _look_at(group).reason


def _look_at(group: Any) -> Visible:
    if reason := why_watched(group):
        return Visible(reason, True, True)
    gather, scatter = type(group._all_gather_comm), type(group._reduce_scatter_comm)
    default_gather, default_scatter = _versions.default_comms()
    if (gather, scatter) != (default_gather, default_scatter):
        reason = _versions.COMM_MEMORY.get(gather.__name__, "custom collectives")
        return Visible(reason, gather is not default_gather, scatter is not default_scatter)
    return Visible("an all-reduce hook" if group._all_reduce_hook is not None else "")


def choose(groups: Sequence[Any]) -> None:
    """Notes for each unit who looks, on any rank. Collective, before units are bound."""
    for group in groups:
        group.wants_visible = _look_at(group)
    for process_group in _agreement.process_groups_of([group.mesh_info for group in groups]):
        exchange = _rendezvous.exchange_for(process_group)
        if exchange is not None:
            ranks = _process_group.global_ranks(process_group)
            mine = json.dumps([group.wants_visible for group in groups]).encode()
            for rank, text in zip(ranks, exchange("who looks at units", mine), strict=True):
                if rank != dist.get_rank():
                    _take(groups, [Visible(*theirs) for theirs in json.loads(text)], rank)


def _take(groups: Sequence[Any], theirs: Sequence[Visible], rank: int) -> None:
    """What is seen on one rank is made on all of them."""
    for group, other in zip(groups, theirs, strict=False):
        own = group.wants_visible
        reason = own.reason or (other.reason and f"{other.reason} on rank {rank}")
        group.wants_visible = Visible(
            reason,
            own.sees_gathers or other.sees_gathers,
            own.sees_sums or other.sees_sums,
            own.is_of_all and bool(own.reason) == bool(other.reason),
        )


def has_changed(groups: Sequence[Any]) -> bool:
    """Whether who looks on this rank is another one than when the units were bound; local."""
    return any(_differs(_look_at(group), group.visible) for group in groups)


def _differs(now: Visible, bound: Visible) -> bool:
    if not now.reason and not bound.is_of_all:  # others see no change
        return False
    return (
        bool(now.reason) != bool(bound.reason)
        or (now.sees_gathers and not bound.sees_gathers)
        or (now.sees_sums and not bound.sees_sums)
    )
