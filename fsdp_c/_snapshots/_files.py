"""Files of snapshots: two for each rank, in memory or in a folder, and whose they are."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_c import _text
from fsdp_c._comm import _rendezvous
from fsdp_c._native import _C
from fsdp_c._snapshots import _run

MEMORY = Path("/dev/shm")
N_SLOTS = 2
_PREFIX = "fsdp_c-snapshots-"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_FILE = re.compile(r"(?P<run>.*)-(?P<rank>\d+)\.(?P<slot>\d)")
_NAMELESS_S = 600  # a file is given its owner's text as soon as it is there
_GROWTH = 1 << 16  # room beyond what is needed, so that an index may become longer


class Unusable(Exception):
    """There is no room for snapshots, or no right to have them; in words."""


@dataclass(frozen=True)
class Owner:
    """What a file's first page says of the process that writes it."""

    run: str  # its script
    launcher: str
    process: str
    name: str
    rank: int
    world: int
    shown: str = ""  # how `top` calls the run; empty: an older fsdp_c wrote it


def check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"Snapshots: name={name!r}: letters, digits, '_' and '.' make a name")


def folder_and_stem(folder: str | os.PathLike[str] | None, name: str) -> tuple[Path, str]:
    """Where a run's files are, and how their names begin.

    A folder of the user's names the run by itself; in memory its launcher does.
    """
    if folder is not None:
        return Path(folder), f"{_PREFIX}{name}"
    run = _run.digest(_run.launcher())
    return MEMORY, f"{_PREFIX}{os.getuid()}-{run}-{name}"


class Slot:
    """A file of this rank; mapped as long as this object is there."""

    def __init__(self, path: Path) -> None:
        """Makes or opens it, with room for its first page.

        Raises:
            Unusable: that cannot be.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise Unusable(f"{path} cannot be opened: {error.strerror}") from None
        about = os.fstat(self._file)
        if not _is_ours(about):
            os.close(self._file)
            raise Unusable(f"{path} belongs to another user")
        os.fchmod(self._file, stat.S_IRUSR | stat.S_IWUSR)
        self.identity = [about.st_dev, about.st_ino]
        self._bytes = about.st_size
        try:
            self.reserve(_C.SNAPSHOT_PAGE)
        except Unusable:
            self.close()
            if about.st_size == 0:
                path.unlink(missing_ok=True)
            raise
        self.memory = self._map()

    def reserve(self, n_bytes: int) -> None:
        """Makes the file at least so long, with all of its memory there.

        Raises:
            Unusable: the file system is full.
        """
        if n_bytes <= self._bytes:
            return
        n_bytes = -(-(n_bytes + _GROWTH) // mmap.PAGESIZE) * mmap.PAGESIZE
        before = self._bytes
        about = os.fstatvfs(self._file)
        if about.f_bavail * about.f_frsize < n_bytes - before:  # to try would take its time
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise Unusable(_why_not(self.path, n_bytes - before, full))
        try:
            # A full file system is an error here, and not a signal in the middle of a copy.
            os.posix_fallocate(self._file, 0, n_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise Unusable(_why_not(self.path, n_bytes - before, error)) from None
        self._bytes = n_bytes
        self.memory = self._map()

    def _map(self) -> mmap.mmap:
        # Older mappings end with what refers to them.
        populated = getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(self._file, self._bytes, flags=mmap.MAP_SHARED | populated)

    def facts(self) -> dict[str, int] | None:
        """Of the snapshot in it; None: none was finished."""
        return _C.snapshot_facts(self.memory)

    def is_intact(self) -> bool:
        return _C.snapshot_is_intact(self.memory)

    def clear(self) -> None:
        _C.snapshot_clear(self.memory)

    def data(self) -> tuple[Tensor, bytes]:
        """Bytes of the data, which are the file's, and the index."""
        facts = self.facts()
        assert facts is not None
        everything = torch.frombuffer(self.memory, dtype=torch.uint8)[_C.SNAPSHOT_PAGE :]
        end = facts["data_bytes"]
        at = _C.SNAPSHOT_PAGE + end
        return everything[:end], self.memory[at : at + facts["index_bytes"]]

    def owner(self) -> Owner | None:
        return _owner_in(self.memory[_C.SNAPSHOT_TEXT_AT : _C.SNAPSHOT_PAGE])

    def set_owner(self, owner: Owner) -> None:
        room = _C.SNAPSHOT_PAGE - _C.SNAPSHOT_TEXT_AT
        short = dataclasses.replace(owner, run=owner.run[-1000:])
        text = json.dumps(dataclasses.asdict(short)).encode()
        self.memory[_C.SNAPSHOT_TEXT_AT : _C.SNAPSHOT_PAGE] = text.ljust(room, b"\0")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _why_not(path: Path, n_bytes: int, error: OSError) -> str:
    wanted = f"{_text.bytes_text(n_bytes)} more for {path}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return f"no {wanted}: {error.strerror}"
    about = os.statvfs(path.parent)
    free = _text.bytes_text(about.f_bavail * about.f_frsize)
    return (
        f"{path.parent} is full: it has {free} left, and a snapshot needs {wanted}. Make it"
        " larger (docker: --shm-size; mount -o remount,size=...), or give Snapshots a folder="
    )


def _owner_in(text: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(text.rstrip(b"\0")))
    except (ValueError, TypeError):  # nobody has written there yet
        return None


def in_use_by(owner: Owner | None) -> str | None:
    """The living process that writes a file, if it is known to live and another than this."""
    if owner is None or not is_alive(owner.process):
        return None
    return None if owner.process == _rendezvous.this_process() else owner.process.split()[1]


def is_alive(process: str) -> bool:
    """Of a process of this host and process space; of others it is not known."""
    host, _, start = process.split()
    mine = _rendezvous.this_process().split()[0]
    return start != "None" and host == mine and not _rendezvous.is_gone(process)


def is_over(owner: Owner) -> bool:
    """Whether a run is known to have ended: its launcher and the rank are gone.

    A launcher outside of this space of processes (`docker exec`) is the process 0: who knows.
    """
    here = _rendezvous.this_process().split()[0]
    processes = [p.split() for p in (owner.launcher, owner.process)]
    return all(
        host == here and pid != "0" and not is_alive(f"{host} {pid} {start}")
        for host, pid, start in processes
    )


# ---- all of them ----


@dataclass(frozen=True)
class Found:
    """A file that lies somewhere."""

    path: Path
    run: str  # of the file's name: alike in all files of a run's Snapshots
    rank: int
    owner: Owner | None
    step: int | None  # None: no snapshot in it is whole
    n_bytes: int
    age_s: float


def find(folder: Path | None = None) -> list[Found]:
    """This user's files, by name; in memory unless a folder is given."""
    folder = folder or MEMORY
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        match = _FILE.fullmatch(path.name.removeprefix(_PREFIX))
        with contextlib.suppress(OSError):
            about = path.lstat()
            if match and _is_ours(about):
                facts, owner = _look(path)
                step = facts["step"] if facts else None
                age = time.time() - about.st_mtime
                rank, size = int(match["rank"]), about.st_size
                found.append(Found(path, match["run"], rank, owner, step, size, age))
    return found


def _is_ours(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()


def _look(path: Path) -> tuple[dict[str, Any] | None, Owner | None]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < _C.SNAPSHOT_PAGE:
            return None, None
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    owner = _owner_in(memory[_C.SNAPSHOT_TEXT_AT : _C.SNAPSHOT_PAGE])
    return _C.snapshot_facts(memory), owner


def remove_left_overs() -> None:
    """Files in memory of runs that nobody will start again."""
    for found in find():
        if found.owner is not None:
            is_left = is_over(found.owner)
        else:
            is_left = found.step is None and found.age_s > _NAMELESS_S
        if is_left:
            found.path.unlink(missing_ok=True)


def paths(folder: Path, stem: str, rank: int, is_copy: bool = False) -> Iterator[Path]:
    """Of a rank's snapshots, or of copies of them that another rank keeps."""
    first = N_SLOTS if is_copy else 0
    return (folder / f"{stem}-{rank}.{slot}" for slot in range(first, first + N_SLOTS))


class Lying(NamedTuple):
    """A snapshot in a file that is not of the rank that found it."""

    rank: int  # whose snapshot it is
    sequence: int
    step: int
    n_bytes: int  # of data and index
    path: str


def lying(folder: Path, stem: str, besides: int) -> list[Lying]:
    """Those of a run here, but for a rank's own files."""
    found = []
    own = set(paths(folder, stem, besides))
    for path in sorted(folder.glob(f"{stem}-*")):
        match = _FILE.fullmatch(path.name)
        if match is None or match["run"] != stem or path in own:
            continue
        with contextlib.suppress(OSError):
            about = path.lstat()
            facts = _look(path)[0] if _is_ours(about) else None
            if facts is not None:
                n_bytes = facts["data_bytes"] + facts["index_bytes"]
                at = facts["sequence"], facts["step"]
                found.append(Lying(int(match["rank"]), *at, n_bytes, str(path)))
    return found
