"""Finds the pages of this host's processes: files in memory that they keep open.

The kernel decides whose files may be looked at: one's own, and root all. Of others not even the
names can be read, so their processes are left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_c._window import _page
from fsdp_c._window._page import Page, Refused

_PROC = Path("/proc")
_LOOKS = 5  # processes without a page are asked again after so many
_LINK = f"/memfd:{_page.NAME} (deleted)"


@dataclass
class Seen:
    """Pages that are open; each is looked for once and kept, also after its process has ended."""

    pages: dict[int, Page] = field(default_factory=dict)  # by pid, as seen from here
    refused: dict[int, str] = field(default_factory=dict)  # why a process's page is not read
    _n_looks: int = 0
    _without: dict[int, int] = field(default_factory=dict)  # by pid, the look that found none

    def look(self) -> None:
        """Takes in processes that are new, and lets go of those that have ended."""
        self.refused.clear()
        for pid in list(self.pages):
            if not _is_process(pid, self.pages[pid]):
                self.pages.pop(pid).close()
        pids = set(_pids())
        self._n_looks += 1
        for pid in self._without.keys() - pids:
            del self._without[pid]
        for pid in pids - self.pages.keys():
            if self._n_looks - self._without.get(pid, -_LOOKS) >= _LOOKS:
                self._open(pid)

    def _open(self, pid: int) -> None:
        paths = list(_candidates(pid))
        if not paths:
            self._without[pid] = self._n_looks
        for path in paths:
            try:
                page = Page(path)
            except Refused as error:
                self.refused[pid] = str(error)
                continue
            if _is_process(pid, page):
                self.pages[pid] = page
                self.refused.pop(pid, None)
                return
            page.close()  # a parent's, or one that somebody was handed

    def refuse(self, pid: int, why: str) -> None:
        self.pages.pop(pid).close()
        self.refused[pid] = why

    def close(self) -> None:
        while self.pages:
            self.pages.popitem()[1].close()


def require_run(parser: argparse.ArgumentParser, seen: Seen, run: str | None) -> None:
    """Ends the program where a run was named and no rank here is of it."""
    runs = sorted({page.head.run for page in seen.pages.values()})
    if run is not None and run not in runs:
        there = ", ".join(runs) or "none"
        parser.exit(1, f"no rank here is of run {run}: runs that can be seen are {there}\n")


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())


def _candidates(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # another user's, or it has ended
        return
    for name in names:
        path = f"{folder}/{name}"
        try:
            if os.readlink(path) == _LINK:
                yield path
        except OSError:
            continue


def _is_process(pid: int, page: Page) -> bool:
    """Whether the process still is the one that the page says it is of."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    numbers = next((s.split() for s in status.splitlines() if s.startswith("NSpid:")), [str(pid)])
    is_it = int(fields[19]) == page.head.start_ticks and int(numbers[-1]) == page.head.pid
    return is_it and fields[0] not in "ZX"


def resident_bytes(pid: int) -> int | None:
    """Memory that the process has in use, what it shares included; None: it has ended."""
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def script_of(pid: int) -> str:
    """What the process runs, for people; empty if that is not known."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    found = next((w for w in words[1:] if w.endswith(".py")), words[0] if words else "")
    return _page.text_of(os.path.basename(found).encode())


def pid_namespace(pid: int) -> int:
    """The number of the namespace that gives the process its pid; 0: not known."""
    try:
        return os.stat(_PROC / str(pid) / "ns" / "pid").st_ino
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether it is stopped, by SIGSTOP or a debugger."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in "Tt"
