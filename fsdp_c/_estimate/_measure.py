"""This host as hardware: its memory and cores, and rates that are measured on the spot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from fsdp_c._estimate._hardware import Hardware

HERE = "here"
_WIDTH = 512
_COPIED = 32 << 20
# Ranks of a host, at most: all of them are on this one.
_MOST_RANKS = 1024


def this_host() -> Hardware:
    """Of one rank with one thread; rates vary with what else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = {
            str(dtype).removeprefix("torch."): _products(dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        source, target = torch.ones(_COPIED // 4), torch.ones(_COPIED // 4)
        bandwidth = 2 * _COPIED / _fastest(lambda: target.copy_(source))
        one = torch.ones(1)
        per_op = _fastest(lambda: [one + one for _ in range(100)]) / 100
    finally:
        torch.set_num_threads(threads)
    return Hardware(
        HERE,
        engine="core",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops=flops,
        bandwidth=bandwidth,
        per_host=_MOST_RANKS,
        link=bandwidth,
        link_kind="memory",
        network=bandwidth,
        host_link=bandwidth,
        per_op=per_op,
        cores=len(os.sched_getaffinity(0)),
        sources=("measured on this host, by one thread, when it was asked for",),
    )


def _products(dtype: torch.dtype) -> float:
    a = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    return 2 * _WIDTH**3 / _fastest(lambda: a @ a)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
