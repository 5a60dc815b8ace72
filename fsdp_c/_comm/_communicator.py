"""Transports over torch process groups, and collectives on CPU tensors over them."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_c import _env
from fsdp_c._comm import _peer_location  # noqa: F401 (answers peers that wait for this rank)
from fsdp_c._native import _C

_POLL_MIN_S = 0.0005
_POLL_MAX_S = 0.02
_NOTICES_S = (5.0, 15.0, 45.0, 120.0)  # how long a wait has lasted when people are told
_LATER_S = 300.0  # after these
_LOOK_S = 0.25  # between looks at whether awaited ranks still live
_GRACE_S = 0.5  # for a signal that ended a peer and is on its way here

_CPU = torch.device("cpu")

# Groups whose ranks are no processes of their own.
_NO_PROCESSES = frozenset({"fake", "threaded"})


def _this_process() -> str:
    """Which process this is, as a peer on the same host can check: host, pid, start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}/{namespace} {os.getpid()} {_start_ticks(os.getpid())}"


def _start_ticks(pid: int) -> str | None:
    """When the process began; None if it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_gone(process: str) -> bool:
    """Whether a process of this host, as told by `_this_process`, has ended."""
    host, pid, start = process.split()
    return _this_process().split()[0] == host and _start_ticks(int(pid)) != start


def _notice_at(n_notices: int) -> float:
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
        pause = _POLL_MIN_S
        next_look = start + _LOOK_S
        n_notices = 0
        while missing := [rank for rank, key in enumerate(keys) if not self.store.check([key])]:
            waited = time.monotonic() - start
            names = ", ".join(map(str, missing))
            if waited > self.timeout_s:
                raise TimeoutError(
                    f"rank {self.rank} of process group {self.label} waited {waited:.0f} s"
                    f" for ranks [{names}] of it in {what}"
                )
            if waited > _notice_at(n_notices):
                n_notices += 1
                print(
                    f"[fsdp_c] rank {self.rank} of process group {self.label} has waited"
                    f" {waited:.0f} s for ranks [{names}] of it in {what}",
                    file=sys.stderr,
                )
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_S
                self._check_alive(what, missing)
            time.sleep(pause)
            pause = min(pause * 2, _POLL_MAX_S)

    def _check_alive(self, what: str, ranks: list[int]) -> None:
        for rank in ranks:
            key = _process_key(rank)
            if self.store.check([key]) and _is_gone(self.store.get(key).decode()):
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
    store = _store_of(group)
    if store is not None:
        store.set(_process_key(group.rank()), _this_process())


class _Messages:
    """Collectives of a process group as the core calls them: on 1-d CPU tensors, blocking.

    The functions are looked up at each call, so that whoever replaces them sees ours too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak: transports are kept for as long as their group lives.
        self._group = weakref.ref(group)

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group has been destroyed")
        return group

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        # torch has the first name from 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(output, input, group=self._live_group())

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(output, input, op=dist.ReduceOp.SUM, group=self._live_group())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._live_group())

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, group=self._live_group(), group_src=src)

    def all_to_all(
        self, received: tuple[torch.Tensor, list[int]], sent: tuple[torch.Tensor, list[int]]
    ) -> None:
        dist.all_to_all_single(received[0], sent[0], received[1], sent[1], group=self._live_group())

    def barrier(self) -> None:
        dist.barrier(group=self._live_group())


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.Transport] = (
    weakref.WeakKeyDictionary()
)
_rendezvous: weakref.WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = weakref.WeakKeyDictionary()


def transport_for(group: dist.ProcessGroup | None = None) -> _C.Transport:
    """The transport over `group` (default: the world); made once and kept as long as the group.

    Collective on first use. Shared memory if all ranks of the group can use it, else the group's
    own collectives; the environment variable FSDP_C_TRANSPORT fixes the choice.

    Raises:
        TimeoutError: a rank did not come within the group's timeout.
        NotImplementedError: FSDP_C_TRANSPORT=shm where ranks cannot share memory.
        RuntimeError: the ranks' settings differ.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("torch.distributed has not been initialised")
    transport = _transports.get(group)
    # A child made by fork inherits the cache; its parent's transports refuse to serve it.
    if transport is None:
        transport = _make_transport(group)
        _transports[group] = transport
    return transport


def messages_for(group: dist.ProcessGroup) -> _C.Transport:
    """A transport that only names the group's ranks: units on a device move nothing over it."""
    return _new_transport(group, "callback", _no_exchange)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.Transport | None] = (
    weakref.WeakKeyDictionary()
)


def watch_for(group: dist.ProcessGroup) -> _C.Transport | None:
    """Where ranks that talk by messages see each other, if they share a host; else None.

    Collective on first use.
    """
    known = _transports.get(group)
    if known is not None and known.kind == "shm":
        return known
    if group not in _watches:
        _watches[group] = _make_watch(group)
    return _watches[group]


def _make_watch(group: dist.ProcessGroup) -> _C.Transport | None:
    exchange = exchange_for(group) if group.size() > 1 else None
    if exchange is None:
        return None
    try:
        return _new_transport(group, "shm", exchange)
    except NotImplementedError:  # on all ranks alike
        return None


def transport_kind(group: dist.ProcessGroup) -> str:
    """Over what the group's ranks talk; empty if it has no transport yet."""
    transport = _transports.get(group)
    return "" if transport is None else transport.kind


def _make_transport(group: dist.ProcessGroup) -> _C.Transport:
    wanted = _env.TRANSPORT.get()
    is_reachable = _store_of(group) is not None
    if not is_reachable and (wanted != "shm" or group.size() > 1):
        if wanted == "shm":
            raise NotImplementedError(
                f"FSDP_C_TRANSPORT=shm: ranks of process group {label(group)}"
                f" ({dist.get_backend(group)}) are not processes that can share memory"
            )
        return _new_transport(group, "callback", _no_exchange)
    if group.size() == 1:
        return _new_transport(group, "callback" if wanted == "callback" else "shm", _no_exchange)
    exchange = exchange_for(group)
    assert exchange is not None
    _agree(group, exchange, wanted)
    if wanted == "callback":
        return _new_transport(group, "callback", exchange)
    try:
        return _new_transport(group, "shm", exchange)
    except NotImplementedError:
        # All ranks get this error together.
        if wanted == "shm":
            raise
        return _new_transport(group, "callback", exchange)


def _agree(
    group: dist.ProcessGroup, exchange: Callable[[str, bytes], list[bytes]], wanted: str
) -> None:
    answers = [answer.decode() for answer in exchange("choice of transport", wanted.encode())]
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise RuntimeError(
                f"{_env.TRANSPORT.name} must be the same on all ranks of process group"
                f" {label(group)}: rank 0 has {answers[0]!r}, rank {rank} has {answer!r}"
            )


def _no_exchange(what: str, mine: bytes) -> list[bytes]:
    raise RuntimeError(f"exchange of {what!r} in a group that has no need of it")


def _new_transport(
    group: dist.ProcessGroup, kind: str, exchange: Callable[[str, bytes], list[bytes]]
) -> _C.Transport:
    return _C.Transport(
        label(group),
        group.rank(),
        group.size(),
        _global_ranks(group),
        timeout_s(group, _CPU),
        exchange,
        _Messages(group),
        kind,
    )


def label(group: dist.ProcessGroup) -> str:
    """How messages name the group."""
    name = str(getattr(group, "group_name", "") or "?")
    desc = str(getattr(group, "group_desc", "") or "undefined")
    return name if desc == "undefined" else f"{name} ({desc})"


def _global_ranks(group: dist.ProcessGroup) -> list[int]:
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return list(range(group.size()))


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of the group's backend for the device, else torch's default."""
    try:
        options = group._get_backend(device).options
        return options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return c10d.default_pg_timeout.total_seconds()


class Communicator:
    """Collectives on contiguous CPU tensors over the ranks of a process group.

    Creation, every method and the order of calls are collective. With shared memory, calls that
    differ between ranks raise RuntimeError on all of them before any tensor is written, and a rank
    that dies makes the others raise within a second; after such an error the communicator and its
    group's transport cannot be used any more. Sums are added in rank order in float32 (float64 for
    float64 tensors) and rounded once. Without shared memory the group's own collectives run.

    Calls block. They are for one thread at a time.

    Args:
        group: process group; default: the world.

    Raises:
        ValueError: a tensor is not on the CPU, not contiguous, or has the wrong size or dtype;
            nothing has been sent then, so the other ranks wait.
        RuntimeError: ranks disagree, or a rank is gone.
        TimeoutError: a rank did not come within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._comm: _C.Comm | None = _C.Comm(transport_for(group))

    @property
    def transport(self) -> str:
        """`"shm"` or `"callback"`."""
        return self._open().transport.kind

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """`output` holds the inputs of all ranks one after another: n_ranks times the elements of
        `input`, same dtype. `input` may be this rank's part of `output`."""
        self._open().all_gather(output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, divisor: float = 1.0
    ) -> None:
        """`output` = sum over ranks of this rank's part of their `input`, divided by `divisor`.

        `input` has n_ranks times the elements of `output`, same dtype: floating or integer (those
        with divisor 1). `output` may be this rank's part of `input`.
        """
        self._open().reduce_scatter(output, input, divisor)

    def all_reduce(self, tensor: torch.Tensor, divisor: float = 1.0) -> None:
        """`tensor` = sum of all ranks' `tensor` / `divisor`, in place; the same bits everywhere."""
        self._open().all_reduce(tensor, divisor)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """`tensor` of every rank becomes that of rank `src` of the group."""
        self._open().broadcast(tensor, src)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[Sequence[int]]
    ) -> None:
        """Rank s sends ``counts[s][r]`` elements to rank r; all ranks pass the same table.

        `input` holds what this rank sends, to rank 0, 1, ..., one after another; `output` gets what
        it receives from rank 0, 1, ... Same dtype; they may not overlap.
        """
        self._open().all_to_all(output, input, counts)

    def exchange(
        self,
        received: list[list[torch.Tensor]],
        sent: list[list[torch.Tensor]],
        counts: Sequence[Sequence[int]],
        itemsize: int,
    ) -> None:
        """The same between lists of tensors, one list for each rank, of any strides.

        The elements of ``sent[r]``, in the order of the list and of each tensor's indices, become
        those of ``received[this rank]`` on rank r. `counts` is in elements of `itemsize` bytes.
        """
        self._open().exchange(received, sent, counts, itemsize)

    def all_agree(self, is_true: bool) -> bool:
        """Whether it is true on all ranks."""
        return self._open().all_agree(is_true)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._open().barrier()

    def close(self) -> None:
        """Gives back the memory of this rank; local. Calling it again is fine."""
        self._comm = None

    def _open(self) -> _C.Comm:
        if self._comm is None:
            raise RuntimeError("this Communicator has been closed")
        return self._comm

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)


def communicator_for(group: dist.ProcessGroup) -> Communicator:
    """The package's own communicator over the group; collective on first use."""
    if group not in _communicators:
        _communicators[group] = Communicator(group)
    return _communicators[group]


def exchange_for(group: dist.ProcessGroup) -> Callable[[str, bytes], list[bytes]] | None:
    """Exchanges bytes between the ranks of a group, as `Rendezvous.exchange`.

    None where the ranks have no store in common (or nobody to talk to).
    """
    store = _store_of(group)
    if store is None or group.size() == 1:
        return None
    if group not in _rendezvous:
        _rendezvous[group] = Rendezvous(
            store, group.rank(), group.size(), timeout_s(group, _CPU), label(group)
        )
    return _rendezvous[group].exchange


def _store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the group's ranks, as processes, have in common."""
    if group not in c10d._world.pg_map or dist.get_backend(group) in _NO_PROCESSES:
        return None
    return c10d._world.pg_map[group][1]


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the group, as numbered in the world."""
    return _global_ranks(group)
