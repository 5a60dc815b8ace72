"""Losses on what an inner layer has computed, which a hook or an attribute kept: probes, early exits.

Their backward does not pass the unit's output. Torch's fully_shard loses such gradients or fails;
the unsharded model is the judge, step by step.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import models
import pytest
import torch
from models import HIDDEN, WIDTH, data
from parity import Plain, Side, Tolerance, on_ranks, sgd
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fsdp_c import _device

CLOSE = Tolerance(relative=1e-5, scaled=1e-5, absolute=1e-7)


class Enc(nn.Module):
    """Keeps what is inside: `kept` is on the way to the output, `aside` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up(self.norm(x))
        self.aside = torch.tanh(self.head(x * self.scale))
        return x + self.down(torch.tanh(self.kept)) * self.scale


class Net(nn.Module):
    def __init__(self, stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.blocks = nn.ModuleList(Enc() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Stemless(Net):
    """The first block's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__(stem=False)


Backward = Callable[[nn.Module, Tensor, float], None]


def weigh(tensor: Tensor) -> Tensor:
    return tensor.float().square().sum()


def inner(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    (weigh(model.blocks[1].kept) * scale).backward()


def first(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    (weigh(model.blocks[0].kept) * scale).backward()


def aside(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    (weigh(model.blocks[1].aside) * scale).backward()


def beside(model: nn.Module, x: Tensor, scale: float) -> None:
    """In one backward with the output."""
    out = model(x)
    kept = [weigh(block.kept) + weigh(block.aside) for block in model.blocks]
    ((weigh(out) + torch.stack(kept).sum()) * scale).backward()


def inner_first(model: nn.Module, x: Tensor, scale: float) -> None:
    out = model(x)
    (weigh(model.blocks[1].kept) * scale).backward(retain_graph=True)
    (weigh(out) * scale).backward()


def inner_last(model: nn.Module, x: Tensor, scale: float) -> None:
    out = model(x)
    (weigh(out) * scale).backward(retain_graph=True)
    (weigh(model.blocks[1].kept) * scale).backward()


def branch_last(model: nn.Module, x: Tensor, scale: float) -> None:
    """The branch's own nodes, and its unit's parameters, have had no part in the first backward."""
    out = model(x.detach())
    (weigh(out) * scale).backward(retain_graph=True)
    (weigh(model.blocks[0].aside) * scale).backward()


def each_apart(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    for block in reversed(model.blocks):
        (weigh(block.kept) * scale).backward(retain_graph=True)
        (weigh(block.aside) * scale).backward(retain_graph=True)


def two_forwards(model: nn.Module, x: Tensor, scale: float) -> None:
    out = model(x)
    kept = model.blocks[1].kept
    other = model(x + 1)
    (weigh(kept) * scale).backward()
    (weigh(other) * scale).backward()
    del out


def evaluates_between(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    kept = model.blocks[1].kept
    with torch.no_grad():
        model(x + 1)
    (weigh(kept) * scale).backward()


BACKWARDS: list[Backward] = [inner, first, aside, beside, inner_first, inner_last, branch_last]
BACKWARDS += [each_apart, two_forwards, evaluates_between]
# Of these nodes read weights that are no longer there over messages, see `test_told_over_messages`.
OFF_THE_WAY = (aside, branch_last, each_apart)


def train(
    rank: int,
    n_ranks: int,
    backward: Backward,
    shard: Callable[..., None],
    build: Callable[[], nn.Module] = Net,
    tolerance: Tolerance = CLOSE,
    of_rank: Callable[[int, int], Backward] | None = None,
    **options: Any,
) -> Side:
    side, plain = Side("tested", fsdp_c, build, lambda m, f: shard(m, f, **options), sgd), Plain(build)
    of_rank = of_rank or (lambda rank, step: backward)
    for step in range(3):
        for r in range(n_ranks):
            of_rank(r, step)(plain.model, data(r, step), 1 / n_ranks)
        of_rank(rank, step)(side.model, data(rank, step), 1)
        plain.check(side, tolerance)
        for optimizer in (side.optimizer, plain.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        plain.check(side, tolerance)
    return side


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


SHARDINGS = [models.shard_blocks, models.shard_root, models.shard_deep, models.shard_grouped]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("build", [Net, Stemless])
@pytest.mark.parametrize("shard", SHARDINGS)
@on_ranks(2)
def test_arrives(rank: int, n_ranks: int, shard: Any, build: Any, reshard: bool) -> None:
    for backward in BACKWARDS:
        try:
            train(rank, n_ranks, backward, shard, build, reshard_after_forward=reshard)
        except Exception as e:
            import traceback
            raise AssertionError(f"CASE {backward.__name__}: {type(e)} {str(e)[:300]}") from e
