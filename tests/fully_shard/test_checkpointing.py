"""Activation checkpointing beside torch, around and inside units, of each kind that torch has."""

import functools
from typing import Any

import models
import pytest
import torch
from models import WIDTH, Block, Net, data
from parity import Pair, Side, on_ranks, total
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def wrap(block: nn.Module, kind: str) -> nn.Module:
    if kind == "composable":
        composable_checkpoint(block)
        return block
    impl = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT
    return checkpoint_wrapper(block, checkpoint_impl=impl)


def shard(model: Net, fsdp: Any, kind: str, place: str, deep: bool = False, **mp: Any) -> None:
    """Checkpointing goes around each unit, or around the block that is then made a unit."""
    fully_shard = functools.partial(fsdp.fully_shard, mp_policy=fsdp.MixedPrecisionPolicy(**mp))
    for index, block in enumerate(model.blocks):
        if deep:
            fully_shard(block.down)
        if place == "inside":
            block = wrap(block, kind)
            fully_shard(block)
        else:
            fully_shard(block)
            block = wrap(block, kind)
        model.blocks[index] = block
    fully_shard(model)


@pytest.mark.parametrize("mp", [{}, MIXED], ids=["f32", "bf16"])
@pytest.mark.parametrize("deep", [False, True], ids=["flat", "deep"])
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("kind", ["reentrant", "plain", "composable"])
@on_ranks(1, 2)
def test_blocks(
    rank: int, n_ranks: int, kind: str, place: str, deep: bool, mp: dict[str, Any]
) -> None:
    pair = Pair(Net, lambda model, fsdp: shard(model, fsdp, kind, place, deep, **mp))
    for step in range(2):
        pair.step(data(rank, step).requires_grad_())
    pair.check_state_dict()


class Segmented(nn.Module):
    """Calls checkpoint by itself, over two units at a time or inside one."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first in (0, 2):
            x = checkpoint(self.run_two, x, first, use_reentrant=self.use_reentrant)
        return x

    def run_two(self, x: Tensor, first: int) -> Tensor:
        return self.blocks[first + 1](self.blocks[first](x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("sharding", ["shard_blocks", "shard_grouped", "shard_root"])
@on_ranks(1, 2)
def test_segments(rank: int, n_ranks: int, sharding: str, use_reentrant: bool) -> None:
    pair = Pair(lambda: Segmented(use_reentrant), getattr(models, sharding))
    for step in range(3):
        pair.step(data(rank, step))


@on_ranks(1, 2)
def test_around_the_root(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for use_reentrant in (False, True):

        def step(side: Side, use_reentrant: bool = use_reentrant) -> Tensor:
            x = data(rank).requires_grad_()
            loss = total(checkpoint(side.model, x, use_reentrant=use_reentrant))
            loss.backward()
            return x.grad

        pair.both(step)
        pair.optimize()


@on_ranks(1, 2)
def test_two_forwards_before_backward(rank: int, n_ranks: int) -> None:
    """As preference training does, with nested units."""
    pair = Pair(Net, lambda model, fsdp: shard(model, fsdp, "plain", "inside", deep=True))

    def step(side: Side) -> Tensor:
        chosen, rejected = side.model(data(rank)), side.model(data(rank, 1))
        loss = total(chosen) - 0.5 * total(rejected)
        loss.backward()
        return loss.detach()

    for _ in range(2):
        pair.both(step)
        pair.optimize()


@on_ranks(1, 2)
def test_accumulation(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, lambda model, fsdp: shard(model, fsdp, "plain", "inside", **MIXED))
    for step in range(2):
        for micro in range(2):
            pair.do(lambda side: side.model.set_requires_gradient_sync(micro == 1), "sync")
            pair.forward(data(rank, 2 * step + micro))
            pair.backward()
        pair.optimize()
