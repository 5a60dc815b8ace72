"""How ranks know of each other which snapshots are whole, without a collective.

A rank may write over its older snapshot only when all ranks have the newer one: else, killed at
once, they would have none in common. It writes down what became of its last two; ranks of the host
read that in its file's page, others in the store. There a rank of the host also tells of which
steps they are, and its updates, so that ranks that do not take the same ones are named at once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_c._comm import _peer_location, _rendezvous
from fsdp_c._native import _C

WHOLE, FAILED = 1, 2
BY_EXCEPTION, CLOSED = 1, 2  # how a rank leaves
# Words of a page: by snapshots' numbers, even and odd, what became of them and of which step they
# are (behind its lowest bits of the number); the newest one's number; this rank's updates; how it
# has left, if it has. The last word says that it has ended well.
_OUTCOMES, _STEPS, _TAKEN, _UPDATES, _LEFT, N_WORDS = 0, 2, 4, 5, 6, 8
_CURE = "All ranks have to call take() once after the same steps"


class Peers:
    """The other ranks; alone there are none."""

    def __init__(
        self,
        name: str,
        rank: int,
        pages: Any,
        local: Sequence[int],
        processes: Sequence[str],
        store: dist.Store | None,
        timeout_s: float,
        counts_updates: bool,
        keeper: int | None,
    ) -> None:
        """`pages`: of the ranks `local`, in their order, this one too. `counts_updates`: all ranks
        make equally many. `keeper`: the rank for which this one's word may have to wait."""
        self._pages: _C.SnapshotRanks = pages
        self.rank = rank
        self._places = {peer: place for place, peer in enumerate(local)}
        self._processes = processes
        self._store = store
        self._prefix = f"fsdp_c/snapshots/{name}"
        self._timeout_s = timeout_s
        self._has_remote = len(local) < len(processes)
        self._counts_updates = counts_updates
        self._keeper = rank if keeper is None else keeper
        self._n_updates = 0
        self._mine: dict[int, tuple[int, int]] = {}  # of the last two: step, updates before
        self._key_of_wait = 0

    def come(self, number: int, step: int) -> None:
        """This rank takes the snapshot of a step as its `number`-th.

        Raises:
            RuntimeError: a rank of this host has taken another step's.
        """
        self._mine.pop(number - 2, None)
        self._mine[number] = (step, self._n_updates)
        self._key_of_wait = _peer_location.meet(self._prefix, number)
        self._pages.set_word(word=_STEPS + number % 2, value=_step_word(number, step))
        self._pages.set_word(word=_TAKEN, value=number)
        for rank in self._places:
            self._check_same(rank, number)

    def count_update(self) -> None:
        """This rank is about to step an optimizer; what it has taken is settled."""
        self._n_updates += 1
        self._pages.set_word(word=_UPDATES, value=self._n_updates)

    def leave(self, how: int) -> None:
        """This rank takes no more."""
        self._pages.set_word(word=_LEFT, value=how)
        if self._has_remote and self._store is not None:
            number = max(self._mine, default=0)
            step, _ = self._mine.get(number, (0, 0))
            with contextlib.suppress(dist.DistError):  # it may be closed by now
                self._store.set(self._left_key(self.rank), f"{how} {number} {step}")

    def tell(self, number: int, outcome: int) -> None:
        """What became of this rank's snapshot of a number, from 1 on."""
        word = number << 2 | outcome
        self._pages.set_word(word=_OUTCOMES + number % 2, value=word)
        if self._has_remote and self._store is not None:
            self._store.set(self._key(self.rank, number), f"{word} {self._mine[number][0]}")

    def are_whole(self, number: int) -> bool:
        """Whether all ranks' snapshots of this number are; waits for those that do not know yet.

        Raises:
            RuntimeError: a rank has ended, or takes other steps. TimeoutError: it does not come.
        """
        outcomes = []
        inside = f"Snapshots.take(step={self._mine[number + 1][0]})"
        for rank in range(len(self._processes)):
            word = self._word(rank, number)
            if word >> 2 != number:
                with _peer_location.waiting(self._key_of_wait, inside):
                    word = self._await(rank, number)
            outcomes.append(word & 3)
        return all(outcome == WHOLE for outcome in outcomes)

    def _key(self, rank: int, number: int) -> str:
        return f"{self._prefix}/{rank}/{number % 2}"

    def _word(self, rank: int, number: int) -> int:
        place = self._places.get(rank)
        if place is not None:
            return self._pages.word(rank=place, word=_OUTCOMES + number % 2)
        assert self._store is not None
        key = self._key(rank, number)
        if not self._store.check([key]):
            return 0
        word, step = map(int, self._store.get(key).split())
        if word >> 2 == number:
            self._check_step(rank, number, step)
        return word

    def _left_key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}/left"

    def _left(self, rank: int, number: int) -> int:
        """How a rank has left; 0: it has not. One of another host says what it took last."""
        place = self._places.get(rank)
        if place is not None:
            return self._pages.word(rank=place, word=_LEFT)
        assert self._store is not None
        key = self._left_key(rank)
        if not self._store.check([key]):
            return 0
        how, last, step = map(int, self._store.get(key).split())
        if last == number:
            self._check_step(rank, number, step)
        return how

    def _check_same(self, rank: int, number: int) -> None:
        place = self._places.get(rank)
        if place is None or rank == self.rank:
            return
        step, updates = self._mine[number]
        # In this order: who has taken it may step since.
        theirs = self._pages.word(rank=place, word=_UPDATES)
        if self._pages.word(rank=place, word=_TAKEN) >= number:
            word = self._pages.word(rank=place, word=_STEPS + number % 2)
            other = word >> 2
            if word == _step_word(number, other):  # not of a later one already
                self._check_step(rank, number, other)
        elif self._counts_updates and theirs > updates:
            raise RuntimeError(
                f"Snapshots.take: rank {rank} has gone on to another update without the snapshot"
                f" of step {step}, which rank {self.rank} has taken. {_CURE}"
            )

    def _check_step(self, rank: int, number: int, theirs: int) -> None:
        mine = self._mine[number][0]
        if theirs != mine:
            raise RuntimeError(
                f"Snapshots.take: the snapshot that is of step {mine} on rank {self.rank} is"
                f" of step {theirs} on rank {rank}: one of them has left out a take(), or has"
                f" called it once more. {_CURE}"
            )

    def _await(self, rank: int, number: int) -> int:
        peer = self._keeper if rank == self.rank else rank
        start = time.monotonic()
        pause, next_look, n_notices = _rendezvous.POLL_MIN_S, start, 0
        while (word := self._word(rank, number)) >> 2 != number:
            self._check_same(rank, number)
            waited = time.monotonic() - start
            what = f"rank {self.rank} waited {waited:.1f} s in Snapshots.take for rank {peer}"
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _rendezvous.LOOK_S
                # In this order: what it has told before it left counts.
                left = self._left(peer, number)
                if left and (word := self._word(rank, number)) >> 2 == number:
                    return word
                if left == BY_EXCEPTION:
                    raise RuntimeError(f"{what}, which an exception has ended")
                if left == CLOSED:
                    raise RuntimeError(f"{what}, which has called close(). {_CURE}")
                if _rendezvous.is_gone(self._processes[peer]):
                    raise RuntimeError(f"{what}, which has exited or was killed")
                if why := _rendezvous.why_given_up([peer]):
                    raise RuntimeError(f"{what}, which is given up: {why}")
            if waited > self._timeout_s:
                raise TimeoutError(f"{what}. {_CURE}")
            if waited > _rendezvous.notice_at(n_notices):
                n_notices += 1
                print(f"[fsdp_c] {what}: is it in another step?", file=sys.stderr)
            time.sleep(pause)
            pause = min(pause * 2, _rendezvous.POLL_MAX_S)
        _rendezvous.why_given_up([])
        return word


def _step_word(number: int, step: int) -> int:
    return step << 2 | number >> 1 & 3
