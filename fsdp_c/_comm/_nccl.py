"""NCCL for process groups of GPUs: which library, and communicators of our own."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c import _env
from fsdp_c._comm import _process_group, _rendezvous
from fsdp_c._compat import _versions
from fsdp_c._native import _C

_SONAME = "libnccl.so.2"
_DRIVER = "libcuda.so.1"
# Before it, the order in which two communicators of one GPU work is the caller's affair; from then
# on NCCL sees to it, if it is asked to.
_CAN_ORDER = 22600
# NCCL takes at most 32 multiprocessors per collective: gathers and reductions have room beside each
# other on a GPU with twice as many.
_ROOM_FOR_TWO = 64
# From this version on two ranks may share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE says so.
_MANY_RANKS = 23003
# How long communicators may take to end what is under way, before they are aborted.
_LEAVE_S = 5.0


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


# The process's: a library stays open, and a second copy would not know of the first one's work.
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
                _library = Library(**_C.nccl_open(path=path, is_loaded=is_loaded))
                break
            except NotImplementedError as error:
                reasons.append(str(error))
        else:
            raise NotImplementedError("; ".join(reasons))
    return _library


def loaded() -> Library:
    """The copy that this process has loaded already: torch's process groups use it.

    Raises:
        NotImplementedError: there is none, or it cannot be used.
    """
    return Library(**_C.nccl_open(path=_SONAME, is_loaded=True))


def describe() -> str:
    """The library in use, and whose ranks cannot use it; empty if none has been asked for."""
    text = "" if _library is None else _library.text
    refused = [f"not for {_process_group.label(g)}: {why}" for g, why in list(_refusals.items())]
    return "; ".join([text, *refused] if text else refused)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.NcclGroup] = weakref.WeakKeyDictionary()
# Why a group has none; alike on all of its ranks.
_refusals: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def group_for(
    group: dist.ProcessGroup, device: torch.device, gathers: bool = True, reduces: bool = True
) -> _C.NcclGroup:
    """NCCL for the ranks of a process group; made once and kept as long as the group. Collective.

    Gathers and reductions get a communicator each where both are made, NCCL keeps two from waiting
    for each other, and `device` has room for both at a time.

    Raises:
        NotImplementedError: on all ranks, if one of them cannot use NCCL; names it and says why.
    """
    if group not in _groups and group not in _refusals:
        _end_with_torch()
        try:
            _groups[group] = _make(group, device, gathers and reduces)
        except NotImplementedError as error:
            _refusals[group] = str(error)
    if group in _refusals:
        raise NotImplementedError(_refusals[group])
    return _groups[group]


def find(group: dist.ProcessGroup) -> _C.NcclGroup | None:
    """That of a process group, if it has one."""
    return _groups.get(group)


def why_not(group: dist.ProcessGroup) -> str:
    """Why a process group has none; empty if it has, or if nobody has asked."""
    return _refusals.get(group, "")


def leave() -> None:
    """Ends all communicators of this process, in order if the other ranks do so too."""
    for group in list(_groups.values()):
        group.leave(_LEAVE_S)
    _groups.clear()
    _refusals.clear()


@functools.cache
def _end_at_exit() -> None:
    atexit.register(leave)


def _end_with_torch() -> None:
    """Communicators end with the process groups, and with the process."""
    _end_at_exit()
    _versions.at_destroy(leave)


def _make(group: dist.ProcessGroup, device: torch.device, wants_two: bool) -> _C.NcclGroup:
    exchange = _rendezvous.exchange_for(group)
    if exchange is None and group.size() > 1:
        raise NotImplementedError(
            f"the ranks of process group {_process_group.label(group)} have no store in common"
        )
    ranks = _process_group.global_ranks(group)

    def tell(what: str, words: str) -> list[str]:
        """What all ranks say; none goes on if one of them says why it cannot."""
        answers = [words]
        if exchange is not None:
            answers = [answer.decode() for answer in exchange(what, words.encode())]
        for rank, answer in zip(ranks, answers, strict=True):
            if answer.startswith("!"):
                raise NotImplementedError(f"rank {rank} cannot use NCCL: {answer[1:]}")
        return answers

    try:
        mine, events, words = opened(), _events(device), ""
        is_one = not wants_two or _needs_one(mine.version, device)
        words = f"{mine.version} {int(is_one)} {_place(device)}"
    except (NotImplementedError, OSError) as error:
        mine, events, words = None, None, f"!{error}"
    if _env.TRANSPORT.get() == "callback":
        words = f"!{_env.TRANSPORT.name}=callback asks for the process group's own collectives"
    answers = [answer.split() for answer in tell("NCCL", words)]
    _check_alike(ranks, answers)
    assert mine is not None
    made, words = None, ""
    try:
        made = _C.NcclGroup(
            **_process_group.described(group, device)._asdict(),
            exchange=None if exchange is None else _rendezvous.for_core(exchange),
            library=mine.handle,
            events=events,
            is_one=any(answer[1] == "1" for answer in answers),
        )
    except (RuntimeError, OSError) as error:  # timeouts are of the second kind
        words = f"!{error}"
    tell("communicators of NCCL", words)
    return made


def _check_alike(ranks: list[int], answers: list[list[str]]) -> None:
    """Ranks have one version, and a GPU each where NCCL wants that."""
    seen: dict[str, int] = {}
    for rank, (version, _, place) in zip(ranks, answers, strict=True):
        if version != answers[0][0]:
            raise NotImplementedError(
                f"rank {rank} has NCCL {version}, rank {ranks[0]} has"
                f" {answers[0][0]}: all ranks need the same"
            )
        if place in seen:
            raise NotImplementedError(f"ranks {seen[place]} and {rank} use the same GPU")
        if place != "-":
            seen[place] = rank


def _place(device: torch.device) -> str:
    """Names the GPU where two ranks may not share one; else a dash."""
    if device.type != "cuda" or (opened().version >= _MANY_RANKS and _env.shares_gpus()):
        return "-"
    return str(torch.cuda.get_device_properties(device).uuid)


def _events(device: torch.device) -> Any:
    """By these what is under way on a GPU is watched; host memory has none."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.current_device() if device.index is None else device.index
    return _C.cuda_events(path=_DRIVER, gpu=gpu)


def _needs_one(version: int, device: torch.device) -> bool:
    """Whether two communicators could wait for each other on the device."""
    if version < _CAN_ORDER or not _env.orders_launches() or _env.device_connections() == 1:
        return True
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count < _ROOM_FOR_TWO
