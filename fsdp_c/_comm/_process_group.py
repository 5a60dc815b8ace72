"""What messages and waits have to know of a process group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class _Alone:
    """Stands for the process group of a mesh dimension in which each rank is alone."""

    group_name = "of one rank"

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE: Any = _Alone()


def label(group: dist.ProcessGroup) -> str:
    """How messages name the group."""
    name = str(getattr(group, "group_name", "") or "?")
    desc = str(getattr(group, "group_desc", "") or "undefined")
    return name if desc == "undefined" else f"{name} ({desc})"


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the group, as numbered in the world."""
    if group is ALONE:
        return [dist.get_rank()]
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return list(range(group.size()))


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of the group's backend for the device, else torch's default."""
    try:
        options = group._get_backend(device).options
        return options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return c10d.default_pg_timeout.total_seconds()


def scales(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend multiplies what it is about to add up where torch asks for
    averages: NCCL's alone."""
    if group is ALONE:
        return False
    try:
        return bool(group._get_backend(device).name() == "nccl")
    except (AttributeError, RuntimeError):
        return False


class Described(NamedTuple):
    """What the core is told of a group; read by name in csrc/bind/comm/transport.cpp."""

    name: str
    rank: int
    global_ranks: list[int]
    timeout_seconds: float


def described(group: dist.ProcessGroup, device: torch.device) -> Described:
    return Described(
        name=label(group),
        rank=group.rank(),
        global_ranks=global_ranks(group),
        timeout_seconds=timeout_s(group, device),
    )
