"""Where this rank's program is, told to ranks that wait for it: a line of the user's code, and the
collective of torch.distributed that it sits in."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _built
from fsdp_c._native import _C

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(_built.FOLDER) + "/"
_DISTRIBUTED = _TORCH + "distributed/"
_C10D = _DISTRIBUTED + "distributed_c10d.py"
_SAVES = (_DISTRIBUTED + "checkpoint/", _OURS + "_checkpoint/")
_STANDARD = sysconfig.get_path("stdlib") + "/"
_INSTALLED = ("site-packages/", "dist-packages/")

# Collectives that no rank of the group leaves before all have entered them.
_MEETINGS = frozenset(
    """all_reduce all_reduce_coalesced all_gather all_gather_single all_gather_into_tensor
    all_gather_coalesced all_gather_object reduce_scatter reduce_scatter_single
    reduce_scatter_tensor all_to_all all_to_all_single barrier""".split()
)
# Those that wait for their root, and in the root for all: where the root is found.
_ROOTED = {
    "broadcast": "group_src",
    "scatter": "group_src",
    "gather": "group_dst",
    "reduce": "group_dst",
}
_GATHERS = frozenset(
    """full_tensor get_state_dict get_model_state_dict get_optimizer_state_dict
    _gather_state_dict""".split()
)
_WRAPPERS = ("wrapper", "inner_func", "decorate_context", "generator_context", "no_grad")
_LONGEST = 220  # bytes that others see of it

# Meetings that are no collectives of a process group: by key, how many this rank has come to.
_counts: dict[int, int] = {}
_sits_in: tuple[int, str] | None = None  # the key of the one that waits for others, and its name


class Place(NamedTuple):
    """Read by name in csrc/bind/comm/host.cpp."""

    text: str
    group: int  # whose collective the program sits in, by its key; 0: in none
    sequence: int  # how many of that group's it has called, this one too
    is_gather: bool  # of full parameters


def tell() -> Place:
    """The main thread's. For a thread that a peer's question woke: never while all goes well."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = list(_outward(frame))
    (group, root), meeting = _group_of(stack), _sits_in
    user = _user_frame(stack)
    inner = stack[:user]
    text = _line(stack[user]) if user < len(stack) else "no line of Python"
    if meeting is not None:
        key, count, inside = meeting[0], _counts[meeting[0]], meeting[1]
    else:
        n_called = None if group is None else _count(group)
        key, count = (0, 0) if group is None or n_called is None else (_key(group, root), n_called)
        inside = _inside(inner)
    text = f"{text}, in {inside}" if inside else text
    is_gather = any(_is_gather(frame) for frame in inner)
    text = text.encode()[:_LONGEST].decode(errors="ignore")
    return Place(text=text, group=key, sequence=count, is_gather=is_gather)


def called(stack: list[FrameType]) -> tuple[str, bool]:
    """What of torch.distributed, or of ours, the user's code has called, or nothing; and whether
    that saves. The innermost frame comes first."""
    inner = stack[: _user_frame(stack)]
    is_save = any(f.f_code.co_filename.startswith(_SAVES) or _is_gather(f) for f in inner)
    return _inside(inner), is_save


def count(key: int) -> int | None:
    """How many collectives of a group this rank has called; None if it is in no such group."""
    if key in _counts:
        return _counts[key]
    for group in c10d._world.pg_map:
        if key in (_key(group), _key(group, group.rank())):
            return _count(group)
    return None


def meet(name: str, number: int) -> int:
    """This rank comes to the `number`-th meeting of a name, as all ranks do; gives its key."""
    key = _digest(name)
    _counts[key] = number
    return key


@contextlib.contextmanager
def waiting(key: int, inside: str) -> Iterator[None]:
    """Around a wait for others in that meeting, by the main thread."""
    global _sits_in
    _sits_in = (key, inside)
    try:
        yield
    finally:
        _sits_in = None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frame(stack: list[FrameType]) -> int:
    """Index of the innermost frame that belongs neither to torch nor to us nor to Python."""
    for index, frame in enumerate(stack):
        path = frame.f_code.co_filename
        is_standard = path.startswith(_STANDARD) and not any(part in path for part in _INSTALLED)
        if not path.startswith((_TORCH, _OURS, "<frozen")) and not is_standard:
            return index
    return max(len(stack) - 1, 0)


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    roots = [root.rstrip("/") + "/" for root in sys.path if root]
    root = max((root for root in roots if path.startswith(root)), key=len, default="")
    short = path[len(root) :] if root else Path(path).name
    return f"{short}:{frame.f_lineno}{_within(frame)}"


def _within(frame: FrameType | None) -> str:
    """The function, past lambdas and comprehensions; nothing at the top of a file."""
    while frame is not None and frame.f_code.co_name.startswith("<"):
        if frame.f_code.co_name == "<module>":
            return ""
        frame = frame.f_back
    return f" in {frame.f_code.co_name}" if frame is not None else ""


def _inside(inner: list[FrameType]) -> str:
    """What of torch.distributed, or of ours, the user's code has called."""
    for frame in reversed(inner):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(("_", "<")) or name in _WRAPPERS:
            continue
        if path == _C10D:
            return f"torch.distributed's {name}"
        if path.startswith((_DISTRIBUTED, *_SAVES)):
            return getattr(frame.f_code, "co_qualname", name)
    return ""


def _is_gather(frame: FrameType) -> bool:
    return frame.f_code.co_name in _GATHERS and frame.f_code.co_filename.startswith(_DISTRIBUTED)


def _group_of(stack: list[FrameType]) -> tuple[dist.ProcessGroup | None, int | None]:
    """Of the collective in which the innermost frames are, if it is one for all ranks of a group;
    and for which of these alone it waits here, None: for all.

    Locals are looked at in frames of torch.distributed alone, which soon end.
    """
    is_waited_for = False
    for frame in stack:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if not path.startswith(_TORCH):
            break
        if path == _C10D and not is_waited_for:
            group = _argument(frame)
            if name in _MEETINGS:
                return group, None
            root = frame.f_locals.get(_ROOTED.get(name, ""))
            if group is None or root is None:
                break
            return group, None if root == group.rank() else root
        if path.startswith(_DISTRIBUTED):
            is_waited_for = is_waited_for or name == "wait_tensor"
            if not is_waited_for:
                break
            if name == "redistribute_local_tensor":
                return _redistributed_over(frame.f_locals), None
    return None, None


def _argument(frame: FrameType) -> dist.ProcessGroup | None:
    group = frame.f_locals.get("group")
    group = dist.group.WORLD if group is None else group
    return group if group in c10d._world.pg_map else None


def _redistributed_over(names: Any) -> dist.ProcessGroup | None:
    """DTensor's way from one placement to another, a dimension of its mesh at a time."""
    mesh = names.get("mesh_to_use", names.get("device_mesh"))
    if mesh is None:
        return None
    index = 0 if mesh.ndim == 1 else names.get("i")
    return None if index is None else mesh.get_group(index)


def _key(group: dist.ProcessGroup, root: int | None = None) -> int:
    """The same on all ranks of the group; not 0. With a root one that this rank alone counts."""
    only = "" if root is None else f" for {root}"
    return _digest(f"{group.group_name} {dist.get_process_group_ranks(group)}{only}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1


def _count(group: dist.ProcessGroup) -> int | None:
    """None: groups of several backends count nothing."""
    try:
        n_called = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return None
    return n_called - _C.rail_messages(str(group.group_name))


_C.set_place(tell=tell, count=count)
