"""Prefetching beside torch: lists of modules, wrong targets, and counted collectives."""

from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from differential.execute import Counting
from models import Branches, Net, data
from parity import Pair, Side, on_ranks, total
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2)
def test_lists(rank: int, n_ranks: int, reshard: bool, depth: int) -> None:
    def shard(model: Net, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp, reshard_after_forward=reshard)
        for index, block in enumerate(model.blocks):
            block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 1 + depth]))
            before = list(model.blocks[max(0, index - depth) : index])[::-1]
            block.set_modules_to_backward_prefetch(before)

    pair = Pair(lambda: Net(n_blocks=4), shard)
    for step in range(3):
        pair.step(data(rank, step))
        pair.eval_forward(data(rank, step))
    pair.do(lambda side: [b.set_modules_to_backward_prefetch([]) for b in side.model.blocks])
    pair.step(data(rank, 4))


@on_ranks(1, 2)
def test_wrong_targets(rank: int, n_ranks: int) -> None:
    """Units that do not follow, or do not run at all, cost time and nothing else."""

    def shard(model: Branches, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp)
        blocks = model.blocks
        blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
        blocks[1].set_modules_to_forward_prefetch([blocks[0]])
        blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[2]])
        model.set_modules_to_forward_prefetch([blocks[1]])

    pair = Pair(Branches, shard)
    for step, use in enumerate([(0, 1, 2), (0,), (2, 0), (0, 0), (0, 1, 2)]):
        pair.step(data(rank, step), use=use)


@on_ranks(1, 2)
def test_arguments(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)

    def wrong(side: Side) -> list[str]:
        kinds = []
        for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            with pytest.raises(ValueError) as caught:
                getattr(side.model, name)([nn.Linear(1, 1)])
            kinds.append(type(caught.value).__name__)
        return kinds

    pair.both(wrong)
    pair.step(data(rank))


@on_ranks(1, 2)
def test_changed_between_steps(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step in range(4):

        def choose(side: Side, step: int = step) -> None:
            blocks = list(side.model.blocks)
            blocks[0].set_modules_to_forward_prefetch(blocks[1 : 1 + step])
            blocks[2].set_modules_to_backward_prefetch(blocks[step : step + 1])

        pair.both(choose)
        pair.step(data(rank, step))


@on_ranks(1, 2)
def test_async_unshard_in_hooks(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.both(lambda side: side.model._set_unshard_async_op(True), "async")
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("own", [True, False])
@on_ranks(1, 2)
def test_counted_collectives(rank: int, n_ranks: int, own: bool, reshard: bool | None) -> None:
    """CommDebugMode sees as many collectives of each kind as under torch."""
    pair = Pair(
        lambda: Net(own=own),
        lambda model, fsdp: models.shard_blocks(model, fsdp, reshard_after_forward=reshard),
    )

    def count(side: Side) -> dict[str, int]:
        with CommDebugMode() as counter:
            total(side.model(data(rank))).backward()
        return {str(op): n for op, n in counter.get_comm_counts().items()}

    for _ in range(2):
        pair.both(count)
        pair.optimize()
    with torch.no_grad():
        pair.both(lambda side: side.model(data(rank)), "no_grad")


@on_ranks(2)
def test_shared_contexts_share_the_order_of_forwards(rank: int, n_ranks: int) -> None:
    """However many backward passes each of the models has had."""
    seen = []
    for fsdp in (torch_fsdp, harness.implementation()):
        harness.seed_everything(1)
        first, second = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))
        for model in (first, second):
            fsdp.fully_shard(model[0])
            fsdp.fully_shard(model)
        counts = []
        for step, used in enumerate(
            [(first,), (first, second), (second, first), (second,), (first, second)]
        ):
            if step == 2:
                torch_fsdp.share_comm_ctx([first, second])
            with Counting() as counter:
                sum(model(data(rank)).sum() for model in used).backward()
            counts.append(dict(counter.counts))
        seen.append(counts)
    assert seen[0] == seen[1]
