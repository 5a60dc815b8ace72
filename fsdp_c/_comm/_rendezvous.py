"""How ranks meet before they have a transport: a few bytes at a time, over their group's store."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _env
from fsdp_c._comm import _process_group

POLL_MIN_S = 0.0005
POLL_MAX_S = 0.02
_NOTICES_S = (5.0, 15.0, 45.0, 120.0)  # how long a wait has lasted when people are told
_LATER_S = 300.0  # after these
LOOK_S = 0.25  # between looks at whether awaited ranks still live
_GRACE_S = 0.5  # for a signal that ended a peer and is on its way here

# Groups whose ranks are no processes of their own.
_NO_PROCESSES = frozenset({"fake", "threaded"})


def this_process() -> str:
    """Which process this is, as a peer on the same host can check: host, pid, start time."""
    return process_of(os.getpid())


def process_of(pid: int) -> str:
    """The same of another process of this host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}/{namespace} {pid} {_start_ticks(pid)}"


def _start_ticks(pid: int) -> str | None:
    """When the process began; None if it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def is_gone(process: str) -> bool:
    """Whether a process of this host, as told by `this_process`, has ended."""
    host, pid, start = process.split()
    return this_process().split()[0] == host and _start_ticks(int(pid)) != start


def notice_at(n_notices: int) -> float:
    """How long a wait has to last for one notice more."""
    n_later = n_notices - len(_NOTICES_S) + 1
    return _NOTICES_S[n_notices] if n_later <= 0 else _NOTICES_S[-1] + n_later * _LATER_S


class Rendezvous:
    """Exchanges a few bytes between the ranks of a group over its store; for set-up only.

    It polls instead of blocking in the store, so that Ctrl-C works and late ranks can be named.
    """

    def __init__(
        self, store: dist.Store, rank: int, n_ranks: int, timeout_s: float, label: str
    ) -> None:
        self.store = store
        self.rank = rank
        self.n_ranks = n_ranks
        self.timeout_s = timeout_s
        self.label = label
        self.count = 0

    def exchange(self, what: str, mine: bytes) -> list[bytes]:
        """All ranks' bytes in rank order.

        Ranks at different steps wait for different keys, and end with a TimeoutError that says so.
        """
        self.count += 1
        try:
            return self._exchange(what, mine)
        except dist.DistError as error:
            time.sleep(_GRACE_S)  # raises what a signal's handler does
            raise RuntimeError(
                f"rank {self.rank} of process group {self.label} lost the group's store in the"
                f" set-up of fsdp_c ({what}): the process that keeps it (rank 0, or the launcher)"
                " has exited or was killed"
            ) from error

    def _exchange(self, what: str, mine: bytes) -> list[bytes]:
        prefix = f"fsdp_c/{self.count}/{what}"
        self.store.set(f"{prefix}/{self.rank}", mine)
        keys = [f"{prefix}/{rank}" for rank in range(self.n_ranks)]
        self._await(what, keys)
        answers = [bytes(self.store.get(key)) for key in keys]
        # Who comes last has seen everybody read everything.
        if self.store.add(f"{prefix}/read", 1) == self.n_ranks:
            for key in (*keys, f"{prefix}/read"):
                self.store.delete_key(key)
        return answers

    def _await(self, what: str, keys: list[str]) -> None:
        start = time.monotonic()
        pause = POLL_MIN_S
        next_look = start + LOOK_S
        n_notices = 0
        while missing := [rank for rank, key in enumerate(keys) if not self.store.check([key])]:
            waited = time.monotonic() - start
            names = ", ".join(map(str, missing))
            if waited > self.timeout_s:
                raise TimeoutError(
                    f"rank {self.rank} of process group {self.label} waited {waited:.0f} s"
                    f" for ranks [{names}] of it in {what}{self._why_missing(missing)}"
                )
            if waited > notice_at(n_notices):
                n_notices += 1
                print(
                    f"[fsdp_c] rank {self.rank} of process group {self.label} has waited"
                    f" {waited:.0f} s for ranks [{names}] of it in {what}"
                    f"{self._why_missing(missing)}",
                    file=sys.stderr,
                )
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                self._check_alive(what, missing)
            time.sleep(pause)
            pause = min(pause * 2, POLL_MAX_S)

    def _why_missing(self, missing: list[int]) -> str:
        """A launcher of its own may start other ranks as the script alone."""
        if not self.store.check([_process_key(self.rank)]):
            return ""  # not a group in which ranks say so
        strange = [rank for rank in missing if not self.store.check([_process_key(rank)])]
        if not strange:
            return ""
        return (
            f"; ranks {strange} have sharded nothing with fsdp_c yet: if they never do, start all"
            " ranks alike (torchrun -m fsdp_c), or call fsdp_c.install() in the script"
        )

    def _check_alive(self, what: str, ranks: list[int]) -> None:
        for rank in ranks:
            key = _process_key(rank)
            if self.store.check([key]) and is_gone(self.store.get(key).decode()):
                time.sleep(_GRACE_S)  # raises what a signal's handler does
                raise RuntimeError(
                    f"rank {rank} of process group {self.label} has exited or was killed while"
                    f" rank {self.rank} waited for it in the set-up of fsdp_c ({what})"
                )


def _process_key(rank: int) -> str:
    return f"fsdp_c/process/{rank}"


_announced: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def announce(group: dist.ProcessGroup) -> None:
    """Tells the group's ranks which process this is, so that they notice if it dies before set-up.

    Local, once per group.
    """
    if group.size() == 1 or group in _announced or group not in c10d._world.pg_map:
        return
    _announced.add(group)
    store = store_of(group)
    if store is not None:
        store.set(_process_key(group.rank()), this_process())


_rendezvous: weakref.WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = weakref.WeakKeyDictionary()


def exchange_for(group: dist.ProcessGroup) -> Callable[[str, bytes], list[bytes]] | None:
    """Exchanges bytes between the ranks of a group, as `Rendezvous.exchange`.

    None where the ranks have no store in common (or nobody to talk to).
    """
    store = store_of(group)
    if store is None or group.size() == 1:
        return None
    if group not in _rendezvous:
        timeout = _process_group.timeout_s(group, torch.device("cpu"))
        _rendezvous[group] = Rendezvous(
            store, group.rank(), group.size(), timeout, _process_group.label(group)
        )
    return _rendezvous[group].exchange


def for_core(
    exchange: Callable[[str, bytes], list[bytes]],
) -> Callable[[str, bytes], bytes]:
    """The same for ranks that give equally much, in one piece: how the core exchanges its own."""

    def exchange_whole(what: str, mine: bytes) -> bytes:
        answers = exchange(what, mine)
        for rank, answer in enumerate(answers):
            if len(answer) != len(mine):
                raise RuntimeError(
                    f"rank {rank} runs another version of fsdp_c: it gave {len(answer)} bytes for"
                    f" {what}, not {len(mine)}"
                )
        return b"".join(answers)

    return exchange_whole


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the group's ranks, as processes, have in common."""
    if group not in c10d._world.pg_map or dist.get_backend(group) in _NO_PROCESSES:
        return None
    store = c10d._world.pg_map[group][1]
    # torchrun's outlives its ranks: those that it starts again must not meet the ones before.
    n_restarts = _env.restart_count()
    return dist.PrefixStore(f"restart_{n_restarts}", store) if n_restarts else store
