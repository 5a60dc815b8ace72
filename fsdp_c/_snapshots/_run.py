"""Which run this process is of: what a restart of it finds again, and another run does not."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from fsdp_c import _env
from fsdp_c._comm import _rendezvous

_VARIABLE = b"TORCHELASTIC_RUN_ID="


def launcher() -> str:
    """The process that would start this one again, as `this_process` tells one.

    Under torchrun its agent, past shells and other wrappers; else the parent.
    """
    pid = os.getppid()
    while _env.run_id() and _is_of_run(pid):
        parent = _parent_of(pid)
        if parent is None:
            break
        pid = parent
    return _rendezvous.process_of(pid)


def _is_of_run(pid: int) -> bool:
    """Whether a process was started with the run's number, as an agent's children are."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return _VARIABLE + _env.run_id().encode() in variables


def _parent_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]) or None


def script() -> str:
    """What runs, for people; without torchrun it tells runs of one shell apart, too."""
    path = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    return os.path.abspath(path) if path else "python"


def digest(launched_by: str) -> str:
    """A name of the run: of its launcher, and of what that calls it.

    A shell calls it by its command: the same script with other arguments is another run.
    """
    named = _env.run_id() or "\0".join((script(), *sys.argv[1:]))
    return hashlib.blake2b(f"{launched_by}\0{named}".encode(), digest_size=8).hexdigest()
