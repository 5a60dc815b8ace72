"""Snapshots that lie on another host than the rank that goes on from them: copies of a dead host's,
or files of a rank that its launcher has numbered anew.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c._native import _C
from fsdp_c._snapshots import _copies, _files

Step = tuple[int, int]  # sequence, step
Source = tuple[int, _files.Lying]  # the rank that can read the file, and the file


def plan(
    own: Sequence[set[Step]], lying: Sequence[Sequence[_files.Lying]]
) -> tuple[Step, dict[int, Source]]:
    """The newest step that each rank has itself or can be given, and who gives it to whom.

    `own`: of each rank what it has; `lying`: what else each rank finds on its host.
    """
    given: list[dict[Step, Source]] = [{} for _ in own]
    for holder, files in enumerate(lying):
        for file in files:
            if file.rank < len(own):
                given[file.rank].setdefault((file.sequence, file.step), (holder, file))
    shared = set.intersection(*(mine | set(other) for mine, other in zip(own, given, strict=True)))
    common = max(shared, default=(0, 0))
    needs = {
        rank: given[rank][common] for rank, mine in enumerate(own) if shared and common not in mine
    }
    return common, needs


def is_readable(file: _files.Lying) -> bool:
    """Whether its bytes are those that were written."""
    try:
        return _C.snapshot_is_intact(_mapped(file))
    except OSError:
        return False


def _mapped(file: _files.Lying) -> Any:
    with Path(file.path).open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)


def fetch(rank: int, needs: dict[int, Source], group: dist.ProcessGroup, slot: _files.Slot) -> None:
    """This rank's part of the plan; into `slot`, which has room. Collective.

    Raises:
        RuntimeError: what came is not what was sent.
    """
    header = torch.empty(len(_C.snapshot_header(slot.memory)), dtype=torch.uint8)
    for receiver, (sender, file) in sorted(needs.items()):
        if rank == sender == receiver:  # a copy that another host's rank of its number left here
            memory = _mapped(file)
            slot.clear()
            _copies.body_of(slot.memory, file.n_bytes).copy_(_copies.body_of(memory, file.n_bytes))
            _adopt(slot, _C.snapshot_header(memory), sender, file)
        elif rank == sender:
            memory = _mapped(file)
            sent = torch.frombuffer(bytearray(_C.snapshot_header(memory)), dtype=torch.uint8)
            group.send([sent], receiver, receiver).wait()
            group.send([_copies.body_of(memory, file.n_bytes)], receiver, receiver).wait()
        elif rank == receiver:
            group.recv([header], sender, receiver).wait()
            slot.clear()
            group.recv([_copies.body_of(slot.memory, file.n_bytes)], sender, receiver).wait()
            _adopt(slot, header.numpy().tobytes(), sender, file)


def _adopt(slot: _files.Slot, header: bytes, sender: int, file: _files.Lying) -> None:
    is_fit = _C.snapshot_adopt(file=slot.memory, header=header)
    if not is_fit or not slot.is_intact():
        slot.clear()
        raise RuntimeError(f"resume: what rank {sender} sent of {file.path} is damaged")
