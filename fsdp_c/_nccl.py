"""NCCL for process groups of GPUs: which library, and communicators of our own."""

from __future__ import annotations

import importlib.util
import weakref
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c import _comm, _env
from fsdp_c._native import _C

_SONAME = "libnccl.so.2"
# Before it, the order in which two communicators of one GPU work was the caller's affair.
_ORDERS_ITSELF = 22600
# NCCL takes at most 32 multiprocessors per collective: gathers and reductions have room beside each
# other on a GPU with twice as many.
_ROOM_FOR_TWO = 64


class Use(IntFlag):
    """What a group has communicators for."""

    GATHERS = 1
    REDUCTIONS = 2


@dataclass(frozen=True)
class Library:
    """A copy of NCCL that this process uses."""

    handle: Any
    version: int  # as NCCL codes it: 2.27.3 is 22703
    text: str  # its version, where it lies, and what it cannot do


def candidates() -> list[tuple[str, bool]]:
    """Where NCCL may be, in order; true: only if this process has loaded it already.

    The copy that torch has loaded comes first: two copies would not know of each other's work.
    """
    wanted = _env.NCCL.get()
    if wanted:
        return [(wanted, False)]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [Path(folder, "lib", _SONAME) for folder in folders]
    return [
        (_SONAME, True),
        *((str(file), False) for file in files if file.exists()),
        (_SONAME, False),
    ]


_library: Library | None = None


def opened() -> Library:
    """The copy of NCCL to use; opened once.

    Raises:
        NotImplementedError: there is none, or it cannot be used; says why for each that was tried.
    """
    global _library
    if _library is None:
        reasons = []
        for path, is_loaded in candidates():
            try:
                _library = Library(*_C.nccl_open(path, is_loaded))
                break
            except NotImplementedError as error:
                reasons.append(str(error))
        else:
            raise NotImplementedError("; ".join(reasons))
    return _library


def describe() -> str:
    """The library in use; empty if none has been asked for."""
    return "" if _library is None else _library.text


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.NcclGroup] = weakref.WeakKeyDictionary()


def group_for(group: dist.ProcessGroup, device: torch.device) -> _C.NcclGroup:
    """NCCL for the ranks of a process group; made once and kept as long as the group. Collective.

    Gathers and reductions get a communicator each where `device` has room for both at a time.

    Raises:
        NotImplementedError: on all ranks, if one of them cannot use NCCL; names it and says why.
    """
    if group not in _groups:
        _groups[group] = _make(group, device)
    return _groups[group]


def _make(group: dist.ProcessGroup, device: torch.device) -> _C.NcclGroup:
    exchange = _comm.exchange_for(group)
    if exchange is None and group.size() > 1:
        raise NotImplementedError(
            f"the ranks of process group {_comm.label(group)} have no store in common"
        )
    ranks = _comm.global_ranks(group)
    try:
        mine, words = opened(), ""
    except NotImplementedError as error:
        mine, words = None, f"!{error}"
    if mine is not None:
        words = f"{mine.version} {int(_needs_one(mine.version, device))}"
    answers = [words]
    if exchange is not None:
        answers = [answer.decode() for answer in exchange("NCCL", words.encode())]
    for rank, answer in zip(ranks, answers, strict=True):
        if answer.startswith("!"):
            raise NotImplementedError(f"rank {rank} cannot use NCCL: {answer[1:]}")
        if answer.split()[0] != answers[0].split()[0]:
            raise NotImplementedError(
                f"rank {rank} has NCCL {answer.split()[0]}, rank {ranks[0]} has"
                f" {answers[0].split()[0]}: all ranks need the same"
            )
    assert mine is not None
    return _C.NcclGroup(
        mine.handle,
        _comm.label(group),
        group.rank(),
        group.size(),
        ranks,
        _comm.timeout_s(group, device),
        exchange,
        is_one=any(answer.endswith(" 1") for answer in answers),
    )


def _needs_one(version: int, device: torch.device) -> bool:
    """Whether two communicators could wait for each other on the device."""
    if version < _ORDERS_ITSELF or _env.device_connections() == 1:
        return True
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count < _ROOM_FOR_TWO
