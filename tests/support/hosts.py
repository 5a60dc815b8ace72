"""Runs a test function on ranks of several hosts, which are spaces of this machine's kernel.

`run_hosts(fn, (2, 1), *args)` is `harness.run_ranks` with two ranks on one host and one on another.
They see neither each other's processes nor shared memory, and talk over a bridge (namespaces.py).
Where the user may not make such spaces the test is skipped, with the reason.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

import harness
import namespaces
from harness import Forker, Pool, Seats
from rank_process import Seat


class Network:
    """A bridge, and the hosts at it that were asked for so far."""

    def __init__(self, launcher: Forker) -> None:
        self.forker = _start(launcher, "network")
        self.hosts: list[Forker] = []

    def host(self, index: int) -> Forker:
        while len(self.hosts) <= index:
            self.hosts.append(_start(self.forker, "host", len(self.hosts)))
        return self.hosts[index]

    def seats(self, hosts: tuple[int, ...]) -> Seats:
        """Of ranks that are numbered host by host."""
        places = [(host, local) for host, n_local in enumerate(hosts) for local in range(n_local)]
        address = namespaces.address_of(0)
        return [
            (self.host(host), Seat(rank, len(places), local, hosts[host], address))
            for rank, (host, local) in enumerate(places)
        ]

    def pull_cable(self, host: int) -> None:
        """Nothing that is sent to or from the host arrives from now on."""
        self.forker.ask(("ip", "link", "set", namespaces.cable_of(host), "down"))

    def close(self) -> None:
        for forker in (*self.hosts, self.forker):
            forker.close()


def _start(parent: Forker, *request: Any) -> Forker:
    """A child of its own kind, which forks ranks."""
    ours, theirs = socket.socketpair()
    with theirs:
        parent.ask(request, [theirs.fileno()])
    return Forker(ours)


why_not = functools.cache(namespaces.why_not)


_network_of = functools.cache(Network)


def the_network() -> Network:
    """What all tests share; it goes with the launcher."""
    return _network_of(harness.launcher_for({}))


def require_hosts() -> None:
    import pytest

    if why_not():
        pytest.skip(f"this user cannot have hosts: {why_not()}")


def run_hosts(
    fn: Callable[..., Any],
    hosts: tuple[int, ...],
    *args: Any,
    timeout: float = 60,
    fresh: bool = False,
    env: dict[str, str] | None = None,
    network: Network | None = None,
) -> list[Any]:
    """`hosts`: how many ranks each has. The rest is `run_ranks`'s; `env` holds variables of fsdp_c
    alone. `network`: one that the test has for itself; ranks are new ones then."""
    require_hosts()
    seats = functools.partial((network or the_network()).seats, hosts)
    if fresh or env or network:
        pool = Pool(seats(), harness.settings_of_ranks(env or {}))
        return harness.call_once(pool, fn, args, timeout, fresh)
    return harness.call_again(Pool.of((hosts, ()), seats), fn, args, timeout)
