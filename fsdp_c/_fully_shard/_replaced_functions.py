"""Functions of torch's implementation that tools replace: the core calls few of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

from fsdp_c._compat import _versions
from fsdp_c._native import _C

# Methods of units, states and parameters that torch's implementation calls in a step.
GROUP_METHODS = frozenset(
    "unshard wait_for_unshard reshard pre_forward post_forward pre_backward post_backward"
    " finalize_backward _record_post_forward _backward_prefetch _prefetch_unshard _to_sharded"
    " _to_unsharded _wait_for_post_backward _register_post_backward_hook".split()
)
# Of them those that hooks call by the group where somebody has replaced one on it.
CALLED_METHODS = frozenset(
    "unshard wait_for_unshard reshard pre_forward post_forward pre_backward post_backward".split()
)
STATE_METHODS = frozenset(
    "_pre_forward _post_forward _pre_backward _root_pre_forward _cast_forward_inputs"
    " _cast_output_dtype _force_complete_incomplete_states _register_pre_backward_hook"
    " _register_root_post_backward_final_callback _root_post_backward_final_callback"
    " _end_backward_iteration finalize_backward".split()
)
_PARAM_METHODS = frozenset("init_unsharded_param to_unsharded to_sharded".split())
_NAMES: dict[Any, frozenset[str]] = {
    _fsdp_param_group.FSDPParamGroup: GROUP_METHODS,
    _fsdp_state.FSDPState: STATE_METHODS,
    _fsdp_param.FSDPParam: _PARAM_METHODS,
    _fsdp_param_group.RegisterPostBackwardFunction: frozenset({"backward"}),
    _fsdp_param_group: frozenset(
        {"foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"}
    ),
    dist: frozenset({*_versions.COLLECTIVES, "all_reduce"}),
}
_TORCH = os.path.dirname(torch.__file__) + os.sep


class WatchedFunction(NamedTuple):
    """What replaced_functions.cpp reads."""

    owner: Any  # a class or module
    name: str
    function: Any  # torch's own, or ours


def _if_torchs(function: Any) -> Any:
    """The function, or None if it was replaced before this module was imported."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.startswith(_TORCH) else None


_ours: set[type] = set()
_originals = [
    WatchedFunction(owner, name, _if_torchs(getattr(owner, name)))
    for owner, names in _NAMES.items()
    for name in sorted(names)
    if hasattr(owner, name)
]


def watch(cls: type, names: frozenset[str]) -> None:
    """Watches functions of a class of ours too."""
    _ours.add(cls)
    _originals.extend(
        WatchedFunction(cls, name, getattr(cls, name))
        for name in sorted(names)
        if hasattr(cls, name)
    )
    # Asked at the beginning of every forward.
    _C.watch_functions(functions=_originals)


def replaced() -> str:
    """Says which of torch's functions is not its own any more; empty if all are.

    Collectives are not among them: see `replaced_collective`.
    """
    return _first_replaced(row for row in _originals if row.owner not in (dist, *_ours))


def refuse_replaced() -> None:
    """NotImplementedError if a method of a class of ours was replaced that nothing calls."""
    for owner, name, original in _originals:
        if owner in _ours and name not in CALLED_METHODS and getattr(owner, name) is not original:
            refuse(name, f"fsdp_c's class {owner.__name__}")


def calls_methods(group: Any) -> bool:
    """Whether somebody has replaced a method of the unit, or of its class, that hooks call then."""
    return not CALLED_METHODS.isdisjoint(vars(group)) or any(
        row.owner is type(group) and getattr(row.owner, row.name) is not row.function
        for row in _originals
    )


def replaced_collective() -> str:
    """The same of the collectives of torch.distributed."""
    return _first_replaced(row for row in _originals if row.owner is dist)


def _first_replaced(rows: Iterable[WatchedFunction]) -> str:
    for owner, name, original in rows:
        if getattr(owner, name, None) is not original:
            return f"{owner.__name__.rpartition('.')[2]}.{name} was replaced"
    return ""


def refuse(name: str, owner: str) -> NoReturn:
    """NotImplementedError for a method of one object that nothing of the core calls."""
    raise NotImplementedError(
        f"{name} of {owner} was replaced, and nothing would call it: the core calls"
        f" {', '.join(sorted(CALLED_METHODS))} of units. Replace it on torch's class before the"
        " first forward, and torch's implementation runs the model"
    )
