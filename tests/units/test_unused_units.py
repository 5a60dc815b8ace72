"""Units that no rank has run get no gradients, as under torch, also where unused parameters do."""

from typing import Any

import harness
import models
import pytest
from models import Branches, data
from parity import Pair, Side, Tolerance, on_ranks, total
from torch import Tensor

from fsdp_c._comm import _device

USES = [(0,), (0, 1), (0,), (1, 0)]  # block 2 never runs


def step(use: tuple[int, ...], x: Tensor) -> Any:
    def step(side: Side) -> Tensor:
        loss = total(side.model(x, use=use))
        loss.backward()
        return loss.detach()

    return step


def train(pair: Pair, rank: int) -> None:
    if not hasattr(pair.theirs.model, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    for i, use in enumerate(USES):
        pair.do(lambda side, i=i: side.model.set_reduce_scatter_unused_params(i != 3), "set")
        pair.both(step(use, data(rank, i)), f"step {i}")
        assert pair.ours.shards["blocks.2.up.weight"].grad is None
        pair.optimize()


def unused(rank: int, n_ranks: int) -> None:
    train(Pair(Branches, models.shard_blocks), rank)


def unused_on_device(rank: int, n_ranks: int) -> None:
    with _device.on_cpu():
        train(Pair(Branches, models.shard_blocks), rank)


@pytest.mark.parametrize("transport", ["shared", "callback"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_units_that_never_ran(n_ranks: int, transport: str) -> None:
    env = {"FSDP_C_TRANSPORT": transport} if transport == "callback" else None
    harness.run_ranks(unused, n_ranks, env=env)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_units_that_never_ran_on_a_device(n_ranks: int) -> None:
    harness.run_ranks(unused_on_device, n_ranks)


def halve(output: Tensor) -> None:
    output.div_(2)


@on_ranks(2)
def test_all_reduce_hook_without_all_reduce(rank: int, n_ranks: int) -> None:
    """A mesh without replicas has no sums that wait for them."""
    pair = Pair(Branches, models.shard_blocks, tolerance=Tolerance(relative=1e-6, scaled=1e-6))
    pair.do(lambda side: side.model.set_all_reduce_hook(halve), "hook")
    for i, use in enumerate(USES):
        pair.do(lambda side, i=i: side.model.set_requires_all_reduce(i % 2 == 1), "all-reduce")
        pair.both(step(use, data(rank, i)), f"step {i}")
        assert pair.ours.shards["blocks.2.up.weight"].grad is None
        pair.optimize()
