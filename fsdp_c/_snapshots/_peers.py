"""How ranks know of each other which snapshots are whole, without a collective.

A rank may write over its older snapshot only when all ranks have the newer one: else, killed at
once, they would have none in common. It writes down what became of its last two; ranks of the host
read that in its file's page, others in the store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_c._comm import _rendezvous
from fsdp_c._native import _C

WHOLE, FAILED = 1, 2


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
    ) -> None:
        """`pages`: of the ranks `local`, in their order, this one too."""
        self._pages: _C.SnapshotRanks = pages
        self._rank = rank
        self._places = {peer: place for place, peer in enumerate(local)}
        self._processes = processes
        self._store = store
        self._prefix = f"fsdp_c/snapshots/{name}"
        self._timeout_s = timeout_s
        self._has_remote = len(local) < len(processes)

    def tell(self, number: int, outcome: int) -> None:
        """What became of this rank's snapshot of a number, from 1 on."""
        word = number << 2 | outcome
        self._pages.set_word(word=number % 2, value=word)
        if self._has_remote and self._store is not None:
            self._store.set(self._key(self._rank, number), str(word))

    def are_whole(self, number: int) -> bool:
        """Whether all ranks' snapshots of this number are; waits for those that do not know yet.

        Raises:
            RuntimeError: a rank has ended. TimeoutError: it does not come.
        """
        outcomes = []
        for rank in range(len(self._processes)):
            word = self._word(rank, number)
            if word >> 2 != number:
                word = self._await(rank, number)
            outcomes.append(word & 3)
        return all(outcome == WHOLE for outcome in outcomes)

    def _key(self, rank: int, number: int) -> str:
        return f"{self._prefix}/{rank}/{number % 2}"

    def _word(self, rank: int, number: int) -> int:
        place = self._places.get(rank)
        if place is not None:
            return self._pages.word(rank=place, word=number % 2)
        assert self._store is not None
        key = self._key(rank, number)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _await(self, rank: int, number: int) -> int:
        start = time.monotonic()
        pause, next_look, n_notices = _rendezvous.POLL_MIN_S, start, 0
        while (word := self._word(rank, number)) >> 2 != number:
            waited = time.monotonic() - start
            what = f"rank {self._rank} waited {waited:.0f} s in Snapshots.take for rank {rank}"
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _rendezvous.LOOK_S
                if _rendezvous.is_gone(self._processes[rank]):
                    raise RuntimeError(f"{what}, which has exited or was killed")
            if waited > self._timeout_s:
                raise TimeoutError(f"{what}: all ranks have to take the same snapshots")
            if waited > _rendezvous.notice_at(n_notices):
                n_notices += 1
                print(f"[fsdp_c] {what}: is it in another step?", file=sys.stderr)
            time.sleep(pause)
            pause = min(pause * 2, _rendezvous.POLL_MAX_S)
        return word
