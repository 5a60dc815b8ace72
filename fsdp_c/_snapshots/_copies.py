"""Second copies of snapshots, in the memory of another host (`copies=2`).

A rank's snapshots go, beside the next step, to a rank of the next host, which keeps the last two as
it keeps its own. Bytes travel over a process group that does nothing else; what they are is said in
the store, so that nobody waits in the group for something that may not come:

    owner   offer                       sending  ........  commit | drop
    keeper        ready | full | kept            (bytes)                 kept         gone

The owner's part of a snapshot is told to be whole when its copy is kept, too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_c._comm import _hosts, _rendezvous
from fsdp_c._native import _C
from fsdp_c._snapshots import _files, _peers

_POLL_S = 0.005
_ENDS_S = 5.0  # for bytes that are under way when the run ends


class Kept(NamedTuple):
    """Where a rank keeps another one's copies."""

    owner: int
    slots: list[_files.Slot]
    problem: str = ""  # why there are none


class _Stopped(Exception):
    """The snapshots are closed."""


def keepers(hosts: _hosts.Hosts) -> list[int]:
    """Of each rank the rank that keeps its copies: one of the next host."""
    members: list[list[int]] = [[] for _ in hosts.names]
    places = []
    for rank, host in enumerate(hosts.hosts):
        places.append(len(members[host]))
        members[host].append(rank)
    after = [members[(host + 1) % len(members)] for host in hosts.hosts]
    return [peers[place % len(peers)] for peers, place in zip(after, places, strict=True)]


def body_of(memory: Any, n_bytes: int) -> Tensor:
    """Data and index in a file."""
    return torch.frombuffer(memory, dtype=torch.uint8)[_C.SNAPSHOT_PAGE :][:n_bytes]


class _Line:
    """What an owner and its keeper say to each other: the last word of each, in the store."""

    def __init__(self, store: dist.Store, prefix: str, owner: int) -> None:
        self._store = store
        self._keys = [f"{prefix}/copies/{owner}/{side}" for side in ("owner", "keeper")]

    def say(self, side: int, number: int, *words: Any) -> None:
        self._store.set(self._keys[side], " ".join(map(str, (number, *words))))

    def heard(self, side: int) -> tuple[int, list[str]]:
        """The last word of a side; number -1 if there is none."""
        key = self._keys[side]
        number, *words = self._store.get(key).decode().split() if self._store.check([key]) else "-"
        return (int(number), words) if words else (-1, [])


class _Job:
    """A snapshot that is on its way to the keeper; without memory, one that was not taken."""

    def __init__(
        self, number: int, memory: Any = None, sequence: int = 0, n_bytes: int = 0, stays: int = 0
    ) -> None:
        self.number, self.memory, self.sequence, self.n_bytes = number, memory, sequence, n_bytes
        self.stays = stays  # what all ranks have in common, by its sequence: as long as this counts
        self.outcome: int | None = None
        self.is_settled = threading.Event()


class _Sender:
    """Sends this rank's snapshots, in a thread."""

    def __init__(
        self, line: _Line, send: Callable[[Tensor], None], tell: Callable[[int, int], None]
    ) -> None:
        self._line, self._send, self._tell = line, send, tell
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: _Job | None = None
        self._stops = threading.Event()
        self.problem = ""  # the last one, for people
        self.is_lost = False
        self.thread = threading.Thread(target=self._run, name="fsdp_c copies", daemon=True)
        self.thread.start()

    def begin(self, job: _Job) -> None:
        self._last = job
        self._jobs.put(job)

    def settle(self, outcome: int) -> None:
        """What became of the last snapshot on this host."""
        if self._last is not None:
            self._last.outcome = outcome
            self._last.is_settled.set()

    def stop(self) -> None:
        self._stops.set()
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self.is_lost:
                    is_kept = job.memory is not None and self._offer(job)
                    self._wait(job.is_settled.is_set)
                    self._end(job, is_kept)
            except _Stopped:
                with contextlib.suppress(Exception):
                    self._line.say(0, job.number, "drop")
                return
            except Exception as error:
                self.problem, self.is_lost = f"{error}", True
            while not job.is_settled.wait(0.1):  # the run goes on without copies
                if self._stops.is_set():
                    return
            if job.number > 0 and job.memory is not None:
                self._tell(job.number, job.outcome or _peers.FAILED)

    def _offer(self, job: _Job) -> bool:
        """Whether the keeper has the bytes."""
        self._line.say(0, job.number, "offer", job.n_bytes, job.sequence, job.stays)
        answer = self._answer(job)
        if answer[0] != "ready":  # full, or kept: it is there from before the run was resumed
            self.problem = " ".join(answer[1:])
            return False
        self._wait(lambda: self._is_copied(job) or job.is_settled.is_set())
        if not self._is_copied(job):
            return False
        self._line.say(0, job.number, "sending")
        self._send(body_of(job.memory, job.n_bytes))
        return True

    def _end(self, job: _Job, is_kept: bool) -> None:
        if not is_kept or job.outcome != _peers.WHOLE:
            self._line.say(0, job.number, "drop")
            return
        self._line.say(0, job.number, "commit", _C.snapshot_header(job.memory).hex())
        answer = self._answer(job, after="ready")
        self.problem = "" if answer[0] == "kept" else " ".join(answer)

    def _answer(self, job: _Job, after: str = "") -> list[str]:
        found: list[str] = []

        def has_come() -> bool:
            number, words = self._line.heard(1)
            found[:] = words
            if words[:1] == ["gone"]:
                raise RuntimeError(" ".join(words[1:]) or "the rank there has closed its snapshots")
            return number == job.number and words[0] != after

        self._wait(has_come)
        return found

    def _is_copied(self, job: _Job) -> bool:
        facts = _C.snapshot_facts(job.memory)
        return facts is not None and facts["sequence"] == job.sequence

    def _wait(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            if self._stops.wait(_POLL_S):
                raise _Stopped


class _Keeper:
    """Keeps another rank's snapshots, in a thread; looks at the store only after this rank has
    taken one itself."""

    def __init__(
        self,
        line: _Line,
        kept: Kept,
        receive: Callable[[Tensor], None],
        owner: Callable[[], _files.Owner],
    ) -> None:
        self._line, self._kept, self._receive, self._owner = line, kept, receive, owner
        self._wakes = threading.Condition()
        self._taken = -1  # the last one of this rank
        self._stops = False
        self.thread = threading.Thread(target=self._run, name="fsdp_c copies", daemon=True)
        self.thread.start()

    def expect(self, number: int) -> None:
        with self._wakes:
            self._taken = number
            self._wakes.notify()

    def stop(self) -> None:
        with self._wakes:
            self._stops = True
            self._wakes.notify()

    def _run(self) -> None:
        handled, why = -1, ""
        try:
            while self._has_taken_after(handled):
                handled, words = self._next(handled + 1, "", is_due=False)
                if words[0] == "offer":
                    self._keep(handled, *map(int, words[1:]))
        except _Stopped:
            pass
        except Exception as error:
            why = str(error)
        with contextlib.suppress(Exception):  # the owner may be gone, and the store with it
            self._line.say(1, 0, "gone", why)

    def _has_taken_after(self, number: int) -> bool:
        """Waits until this rank has taken a later one; False: there will be none."""
        with self._wakes:
            self._wakes.wait_for(lambda: self._taken > number or self._stops)
            return not self._stops

    def _next(self, number: int, before: str, is_due: bool) -> tuple[int, list[str]]:
        """The owner's first word about a snapshot of this number or a later one that is not
        `before`; raises if the run ends and none is due."""
        end: float | None = None
        pause = _POLL_S
        while True:
            found, words = self._line.heard(0)
            if found > number or (found == number and words[0] != before):
                return found, words
            if self._stops:
                end = end or time.monotonic() + (_ENDS_S if is_due else 0)
                if time.monotonic() >= end:
                    raise _Stopped
            time.sleep(pause)
            pause = min(pause * 2, _rendezvous.POLL_MAX_S)

    def _keep(self, number: int, n_bytes: int, sequence: int, stays: int) -> None:
        if not self._kept.slots:
            self._line.say(1, number, "full", self._kept.problem)
            return
        held = [(slot.facts() or {"sequence": 0})["sequence"] for slot in self._kept.slots]
        if number == 0 and sequence in held:
            self._line.say(1, number, "kept")
            return
        # The older one; but snapshots that did not count may have come since what stays.
        _, place = min((one, place) for place, one in enumerate(held) if one != stays or one == 0)
        slot = self._kept.slots[place]
        slot.clear()
        try:
            slot.reserve(_C.SNAPSHOT_PAGE + n_bytes)
        except _files.Unusable as reason:
            self._line.say(1, number, "full", reason)
            return
        slot.set_owner(self._owner())
        self._line.say(1, number, "ready")
        found, words = self._next(number, "offer", is_due=True)
        if found == number and words[0] == "sending":
            self._receive(body_of(slot.memory, n_bytes))
            found, words = self._next(number, "sending", is_due=True)
        if found == number and words[0] == "commit":
            is_fit = _C.snapshot_adopt(file=slot.memory, header=bytes.fromhex(words[1]))
            self._line.say(1, number, "kept" if is_fit else "the copy is not what was sent")


class Copies:
    """This rank's part: what it sends, and what it keeps for others."""

    def __init__(
        self,
        rank: int,
        hosts: _hosts.Hosts,
        group: dist.ProcessGroup,
        store: dist.Store,
        prefix: str,
        kept: Sequence[Kept],
        owner_of: Callable[[int], _files.Owner],
        tell: Callable[[int, int], None],
    ) -> None:
        """`kept`: of each rank that this one keeps copies for; `owner_of`: what their files say of
        this process. `tell`: what became of this rank's snapshot of a number."""
        to = keepers(hosts)[rank]
        self.host = hosts.names[hosts.hosts[to]]
        self._kept = kept

        def send(data: Tensor) -> None:
            group.send([data], to, rank).wait()

        def keeper_of(one: Kept) -> _Keeper:
            return _Keeper(
                _Line(store, prefix, one.owner),
                one,
                receive=lambda data: group.recv([data], one.owner, one.owner).wait(),
                owner=lambda: owner_of(one.owner),
            )

        self._sender = _Sender(_Line(store, prefix, rank), send, tell)
        self._keepers = list(map(keeper_of, kept))

    @property
    def problem(self) -> str:
        """Why the last snapshot has no second copy, or nothing."""
        return self._sender.problem

    def begin(
        self, number: int, slot: _files.Slot, sequence: int, n_bytes: int, stays: int = 0
    ) -> None:
        """A snapshot is being taken; 0: one that is whole, from before `resume`. `stays`: the
        sequence of the one whose copy it may not replace."""
        self._go(_Job(number, slot.memory, sequence, n_bytes, stays))

    def skip(self, number: int) -> None:
        """It is not taken, which the others know already."""
        self._go(_Job(number))
        self.settle(_peers.FAILED)

    def _go(self, job: _Job) -> None:
        for keeper in self._keepers:
            keeper.expect(job.number)
        self._sender.begin(job)

    def settle(self, outcome: int) -> None:
        """What became of it here. It is told when its copy is kept, or cannot be."""
        self._sender.settle(outcome)

    def close(self) -> None:
        parts = (self._sender, *self._keepers)
        for part in parts:
            part.stop()
        for part in parts:
            part.thread.join(_ENDS_S)
        for one in self._kept:
            for slot in one.slots:
                slot.close()
