"""On which hosts the ranks of a process group live, and what rails between these hosts need."""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_c._comm import _process_group, _rendezvous
from fsdp_c._native import _C

Exchange = Callable[[str, bytes], list[bytes]]


@dataclass
class Hosts:
    """Where the ranks of a group live."""

    hosts: list[int]  # of each rank of the group
    names: list[str]  # of the hosts
    ranks: list[int]  # as the world numbers them
    processes: list[str]  # of each rank of the group, as `this_process` tells them

    @classmethod
    def of(cls, processes: list[str], names: list[str], ranks: list[int]) -> Hosts:
        """`names`: what each rank's host is called."""
        places: dict[str, tuple[int, str]] = {}
        hosts = []
        for process, name in zip(processes, names, strict=True):
            number, _ = places.setdefault(process.split()[0], (len(places), name))
            hosts.append(number)
        return cls(hosts, [name for _, name in places.values()], ranks, processes)

    def peers_of(self, rank: int) -> list[int]:
        """All of the group that live on a rank's host, as the world numbers them."""
        pairs = zip(self.ranks, self.hosts, strict=True)
        return [r for r, host in pairs if host == self.hosts[rank]]


class Rails(NamedTuple):
    """Read by name in csrc/bind/comm/transport.cpp."""

    hosts: list[int]  # of each rank; numbered by their first ranks
    names: list[str]  # of the hosts
    local: _C.Transport | None  # between the ranks of this host
    group: str  # the process group, as torch registers it


_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Hosts] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, Rails] = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup) -> Hosts:
    """Those of a group that has rails."""
    return _met[group]


def rails_for(
    group: dist.ProcessGroup,
    exchange: Exchange,
    make_local: Callable[[list[int], Exchange | None], _C.Transport],
    met: Callable[[Hosts], None],
) -> tuple[Rails | None, str]:
    """What `group` needs for rails, else None and why not; the same on all ranks. Collective.

    `make_local`: a transport of shared memory between these ranks of the group. `met`: is told
    where all ranks live, if on several hosts, before anything else is set up.
    """
    found = _ask(group, exchange)
    hosts, names = found.hosts, found.names
    if len(set(found.processes)) < len(found.processes):
        return None, "some ranks are threads of one process"
    if len(names) == 1:
        return None, "all ranks are on one host, where they cannot share memory"
    _met[group] = found
    met(found)
    rank = group.rank()
    members = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    local, why_not = None, ""
    if len(members) > 1:
        try:
            local = make_local(members, _exchange_of(group, hosts[rank], members))
        except NotImplementedError as error:
            why_not = str(error)
    answers = [answer.decode() for answer in exchange("memory of hosts", why_not.encode())]
    for r, answer in enumerate(answers):
        if answer:
            return None, f"ranks of host {names[hosts[r]]} cannot share memory: {answer}"
    _found[group] = Rails(hosts, names, local, str(group.group_name))
    return _found[group], ""


def on_one_host(group: dist.ProcessGroup, local: _C.Transport) -> Rails:
    """Of a group whose ranks all talk over `local`: no rail, and messages that go through it."""
    return Rails([0] * group.size(), [socket.gethostname()], local, str(group.group_name))


def _ask(group: dist.ProcessGroup, exchange: Exchange) -> Hosts:
    mine = f"{socket.gethostname()} {_rendezvous.this_process()}"
    answers = [answer.decode().split(" ", 1) for answer in exchange("hosts", mine.encode())]
    ranks = _process_group.global_ranks(group)
    return Hosts.of([process for _, process in answers], [name for name, _ in answers], ranks)


def _exchange_of(group: dist.ProcessGroup, host: int, members: list[int]) -> Exchange:
    """Between the ranks of one host."""
    store = _rendezvous.store_of(group)
    assert store is not None
    ranks = _process_group.global_ranks(group)
    return _rendezvous.Rendezvous(
        dist.PrefixStore(f"fsdp_c/host{host}", store),
        members.index(group.rank()),
        [ranks[member] for member in members],
        _process_group.timeout_s(group, torch.device("cpu")),
        _process_group.label(group),
    ).exchange


def names(group: dist.ProcessGroup) -> list[str]:
    """Of the hosts of its ranks, by their numbers; empty if the group has no rails."""
    rails = _found.get(group)
    return [] if rails is None else rails.names


def describe(group: dist.ProcessGroup) -> str:
    """ "rails between 2 hosts of 2 ranks"; empty if the group has none."""
    rails = _found.get(group)
    if rails is None:
        return ""
    sizes = sorted(Counter(rails.hosts).values(), reverse=True)
    each = str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
    return f"rails between {len(sizes)} hosts of {each} rank{'s' * (sizes[0] > 1)}"
