"""What ranks find out together, over the stores of their process groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

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
