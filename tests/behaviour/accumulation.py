"""Two micro-batches whose gradients are synchronised with the second."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from models import data
from parity import Pair, Plain, Tolerance, total
from torch import nn


def micro_batches(
    pair: Pair,
    build: Callable[[], nn.Module],
    rank: int,
    synchronise: Callable[[Any, bool], None],
    tolerance: Tolerance,
) -> Iterator[bool]:
    """Runs both on both sides, stopping after each with whether it was the last.

    `synchronise(model, is_last)` sets what is tested. At the end the gradients are those of the
    unsharded model.
    """
    plain, n_ranks = Plain(build), dist.get_world_size()
    for step, is_last in ((0, False), (1, True)):
        pair.do(lambda side: synchronise(side.model, is_last))
        pair.forward(data(rank, step))
        pair.backward()
        yield is_last
        plain.backward([total(plain.model(data(r, step))) for r in range(n_ranks)], n_ranks)
    plain.check(pair.ours, tolerance)
