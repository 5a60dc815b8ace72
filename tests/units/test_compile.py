"""torch.compile over sharded modules: no more graphs and breaks than torch has, equal gradients."""

from collections.abc import Callable
from typing import Any

import harness
import models
import pytest
import torch
import torch._dynamo
from behaviour.pairs import CLOSE, EXACT, ROUGH, agree, backward, gradients, sharded, shards
from models import WIDTH, Net, data
from parity import Tolerance, compare, on_ranks, total
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def compile_root(model: nn.Module) -> None:
    model.compile(backend="eager")


def compiled_first(model: nn.Module, fsdp: Any) -> None:
    compile_blocks(model)
    models.shard_blocks(model, fsdp)


def replicated_blocks(model: nn.Module, fsdp: Any) -> None:
    """Replicas below a sharded root."""
    for block in model.blocks:
        replicate(block)
    fsdp.fully_shard(model)


def nothing_more(model: nn.Module) -> None:
    pass


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Repeated(nn.Module):
    """Each call runs its blocks twice; one block recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Recomputed()])

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks] * 2:
            x = block(x)
        return x


def low_precision(model: nn.Module, fsdp: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)


@on_ranks(2)
def test_compiled_blocks_of_several_sizes(rank: int, n_ranks: int) -> None:
    """In low precision; a forward without gradients stands between two steps."""

    def see(model: nn.Module) -> None:
        backward(model, data(rank, 0, 2, WIDTH))
        with torch.no_grad():
            model(data(rank, 0, 2, WIDTH))
        backward(model, data(rank, 1, 3, WIDTH))

    check_counts(Repeated, low_precision, compile_blocks, see, ROUGH)


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

    def see(model: nn.Module) -> None:
        for step in range(3):
            backward(model, data(rank, step))

    check_counts(lambda: Net(2), *WAYS[way], see, CLOSE)


@on_ranks(1, 2)
def test_compiled_autograd_is_refused(rank: int, n_ranks: int) -> None:
    """Torch's own leaves gradients as they are on each rank; the next step is right."""
    model, expected = (sharded(harness.implementation(), Net) for _ in range(2))
    loss = total(model(data(rank)))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        with pytest.raises(NotImplementedError, match="compiled autograd cannot run"):
            loss.backward()
    model.zero_grad()
    for one in (model, expected):
        backward(one, data(rank, 1))
    compare(gradients(shards(model)), gradients(shards(expected)), EXACT, "the next step")


def check_counts(
    build: Callable[[], nn.Module],
    shard: Callable[..., None],
    compile_it: Callable[[nn.Module], None],
    train: Callable[[nn.Module], None],
    tolerance: Tolerance,
) -> None:
    """Gradients as torch's, of no more graphs, breaks and compiled frames."""
    counts = []

    def see(fsdp: Any) -> Any:
        torch._dynamo.reset()
        counters.clear()
        model = sharded(fsdp, build, shard)
        parameters = shards(model)
        compile_it(model)
        train(model)
        graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].values()
        counts.append((graphs, sum(breaks), counters["frames"]["total"]))
        return gradients(parameters)

    agree(see, tolerance)
    theirs, ours = counts
    assert ours[0] > 0 and all(a <= b for a, b in zip(ours, theirs, strict=True)), counts
