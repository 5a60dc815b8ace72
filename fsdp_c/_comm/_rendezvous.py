"""How ranks meet before they have a transport: a few bytes at a time, over their group's store."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
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
_LISTED = 8  # ranks that a message names
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
    except (FileNotFoundError, ProcessLookupError):  # others say nothing: no file can be opened
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


# Looks at ranks of other hosts, as the world numbers them: why one of them is given up, or nothing.
_look_at_hosts: Callable[[list[int]], str] | None = None


def why_given_up(ranks: list[int]) -> str:
    """Why a rank of another host that is waited for will not come, or nothing. A wait asks now and
    then, and once without ranks when it has ended."""
    look = _look_at_hosts  # a thread may ask while the world is destroyed
    return "" if look is None else look(ranks)


def look_at_hosts_by(look: Callable[[list[int]], str] | None) -> None:
    """From now on waits for ranks of several hosts ask it, at each look; None: nobody."""
    global _look_at_hosts
    _look_at_hosts = look


class Rendezvous:
    """Exchanges a few bytes between the ranks of a group over its store; for set-up only.

    It polls instead of blocking in the store, so that Ctrl-C works and late ranks can be named.
    `ranks`: those of the group, in its order, as the world numbers them.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: list[int], timeout_s: float, label: str
    ) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
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
                f"rank {self.ranks[self.rank]} lost the store in the set-up of fsdp_c over process"
                f" group {self.label} ({what}): the process that keeps it (rank 0, or the launcher)"
                " has exited or was killed"
            ) from error

    def _exchange(self, what: str, mine: bytes) -> list[bytes]:
        prefix = f"fsdp_c/{self.count}/{what}"
        self.store.set(f"{prefix}/{self.rank}", mine)
        keys = [f"{prefix}/{rank}" for rank in range(len(self.ranks))]
        self._await(what, keys)
        answers = [bytes(self.store.get(key)) for key in keys]
        # Who comes last has seen everybody read everything.
        if self.store.add(f"{prefix}/read", 1) == len(self.ranks):
            for key in (*keys, f"{prefix}/read"):
                self.store.delete_key(key)
        return answers

    def _await(self, what: str, keys: list[str]) -> None:
        start = time.monotonic()
        pause = POLL_MIN_S
        next_look = start + LOOK_S
        n_notices = 0
        while not self.store.check(keys):
            if time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                missing = [self.ranks[i] for i in _missing(self.store, keys, 0, len(keys))]
                n_notices = self._look(what, missing, time.monotonic() - start, n_notices)
            time.sleep(pause)
            pause = min(pause * 2, POLL_MAX_S)
        why_given_up([])

    def _look(self, what: str, missing: list[int], waited: float, n_notices: int) -> int:
        """Raises for ranks that will not come, and tells people now and then; how often."""
        text = (
            f"rank {self.ranks[self.rank]} has waited {waited:.0f} s for ranks {_listed(missing)}"
            f" in the set-up of fsdp_c over process group {self.label} ({what})"
        )
        if missing and waited > self.timeout_s:
            raise TimeoutError(f"{text}{_why_missing(missing)}")
        self._check_alive(what, missing)
        if not missing or waited <= notice_at(n_notices):
            return n_notices
        print(f"[fsdp_c] {text}{_why_missing(missing)}", file=sys.stderr)
        return n_notices + 1

    def _check_alive(self, what: str, ranks: list[int]) -> None:
        for rank in ranks:
            if _has_ended(rank):
                _tell_of_ended()
                time.sleep(_GRACE_S)  # raises what a signal's handler does
                raise RuntimeError(
                    f"rank {rank} has exited or was killed while rank {self.ranks[self.rank]}"
                    " waited for it in the set-up of fsdp_c over process group"
                    f" {self.label} ({what})"
                )
        if why := why_given_up(ranks):
            raise RuntimeError(
                f"rank {self.ranks[self.rank]} has given up waiting in the set-up of fsdp_c over"
                f" process group {self.label} ({what}) for {why}"
            )


def _missing(store: dist.Store, keys: list[str], begin: int, end: int) -> list[int]:
    """Which of the keys are not there, the first ones; asks few questions of a large world."""
    if store.check(keys[begin:end]):
        return []
    if end - begin == 1:
        return [begin]
    middle = (begin + end) // 2
    found = _missing(store, keys, begin, middle)
    if len(found) <= _LISTED:
        found += _missing(store, keys, middle, end)
    return found[: _LISTED + 1]


def _listed(ranks: list[int]) -> str:
    more = ", ..." if len(ranks) > _LISTED else ""
    return f"[{', '.join(map(str, ranks[:_LISTED]))}{more}]"


# ---- what the ranks of the world tell of their processes ----


def _store_of_world() -> dist.Store | None:
    world = dist.group.WORLD
    return None if world is None else store_of(world)


def _process_key(rank: int) -> str:
    return f"fsdp_c/process/{rank}"


def _ended_key(rank: int) -> str:
    return f"fsdp_c/ended/{rank}"


def _found(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


_announced: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def announce() -> None:
    """Tells all ranks which process this is, so that they notice if it dies before or in set-up.

    Local, once per world.
    """
    world, store = dist.group.WORLD, _store_of_world()
    if world is None or store is None or world.size() == 1 or world in _announced:
        return
    _announced.add(world)
    store.set(_process_key(dist.get_rank()), this_process())


def _why_missing(missing: list[int]) -> str:
    """A launcher of its own may start other ranks as the script alone."""
    store = _store_of_world()
    if store is None or not store.check([_process_key(dist.get_rank())]):
        return ""
    strange = [rank for rank in missing if not store.check([_process_key(rank)])]
    if not strange:
        return ""
    return (
        f"; ranks {_listed(strange)} have sharded nothing with fsdp_c yet: if they never do, start"
        " all ranks alike (torchrun -m fsdp_c), or call fsdp_c.install() in the script"
    )


def _has_ended(rank: int) -> bool:
    """Whether the process of a rank has: on this host, or as a rank of its host has told."""
    store = _store_of_world()
    process = "" if store is None else _found(store, _process_key(rank))
    if store is None or not process:
        return False
    return is_gone(process) or _found(store, _ended_key(rank)) == process


@contextlib.contextmanager
def telling_of_ended() -> Iterator[None]:
    """Around set-up: if it fails since a process of this host is gone, other hosts learn of it."""
    try:
        yield
    except BaseException:
        _tell_of_ended()
        raise


def _tell_of_ended() -> None:
    store = _store_of_world()
    if store is None or _look_at_hosts is None:
        return
    with contextlib.suppress(dist.DistError):
        for rank in range(dist.get_world_size()):
            process = _found(store, _process_key(rank))
            if process and is_gone(process):
                store.set(_ended_key(rank), process)


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
            store,
            group.rank(),
            _process_group.global_ranks(group),
            timeout,
            _process_group.label(group),
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
    # torchrun's outlives its ranks: those that it starts again must not meet the ones before. In a
    # store of the ranks' own all meet: agents count restarts by hosts, and a new host's from 0.
    n_restarts = _env.restart_count() if _env.restarts_with_old_store() else 0
    return dist.PrefixStore(f"restart_{n_restarts}", store) if n_restarts else store
