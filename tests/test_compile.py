"""torch.compile over sharded modules: no more graphs and breaks than torch has, equal gradients."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch._dynamo
from behaviour.pairs import CLOSE, agree, backward, gradients, sharded, shards
from models import Net, data
from parity import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate_with_fsdp import replicate


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def compile_root(model: nn.Module) -> None:
    model.compile(backend="eager")


def compiled_first(model: nn.Module, fsdp: Any) -> None:
    compile_blocks(model)
    models.shard_blocks(model, fsdp)


def replicated_blocks(model: nn.Module, fsdp: Any) -> None:
    """On torch's road."""
    for block in model.blocks:
        replicate(block)
    fsdp.fully_shard(model)


def nothing_more(model: nn.Module) -> None:
    pass


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "blocks, then sharded": (compiled_first, nothing_more),
    "sharded blocks": (models.shard_blocks, compile_blocks),
    "root": (models.shard_blocks, compile_root),
    "root of replicated blocks": (replicated_blocks, compile_root),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_compiled(rank: int, n_ranks: int, way: str) -> None:
    """The first forward sets up in the middle of what is compiled."""
    shard, compile_it = WAYS[way]
    counts = []

    def see(fsdp: Any) -> Any:
        torch._dynamo.reset()
        counters.clear()
        model = sharded(fsdp, lambda: Net(2), shard)
        parameters = shards(model)
        compile_it(model)
        seen = []
        for step in range(3):
            backward(model, data(rank, step))
            seen.append(gradients(parameters))
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        return seen

    agree(see, CLOSE)
    (their_graphs, their_breaks), (graphs, breaks) = counts
    assert 0 < graphs <= their_graphs and breaks <= their_breaks, counts
