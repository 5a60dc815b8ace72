"""What ranks find out together, over the stores of their process groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from fsdp_c._comm import _process_group
from fsdp_c._comm._rendezvous import exchange_for


def process_groups_of(mesh_infos: Sequence[Any]) -> list[dist.ProcessGroup]:
    """Those that shard, then those of the replicas; each once."""
    names = ("shard_process_group", "replicate_process_group")
    found = [getattr(mesh_info, name, None) for name in names for mesh_info in mesh_infos]
    return [process_group for process_group in dict.fromkeys(found) if process_group is not None]


def first_reason(what: str, process_groups: Iterable[dist.ProcessGroup], told: str) -> str:
    """What this rank tells, or else the first that does; empty if none does. Collective."""
    for process_group in process_groups:
        exchange = exchange_for(process_group)
        if exchange is not None:
            answers = exchange(what, told.encode())
            told = told or next((answer.decode() for answer in answers if answer), "")
    return told


def first_reason_of_units(what: str, groups: Sequence[Any], told: str) -> str:
    """The same over all process groups of some units."""
    return first_reason(what, process_groups_of([group.mesh_info for group in groups]), told)


def check_process_groups(units: Sequence[tuple[str, Any]]) -> None:
    """What some rank shards a unit over the others do too; `units`: names and meshes. Collective.

    Ranks meet in the larger groups first, so that they tell each other before one waits alone.
    """
    used = {
        (_process_group.label(process_group), *_process_group.global_ranks(process_group)): name
        for name, mesh_info in reversed(units)
        for process_group in process_groups_of([mesh_info])
    }
    mine = json.dumps([[name, *key] for key, name in used.items()]).encode()
    groups = process_groups_of([mesh_info for _, mesh_info in units])
    for process_group in sorted(groups, key=lambda g: (-g.size(), _process_group.label(g))):
        exchange = exchange_for(process_group)
        if exchange is not None:
            answers = map(json.loads, exchange("process groups of units", mine))
            ranks = _process_group.global_ranks(process_group)
            _refuse_unless_shared(dict(zip(ranks, answers, strict=True)))


def _refuse_unless_shared(by_rank: dict[int, list[list[Any]]]) -> None:
    keys = {rank: {tuple(key) for _, *key in rows} for rank, rows in by_rank.items()}
    for rank, rows in by_rank.items():
        for name, *key in rows:
            lacking = [
                other for other in key[1:] if tuple(key) not in keys.get(other, {tuple(key)})
            ]
            if lacking:
                raise RuntimeError(
                    f"rank {rank} shards FSDP unit '{name}' over process group {key[0]} of ranks"
                    f" {key[1:]}, over which ranks {lacking} shard none of the model's units: call"
                    " fully_shard with the same meshes and shard_placement_fn on all ranks"
                )


def any_rank(process_groups: Sequence[dist.ProcessGroup], mine: bool) -> bool:
    """Whether it is so on a rank of the mesh, all of whose ranks ask; its dimensions in turn.

    Parts are laid out alike on all of them, and hosts may cut a mesh unevenly.
    """
    for process_group in process_groups if len(process_groups) > 1 else ():
        exchange = exchange_for(process_group)
        if exchange is not None:
            answers = exchange("layout of gradients", b"counted" if mine else b"")
            mine = any(answers)
    return mine
