"""Backwards through graphs from before an optimizer step: what the unsharded model does.

It raises where the graph has saved a weight that the step has changed; elsewhere gradients arrive.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from models import WIDTH, Block, data
from parity import Plain, Side, Tolerance, sgd
from torch import Tensor, nn

import fsdp_c
from fsdp_c._comm import _device

CLOSE = Tolerance(relative=1e-5, scaled=1e-5, absolute=1e-7)
MODIFIED = "modified by an inplace operation"


class Net(nn.Module):
    """`inner` is kept inside of a block; a table's weight is not saved by its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.embedded = self.table(torch.arange(4)) + self.bias
        for block in self.blocks:
            x = block(x)
        return x


def shard(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model.table, **options)
    fsdp.fully_shard(model, **options)


Steps = Callable[[nn.Module, torch.optim.Optimizer, Tensor, float], None]


def again(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float) -> None:
    loss = model(x).square().sum() * scale
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def first_after(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float
) -> None:
    """The graph's first backward comes after the step."""
    loss = model(x).square().sum() * scale
    (model(x + 1).square().sum() * scale).backward()
    optimizer.step()
    loss.backward()


def truncated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float) -> None:
    """The state is carried over the step without detach."""
    state = model(x)
    (state.square().sum() * scale).backward(retain_graph=True)
    optimizer.step()
    (model(state).square().sum() * scale).backward()


def after_forward(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float
) -> None:
    loss = model(x).square().sum() * scale
    loss.backward(retain_graph=True)
    optimizer.step()
    with torch.no_grad():
        model(x)
    loss.backward()


def not_saved(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float) -> None:
    """An embedding and a bias: no weight is read."""
    model(x)
    loss = model.embedded.square().sum() * scale
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def no_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float) -> None:
    loss = model(x).square().sum() * scale
    loss.backward(retain_graph=True)
    model(x).square().sum().detach()
    loss.backward()


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, scale: float) -> None:
    loss = model(x).square().sum() * scale
    loss.backward(retain_graph=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    loss.backward()


RAISE: list[Steps] = [again, first_after, truncated, after_forward, loaded]
DO_NOT: list[Steps] = [not_saved, no_step]


def context_of(kind: str) -> contextlib.AbstractContextManager[Any]:
    return _device.on_cpu() if kind == "device" else contextlib.nullcontext()


def raises(rank: int, n_ranks: int, kind: str, reshard: bool) -> None:
    for steps in RAISE:
        with context_of(kind):
            side = Side(
                "tested", fsdp_c, Net, lambda m, f: shard(m, f, reshard_after_forward=reshard), sgd
            )
            plain = Plain(Net)
            with pytest.raises(RuntimeError, match=MODIFIED):
                steps(plain.model, plain.optimizer, data(rank), 1)
            with (
                pytest.warns(UserWarning, match="unit '.*before an optimizer step"),
                pytest.raises(RuntimeError, match=MODIFIED),
            ):
                steps(side.model, side.optimizer, data(rank), 1)


def arrives(rank: int, n_ranks: int, kind: str, reshard: bool) -> None:
    for steps in DO_NOT:
        with context_of(kind), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side = Side(
                "tested", fsdp_c, Net, lambda m, f: shard(m, f, reshard_after_forward=reshard), sgd
            )
            plain = Plain(Net)
            steps(side.model, side.optimizer, data(rank), 1)
            steps_plain(plain, steps, n_ranks)
            plain.check(side, CLOSE)


def steps_plain(plain: Plain, steps: Steps, n_ranks: int) -> None:
    """All ranks' losses at once: the steps see one model and one optimizer."""

    class All(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            outs, embedded = [], []
            for r in range(n_ranks):
                outs.append(plain.model(data(r)))
                embedded.append(plain.model.embedded)
            self.embedded = torch.stack(embedded)
            return torch.stack(outs)

    steps(All(), plain.optimizer, data(0), 1 / n_ranks)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["shared", "messages", "device"])
@pytest.mark.parametrize("case", [raises, arrives])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_as_unsharded(n_ranks: int, case: Any, kind: str, reshard: bool) -> None:
    env = {"FSDP_C_TRANSPORT": "callback"} if kind == "messages" else None
    harness.run_ranks(case, n_ranks, kind, reshard, env=env)
