"""Transports over torch process groups: shared memory, rails between hosts, or the group's own
collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_c import _env
from fsdp_c._comm import (
    _beats,
    _hosts,
    _last_error,  # noqa: F401 (speaks at the end of the script)
    _peer_location,  # noqa: F401 (answers peers that wait for this rank)
    _process_group,
)
from fsdp_c._comm._rendezvous import exchange_for, for_core, store_of, telling_of_ended
from fsdp_c._native import _C
from fsdp_c._window import _open


class Messages:
    """Collectives of a process group as the core calls them, by their arguments' names: on 1-d CPU
    tensors, blocking.

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
        self, output: torch.Tensor, received: list[int], input: torch.Tensor, sent: list[int]
    ) -> None:
        """Bytes, of which so many are received from and sent to each rank."""
        dist.all_to_all_single(output, input, received, sent, group=self._live_group())

    def barrier(self) -> None:
        dist.barrier(group=self._live_group())


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.Transport] = (
    weakref.WeakKeyDictionary()
)


def transport_for(group: dist.ProcessGroup | None = None) -> _C.Transport:
    """The transport over `group` (default: the world); made once and kept as long as the group.

    Collective on first use. Shared memory if all ranks of the group can use it; rails if they live
    on several hosts; else the group's own collectives. The environment variable FSDP_C_TRANSPORT
    fixes the choice.

    Raises:
        TimeoutError: a rank did not come within the group's timeout.
        NotImplementedError: FSDP_C_TRANSPORT=shm where ranks cannot share memory, or =rails where
            they cannot and do not live on several hosts.
        RuntimeError: the ranks' settings differ.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("torch.distributed has not been initialised")
    transport = _transports.get(group)
    # A child made by fork inherits the cache; its parent's transports refuse to serve it.
    if transport is None:
        with telling_of_ended():
            transport = _make_transport(group)
        _transports[group] = transport
    return transport


def messages_for(group: dist.ProcessGroup, messages: Messages | None = None) -> _C.Transport:
    """A new transport over `messages`, or the group's own collectives; local.

    It also names the ranks of units on a device, which move nothing over it.
    """
    return _new_transport(group, "callback", _no_exchange, messages)


def fast_messages_for(group: dist.ProcessGroup) -> _C.Transport:
    """As `messages_for`, by what `transport_for` finds: between ranks of one host through its
    memory. Collective on first use."""
    if group.size() == 1:
        return messages_for(group)
    transport = transport_for(group)
    if transport.kind != "shm":
        return transport
    rails = _hosts.on_one_host(group, transport)
    return _new_transport(group, "callback", _no_exchange, rails=rails)


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
        with telling_of_ended():
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


def sent_to_hosts(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Bytes and messages over rails to each of `_hosts.names(group)`; of other groups empty."""
    transport = _transports.get(group)
    return [] if transport is None else transport.sent()


def _make_transport(group: dist.ProcessGroup) -> _C.Transport:
    wanted = _env.TRANSPORT.get()
    _open.show_process()  # before ranks wait for each other
    is_reachable = group is _process_group.ALONE or store_of(group) is not None
    if not is_reachable and (wanted != "shm" or group.size() > 1):
        if wanted == "shm":
            raise NotImplementedError(
                f"FSDP_C_TRANSPORT=shm: ranks of process group {_process_group.label(group)}"
                f" ({dist.get_backend(group)}) are not processes that can share memory"
            )
        return _new_transport(group, "callback", _no_exchange)
    if group.size() == 1:
        has_messages = wanted == "callback" and group is not _process_group.ALONE
        return _new_transport(group, "callback" if has_messages else "shm", _no_exchange)
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
    return _between_hosts(group, exchange, wanted)


def _between_hosts(
    group: dist.ProcessGroup, exchange: Callable[[str, bytes], list[bytes]], wanted: str
) -> _C.Transport:
    rails, why_not = None, f"measured over gloo alone, not over {_cpu_backend(group)}"
    if wanted == "rails" or _cpu_backend(group) == "gloo":
        rails, why_not = _hosts.rails_for(
            group,
            exchange,
            make_local=lambda ranks, among: _local_transport(group, ranks, among),
            met=_beats.meet,
        )
    if rails is None and wanted == "rails":
        raise NotImplementedError(
            f"FSDP_C_TRANSPORT=rails: process group {_process_group.label(group)}: {why_not}"
        )
    transport = _new_transport(group, "callback", exchange, rails=rails)
    if rails is not None:
        _beats.watch(group, transport)
    return transport


def _cpu_backend(group: dist.ProcessGroup) -> str:
    try:
        return str(group._get_backend(torch.device("cpu")).name())
    except RuntimeError:
        return "a backend without host memory"


def _local_transport(
    group: dist.ProcessGroup, ranks: list[int], exchange: Callable[[str, bytes], list[bytes]]
) -> _C.Transport:
    """Shared memory between some ranks of the group, which are on one host."""
    own = _process_group.described(group, torch.device("cpu"))
    described = own._replace(
        rank=ranks.index(own.rank), global_ranks=[own.global_ranks[rank] for rank in ranks]
    )
    return _C.Transport(
        **described._asdict(),
        exchange=for_core(exchange),
        messages=Messages(group),
        rails=None,
        kind="shm",
    )


def _agree(
    group: dist.ProcessGroup, exchange: Callable[[str, bytes], list[bytes]], wanted: str
) -> None:
    answers = [answer.decode() for answer in exchange("choice of transport", wanted.encode())]
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise RuntimeError(
                f"{_env.TRANSPORT.name} must be the same on all ranks of process group"
                f" {_process_group.label(group)}: rank 0 has {answers[0]!r}, rank {rank} has"
                f" {answer!r}"
            )


def _no_exchange(what: str, mine: bytes) -> list[bytes]:
    raise RuntimeError(f"exchange of {what!r} in a group that has no need of it")


def _new_transport(
    group: dist.ProcessGroup,
    kind: str,
    exchange: Callable[[str, bytes], list[bytes]],
    messages: Messages | None = None,
    rails: _hosts.Rails | None = None,
) -> _C.Transport:
    _open.show_process()
    return _C.Transport(
        **_process_group.described(group, torch.device("cpu"))._asdict(),
        exchange=for_core(exchange),
        messages=messages or Messages(group),
        rails=rails,
        kind=kind,
    )
