"""Who looks at a unit's collectives: then it makes those that torch's group would make."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _replaced_functions


def why_watched(group: Any) -> str:
    """What sees the unit's collectives, on this rank; empty if nothing does."""
    comms = type(group._all_gather_comm), type(group._reduce_scatter_comm)
    if comms != _versions.default_comms():
        return _versions.COMM_MEMORY.get(comms[0].__name__, "custom collectives")
    if reason := _replaced_functions.replaced_collective():
        return reason
    if torch._C._len_torch_dispatch_stack() != 0:
        return "a dispatch mode is active"
    process_group = getattr(group.mesh_info, "shard_process_group", None)
    if process_group is not None and dist.get_backend(process_group) == "fake":
        return "a fake process group"
    return ""


def why_visible(group: Any) -> str:
    """The same, or that something has a part in what the collectives bring."""
    if reason := why_watched(group):
        return reason
    return "an all-reduce hook" if group._all_reduce_hook is not None else ""


def choose(groups: list[Any]) -> bool:
    """Notes for each unit who looks now. True if one needs other collectives than it has."""
    has_changed = False
    for group in groups:
        group.is_watched = bool(why_watched(group))
        reason = why_visible(group)
        has_changed = has_changed or bool(reason) != bool(group.visible_because)
        group.wants_visible = reason
    return has_changed
