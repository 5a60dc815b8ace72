"""Taking snapshots: each is copied beside the next step, and counts when all ranks have theirs."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Any

from torch import Tensor

from fsdp_c._fully_shard import _fsdp_module
from fsdp_c._native import _C
from fsdp_c._snapshots import _contents, _copies, _files, _parts, _peers

_open: weakref.WeakSet[Taking] = weakref.WeakSet()


class Taking:
    """A rank's snapshots, from `resume` to the end."""

    def __init__(
        self,
        contents: _contents.Contents,
        slots: list[_files.Slot],
        kept: int | None,
        pages: Any,
        peers: _peers.Peers,
        sequence: int,
    ) -> None:
        """`kept`: the slot that is gone on from; `pages`: a _C.SnapshotRanks; `sequence`: the one
        before the first."""
        self.slots = slots
        self.peers = peers
        self.copier: Any = _C.SnapshotCopier()
        self.copies: _copies.Copies | None = None  # on another host
        self.number = 0  # of snapshots since resume()
        self._contents = contents
        self._pages = pages
        self._sequence = sequence  # of those of the run
        self._kept = 1 if kept is None else kept  # what all ranks have whole, or is not the next
        self._pending: list[Tensor] | None = None  # that the copy under way reads
        self._settling = threading.RLock()  # a thread that steps waits for another one's wait
        self._written: dict[int, Tensor] = {}  # by id, what is written between updates
        self._has_warned = self._has_warned_of_copies = False
        self._handles: list[Any] = []
        self._pid = os.getpid()

    def begin(self) -> None:
        """From now on the optimizers wait for copies."""
        for optimizer in self._contents.optimizers:
            if _parts.calls_hooks(optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(
                    optimizer.register_load_state_dict_pre_hook(self._before_update)
                )
        _open.add(self)

    def copy_to(self, copies: _copies.Copies) -> None:
        """Second copies, of what is gone on from first."""
        self.copies = copies
        kept = self.slots[self._kept]
        if (facts := kept.facts()) is not None:
            n_bytes = facts["data_bytes"] + facts["index_bytes"]
            copies.begin(0, kept, facts["sequence"], n_bytes)
            copies.settle(_peers.WHOLE)

    def tell(self, number: int, outcome: int) -> None:
        """What became of a snapshot, to the other ranks."""
        self.peers.tell(number, outcome)

    def take(self, step: int) -> None:
        """Raises as `Snapshots.take` says."""
        self.finish()
        packed = self._contents.pack(self._written)
        self.peers.come(self.number + 1, step)
        if self.number > 0 and self.peers.are_whole(self.number):
            self._kept = 1 - self._kept
        slot = self.slots[1 - self._kept]
        try:
            self.number += 1
            self._sequence += 1
            slot.reserve(_C.snapshot_room(tensors=packed.locals, index_bytes=len(packed.index)))
            self.copier.start(
                locals=packed.locals,
                sources=packed.sources,
                shown=packed.shown,
                now=packed.now,
                watched=packed.watched,
                index=packed.index,
                file=slot.memory,
                sequence=self._sequence,
                step=step,
            )
            self._pending = packed.waiting()
        except _files.Unusable as reason:
            self._tell_of_none()
            self._warn_of_room(str(reason))
            return
        except BaseException:  # an interrupt may come when it has begun
            self.copier.finish()
            slot.clear()
            self._tell_of_none()
            raise
        if self.copies is not None:
            n_bytes = _C.snapshot_room(tensors=packed.locals, index_bytes=len(packed.index))
            kept = self.slots[self._kept].facts()
            stays = kept["sequence"] if kept is not None else 0
            n_bytes -= _C.SNAPSHOT_PAGE
            self.copies.begin(self.number, slot, self._sequence, n_bytes, stays)
            self._warn_of_copies(self.copies)

    def _tell_of_none(self) -> None:
        """This rank takes no snapshot of this number."""
        self.peers.tell(self.number, _peers.FAILED)
        if self.copies is not None:
            self.copies.skip(self.number)

    def _warn_of_copies(self, copies: _copies.Copies) -> None:
        if copies.problem and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            _fsdp_module.warn_user(
                f"Snapshots: rank {self.peers.rank} has no second copy on host {copies.host}, and"
                f" the run goes on: {copies.problem}"
            )

    def _warn_of_room(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _fsdp_module.warn_user(
                f"Snapshots: rank {self.peers.rank} took none, and the run goes on: {reason}. It"
                " tries again after each step, without another word"
            )

    def finish(self) -> None:
        """Returns when the last snapshot is whole, and nothing is read any more. Local."""
        if self._pid != os.getpid():
            return
        with self._settling:
            if (outcome := self._settle()) is None:
                return
            if self.copies is not None:
                self.copies.settle(outcome)
            else:
                self.peers.tell(self.number, outcome)
            self._pending = None  # an interrupt before leaves it to the next call

    def _settle(self) -> int | None:
        """What became of the snapshot under way; None: there was none."""
        with self._settling:
            if self._pending is None:
                return None
            changed = [self._pending[place] for place in self.copier.finish()]
        for tensor in changed:
            self._written[id(tensor)] = tensor
        if changed:
            _fsdp_module.warn_user(
                f"Snapshots: {self._name_of(changed[0])} was written between take() and the next"
                " step() of the optimizers given: that snapshot does not count, and it is copied"
                " in take() from now on. Call finish() before such a write, or take() after it"
            )
        facts = self.slots[1 - self._kept].facts()
        is_whole = facts is not None and facts["sequence"] == self._sequence
        return _peers.WHOLE if is_whole else _peers.FAILED

    def _before_update(self, *_: Any) -> None:
        self.finish()

    def _before_step(self, *_: Any) -> None:
        self._before_update()
        if self._pid == os.getpid():
            self.peers.count_update()

    def _name_of(self, tensor: Tensor) -> str:
        for model in self._contents.models:
            for name, one in _parts.tensors_of(model).items():
                if one is tensor:
                    return f"'{name}'"
        return f"optimizer state of shape {tuple(tensor.shape)}"

    # ---- the end ----

    def end(self, how: int) -> None:
        """This rank takes no more; how it leaves is `_peers.CLOSED` or `BY_EXCEPTION`."""
        if self._pid == os.getpid():
            self._settle()  # who needs to know waits for a next one, which this rank does not take
            self._pending = None
            self.peers.leave(how)
            if how == _peers.CLOSED:
                self._pages.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.copies is not None:
            self.copies.close()
            self.copies = None
        self._pages.close()
        _open.discard(self)

    def end_with_process(self) -> None:
        """An exception ends a process while its last snapshot is copied: that one counts, too."""
        if self._pid != os.getpid():
            return
        self._settle()
        if self.copies is not None:  # no thread may be in the process group then
            self.copies.close()


@atexit.register
def _finish_all() -> None:
    for taking in list(_open):
        taking.end_with_process()
