"""Functions of torch's implementation that tools replace: the core calls none of them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from fsdp_c import _compat
from fsdp_c._native import _C

GROUP_METHODS = frozenset(
    "unshard wait_for_unshard reshard pre_forward post_forward pre_backward post_backward".split()
)
_NAMES: dict[Any, frozenset[str]] = {
    _fsdp_param_group.FSDPParamGroup: GROUP_METHODS,
    _fsdp_state.FSDPState: frozenset({"_pre_forward", "_post_forward", "_pre_backward"}),
    _fsdp_param_group.RegisterPostBackwardFunction: frozenset({"backward"}),
    _fsdp_param_group: frozenset(
        {"foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"}
    ),
    dist: frozenset(_compat.COLLECTIVES),
}
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _if_torchs(function: Any) -> Any:
    """The function, or None if it was replaced before this module was imported."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.startswith(_TORCH) else None


# (class or module, name, torch's own function)
_ORIGINALS = [
    (owner, name, _if_torchs(getattr(owner, name)))
    for owner, names in _NAMES.items()
    for name in sorted(names)
]


def replaced() -> str:
    """Says which of the functions is not torch's own any more; empty if all are."""
    for owner, name, original in _ORIGINALS:
        if getattr(owner, name, None) is not original:
            return f"{owner.__name__.rpartition('.')[2]}.{name} was replaced"
    return ""


def replaced_on(group: Any) -> str:
    """The same for the methods of one unit."""
    name = next((name for name in vars(group) if name in GROUP_METHODS), "")
    return f"its {name} was replaced" if name else ""


_C.watch_functions(_ORIGINALS)  # asked at the beginning of every forward
