"""Frozen parameters beside torch: in units, whole units, and flags that change between steps."""

import models
import pytest
import torch
from models import Net, data
from parity import Pair, Side, on_ranks


def freeze(model: Net, *parts: str) -> None:
    """Parameters whose name holds one of the parts need no gradient; all others do."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def build_frozen(*parts: str):
    def build() -> Net:
        model = Net()
        freeze(model, *parts)
        return model

    return build


PARTS = [("bias",), ("blocks.1",), ("stem", "blocks.0"), ("blocks",), ("up", "norm")]


@pytest.mark.parametrize("parts", PARTS, ids=".".join)
@on_ranks(1, 2, 3)
def test_frozen_from_the_start(rank: int, n_ranks: int, parts: tuple[str, ...]) -> None:
    pair = Pair(build_frozen(*parts), models.shard_blocks)
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2)
def test_frozen_then_trained(rank: int, n_ranks: int, reshard: bool) -> None:
    pair = Pair(
        build_frozen("blocks"),
        lambda model, fsdp: models.shard_blocks(model, fsdp, reshard_after_forward=reshard),
    )
    pair.step(data(rank))
    pair.both(lambda side: freeze_shards(side, "stem"), "train the blocks")
    pair.step(data(rank, 1))
    pair.both(lambda side: freeze_shards(side), "train all")
    pair.step(data(rank, 2))


def freeze_shards(side: Side, *parts: str) -> None:
    for name, shard in side.shards.items():
        shard.requires_grad_(not any(part in name for part in parts))


@on_ranks(1, 2)
def test_toggled_each_step(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step, parts in enumerate([("bias",), ("blocks.0",), (), ("weight",), ("blocks", "stem")]):
        pair.both(lambda side: freeze_shards(side, *parts), f"freeze {parts}")
        pair.step(data(rank, step), set_to_none=step % 2 == 0)


@on_ranks(1, 2)
def test_all_frozen(rank: int, n_ranks: int) -> None:
    """Only the input needs a gradient."""
    pair = Pair(build_frozen("."), models.shard_blocks, optimizer=None)
    pair.both(lambda side: freeze_shards(side, ""), "freeze all")

    def step(side: Side) -> torch.Tensor:
        x = data(rank).requires_grad_()
        side.model(x).pow(2).sum().backward()
        return x.grad

    for _ in range(2):
        pair.both(step)
        pair.eval_forward(data(rank, 1))


@on_ranks(1, 2)
def test_frozen_units_run_several_times(rank: int, n_ranks: int) -> None:
    def build() -> models.Branches:
        model = models.Branches()
        freeze(model, "blocks.1")
        return model

    pair = Pair(build, models.shard_blocks)
    for step, use in enumerate([(0, 1, 2), (1, 1, 2), (1,), (2, 1, 0, 1)]):
        pair.step(data(rank, step), use=use)


@on_ranks(1, 2)
def test_frozen_between_forward_and_backward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))
    pair.forward(data(rank, 1))
    pair.do(lambda side: side.shards["blocks.1.up.weight"].requires_grad_(False), "freeze")
    pair.backward()
    pair.optimize()
    pair.step(data(rank, 2))
