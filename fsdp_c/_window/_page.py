"""The page of a process, as csrc/window/page.h lays it out, read by another process.

Nothing of it is believed before it is checked: a page is a file that somebody else writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

NAME = "window-of-fsdp_c"
VERSION = 3
MAGIC = 0x77696E646F776663

PHASES = (
    "set-up",
    "forward",
    "forward without gradients",
    "unshard",
    "backward",
    "between phases",
    "left by an exception",
)
USING_UNITS = ("forward", "forward without gradients", "unshard", "backward")
PURPOSES = ("objects", "slots", "gradients", "messages", "shared")
EVENTS = ("none", "phase", "unit", "passed", "left", "wait")

# Where blocks begin, and what is in them. Native order and sizes: pages are read where they are
# written.
HEAD_AT, NOW_AT, USE_AT, WAIT_AT, TOLD_AT, ERROR_AT, NAMES_AT = 0, 512, 1024, 1536, 2048, 2560, 4096
BEGAN = 32
HEAD = struct.Struct("=10Q128s")
NOW = struct.Struct(f"={5 + BEGAN + len(PURPOSES)}Q")
USE = struct.Struct("=2Q")
WAIT = struct.Struct("=8Q232s")
ERROR = struct.Struct("=3Q1512s")
TOLD = struct.Struct("=2Q496s")
EVENT = struct.Struct("=2Q3Ii")
WORD = struct.Struct("=Q")

_NO_RANK = 2**64 - 1  # FC_WINDOW_ALL
_MAX_BYTES = 64 << 20
_LONGEST_NAME = 1024
_TRIES = 200


class Refused(Exception):
    """A page that is none, or one that cannot be read."""


@dataclass(frozen=True)
class Head:
    """What does not change as long as the process lives."""

    n_bytes: int
    names_bytes: int
    n_events: int
    pid: int
    start_ticks: int
    rank: int
    world: int
    opened_ns: int
    run: str


@dataclass(frozen=True)
class Now:
    phase: int
    step: int
    since_ns: int
    n_began: int
    began_ns: tuple[int, ...]  # of the last steps, the oldest first
    memory: dict[str, int]
    unit: str


@dataclass(frozen=True)
class Wait:
    since_ns: int
    rank: int | None  # None: all others, or nobody in particular
    op: str
    unit: str
    step: int
    host: str  # of that rank, if it is another one; empty: it is not, or nobody knows
    place: str


@dataclass(frozen=True)
class Error:
    n_errors: int
    at_ns: int
    text: str


@dataclass(frozen=True)
class Event:
    kind: str
    from_ns: int
    value: int
    what: int
    unit: int
    rank: int | None


def text_of(raw: bytes) -> str:
    """What is before the first zero byte, without what a terminal would obey."""
    text = raw.partition(b"\0")[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


class Page:
    """An open page; `close()` it. Raises `Refused` where it is not what it ought to be."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Refused(f"it cannot be opened: {error.strerror}") from None
        self._names: dict[int, str] = {0: ""}
        try:
            self.head = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)

    # ---- reading ----

    def _read(self, at: int, n_bytes: int) -> bytes:
        """By a system call: memory that is mapped could be taken away under the reader."""
        try:
            found = os.pread(self._fd, n_bytes, at)
        except OSError as error:
            raise Refused(f"it cannot be read: {error.strerror}") from None
        if len(found) != n_bytes:
            raise Refused(f"it ends after {at + len(found)} bytes")
        return found

    def _word(self, at: int) -> int:
        return int(WORD.unpack(self._read(at, WORD.size))[0])

    def _block(self, at: int, layout: struct.Struct) -> tuple[int | bytes, ...]:
        """One whose first word is odd while its owner writes it."""
        for _ in range(_TRIES):
            before = self._word(at)
            block = layout.unpack(self._read(at, layout.size))
            if before % 2 == 0 and self._word(at) == before:
                return block
        raise Refused("its owner never ends writing it")

    def _read_head(self) -> Head:
        magic, version, n_bytes, names_bytes, n_events, pid, ticks, rank, world, opened, run = (
            HEAD.unpack(self._read(HEAD_AT, HEAD.size))
        )
        if magic != MAGIC:
            raise Refused("it is no page of fsdp_c")
        if version != VERSION:
            raise Refused(f"its layout is version {version}, and this fsdp_c reads {VERSION}")
        size = os.fstat(self._fd).st_size
        needed = NAMES_AT + names_bytes + n_events * EVENT.size
        if not (n_bytes == size == needed <= _MAX_BYTES and rank < 1 << 31 and world < 1 << 31):
            raise Refused("its numbers do not fit each other")
        return Head(n_bytes, names_bytes, n_events, pid, ticks, rank, world, opened, text_of(run))

    def name(self, at: int) -> str:
        """The text that this number stands for; names do not change."""
        if at not in self._names:
            if not 0 < at < self.head.names_bytes:
                raise Refused(f"it has no name of number {at}")
            n_bytes = min(self.head.names_bytes - at, _LONGEST_NAME)
            self._names[at] = text_of(self._read(NAMES_AT + at, n_bytes))
        return self._names[at]

    # ---- what it says ----

    def now(self) -> Now:
        _, phase, step, since, n_began, *rest = map(int, self._block(NOW_AT, NOW))
        if phase >= len(PHASES):
            raise Refused(f"it is in phase {phase}")
        began, memory = rest[:BEGAN], rest[BEGAN:]
        order = range(max(n_began - BEGAN, 0), n_began) if n_began < 1 << 62 else range(0)
        unit = self._word(USE_AT)
        return Now(
            phase,
            step,
            since,
            n_began,
            tuple(began[n % BEGAN] for n in order),
            dict(zip(PURPOSES, memory, strict=True)),
            self.name(unit),
        )

    def wait(self) -> Wait | None:
        _, is_waiting, since, rank, op, unit, step, host, place = self._block(WAIT_AT, WAIT)
        if not is_waiting:
            return None
        whom = None if rank == _NO_RANK else int(rank)
        assert isinstance(place, bytes)
        return Wait(
            int(since),
            whom,
            self.name(int(op)),
            self.name(int(unit)),
            int(step),
            self.name(int(host)),
            text_of(place) or self._told_of(int(since)),
        )

    def _told_of(self, since_ns: int) -> str:
        """What another thread than the one that waits knows of the one that it waits for."""
        _, since, text = self._block(TOLD_AT, TOLD)
        assert isinstance(text, bytes)
        return text_of(text) if since == since_ns else ""

    def error(self) -> Error | None:
        _, n_errors, at, text = self._block(ERROR_AT, ERROR)
        assert isinstance(text, bytes)
        return Error(int(n_errors), int(at), text_of(text)) if n_errors else None

    def events(self) -> Iterator[Event]:
        """What is kept, the oldest first; what its owner may write over meanwhile is left out."""
        capacity = self.head.n_events
        if capacity == 0:
            return
        at = NAMES_AT + self.head.names_bytes
        until = self._word(USE_AT + WORD.size)
        raw = self._read(at, capacity * EVENT.size)
        oldest = max(self._word(USE_AT + WORD.size) + 1 - capacity, 0)
        for n in range(oldest, until):
            start, value, kind, what, unit, rank = EVENT.unpack_from(raw, n % capacity * EVENT.size)
            if 0 < kind < len(EVENTS):
                whom = None if rank < 0 else rank
                yield Event(EVENTS[kind], start, value, what, unit, whom)
