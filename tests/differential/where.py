"""Where the ranks of programs are: on one host, or on several."""

from collections.abc import Callable
from typing import Any

import harness
from hosts import run_hosts

_hosts: tuple[int, ...] = ()


def choose(hosts: tuple[int, ...]) -> None:
    """How many ranks each host has, from now on; none: all are on one."""
    global _hosts
    _hosts = hosts


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    if _hosts:
        return run_hosts(fn, _hosts, *args, timeout=timeout)
    return harness.run_ranks(fn, world, *args, timeout=timeout)
