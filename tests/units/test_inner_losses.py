"""Losses on what an inner layer has computed, which an attribute kept: probes, early exits.

Their backward does not pass the unit's output. Torch's fully_shard loses such gradients or fails;
the unsharded model is the judge, step by step.
"""

import contextlib
import functools
import weakref
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
from fsdp_c._comm import _device

CLOSE = Tolerance(relative=1e-5, scaled=1e-5, absolute=1e-7)


# All that are alive.
blocks: weakref.WeakSet["Enc"] = weakref.WeakSet()


def forgetting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks keep nothing after it: a graph holds its model, by nodes that no collector can see."""

    @functools.wraps(run)
    def run_and_forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            for block in blocks:
                block.kept = block.aside = None

    return run_and_forget


class Enc(nn.Module):
    """Keeps what is inside: `kept` is on the way to the output, `aside` is not."""

    def __init__(self) -> None:
        super().__init__()
        blocks.add(self)
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
    model(x)
    kept = model.blocks[1].kept
    other = model(x + 1)
    (weigh(kept) * scale).backward()
    (weigh(other) * scale).backward()


def evaluates_between(model: nn.Module, x: Tensor, scale: float) -> None:
    model(x)
    kept = model.blocks[1].kept
    with torch.no_grad():
        model(x + 1)
    (weigh(kept) * scale).backward()


BACKWARDS: list[Backward] = [inner, first, aside, beside, inner_first, inner_last, branch_last]
BACKWARDS += [each_apart, two_forwards, evaluates_between]
# Nodes of these read weights that are gone over messages: test_named_where_weights_are_gone.
OFF_THE_WAY = (aside, branch_last, each_apart)


@forgetting
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
    side = Side("tested", fsdp_c, build, lambda m, f: shard(m, f, **options), sgd)
    plain = Plain(build)
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


SHARDINGS = [models.shard_blocks, models.shard_root, models.shard_deep, models.shard_grouped]
ON_THE_WAY = [b for b in BACKWARDS if b not in OFF_THE_WAY]


@pytest.mark.parametrize("shard", SHARDINGS)
@on_ranks(2)
def test_arrives(rank: int, n_ranks: int, shard: Any) -> None:
    for build in (Net, Stemless):
        for backward in BACKWARDS:
            train(rank, n_ranks, backward, shard, build)
    for backward in (inner, inner_last, each_apart):
        train(rank, n_ranks, backward, shard, reshard_after_forward=False)


@on_ranks(1, 3)
def test_other_worlds(rank: int, n_ranks: int) -> None:
    for backward in BACKWARDS:
        train(rank, n_ranks, backward, models.shard_blocks, Stemless)


def over_messages(rank: int, n_ranks: int) -> None:
    for backward in ON_THE_WAY:
        train(rank, n_ranks, backward, models.shard_grouped)
        train(rank, n_ranks, backward, models.shard_root, Stemless)
    train(rank, n_ranks, aside, models.shard_blocks, reshard_after_forward=False)


def test_over_messages() -> None:
    harness.run_ranks(over_messages, 2, env={"FSDP_C_TRANSPORT": "callback"})


@on_ranks(1, 2)
def test_on_a_device(rank: int, n_ranks: int) -> None:
    """One rank's shards stay where they are; several ranks' units are gathered again."""
    with _device.on_cpu():
        for backward in BACKWARDS if n_ranks == 1 else ON_THE_WAY:
            train(rank, n_ranks, backward, models.shard_grouped)


def told(rank: int, n_ranks: int, on_device: bool) -> None:
    with _device.on_cpu() if on_device else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match=r"(?s)unit 'blocks.1'.*return that tensor from"):
            train(rank, n_ranks, aside, models.shard_blocks)


@pytest.mark.parametrize("on_device", [False, True])
def test_named_where_weights_are_gone(on_device: bool) -> None:
    """A branch that the output does not depend on: nothing of it is known after forward."""
    env = None if on_device else {"FSDP_C_TRANSPORT": "callback"}
    harness.run_ranks(told, 2, on_device, env=env)


@on_ranks(4)
def test_replicas(rank: int, n_ranks: int) -> None:
    mesh = harness.cached_mesh((2, 2), ("replicate", "shard"))
    for backward in (inner, aside, inner_last):
        train(rank, n_ranks, backward, models.shard_blocks, mesh=mesh)


@on_ranks(2)
def test_ranks_that_differ(rank: int, n_ranks: int) -> None:
    """One reaches a unit from inside, the other through its output, or not at all."""
    of_one = [(inner, beside), (aside, first), (inner, aside)]
    for pair in [*of_one, (branch_last, inner_first), (inner_last, inner_first)]:

        def of_rank(r: int, step: int, pair: tuple[Backward, Backward] = pair) -> Backward:
            return pair[(r + step) % 2]

        train(rank, n_ranks, inner, models.shard_blocks, Net, CLOSE, of_rank)


@on_ranks(2)
@forgetting
def test_mixed_precision(rank: int, n_ranks: int) -> None:
    """The same bits as by way of the output, where the last unit returns it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    class Returning(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return (out, self.blocks[1].kept) if self.returns else out

    def run(returns: bool) -> list[Tensor]:
        def shard(model: nn.Module, fsdp: Any) -> None:
            models.shard_root(model, fsdp, mp_policy=policy)

        side = Side("tested", fsdp_c, Returning, shard, sgd)
        side.model.returns = returns
        for step in range(2):
            result = side.model(data(rank, step))
            weigh(result[1] if returns else side.model.blocks[1].kept).backward()
            side.optimizer.step()
        return [p.grad.full_tensor() for p in side.shards.values() if p.grad is not None]

    ours, expected = run(False), run(True)
    assert len(ours) == len(expected) > 8
    assert all(map(torch.equal, ours, expected))


@on_ranks(2)
@forgetting
def test_accumulation(rank: int, n_ranks: int) -> None:
    """Gradients from inside and through the output, held over micro-batches."""
    for shard in (models.shard_blocks, models.shard_root):
        side, plain = Side("tested", fsdp_c, Stemless, shard, sgd), Plain(Stemless)
        for step, backward in enumerate((inner, aside, beside, inner, inner)):
            side.model.set_requires_gradient_sync(step in (2, 4))
            backward(side.model, data(rank, step), 1)
            for r in range(n_ranks):
                backward(plain.model, data(r, step), 1 / n_ranks)
            if step in (2, 4):
                plain.check(side, CLOSE)


class Recomputing(Enc):
    """Keeps what a checkpoint has computed, or, not reentrant, what is inside of it."""

    def body(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if not in_backward() and y.requires_grad:
            self.kept = y
        return self.down(torch.tanh(y))

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.body, self.norm(x), use_reentrant=self.is_reentrant)
        if self.is_reentrant:
            self.kept = out
        return x + out * self.scale


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def recomputing(is_reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList(Recomputing() for _ in range(3))
        for block in model.blocks:
            block.is_reentrant = is_reentrant
        return model

    return build


class Around(Net):
    """Each block is in a checkpoint, and runs again before its gradients come."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            kept = self.run(block, x)
            x, block.kept = kept
        return x

    def run(self, block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(block, x, use_reentrant=False), block.kept


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("shard", [models.shard_blocks, models.shard_root])
@on_ranks(2)
def test_checkpoints(rank: int, n_ranks: int, shard: Any, is_reentrant: bool) -> None:
    for backward in (inner, first, inner_first, inner_last):
        train(rank, n_ranks, backward, shard, recomputing(is_reentrant))
    if not is_reentrant:
        train(rank, n_ranks, inner, shard, Around)


def penalty(model: nn.Module, x: Tensor, scale: float) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(weigh(out), x, create_graph=True)
    ((weigh(grad) + weigh(out)) * scale).backward()


@on_ranks(1, 2)
def test_backward_through_a_backward(rank: int, n_ranks: int) -> None:
    """A gradient penalty, where the weights stay in place."""
    close = Tolerance(relative=1e-4, scaled=1e-4, absolute=1e-6)
    for shard in (models.shard_blocks, models.shard_deep, models.shard_root):
        train(rank, n_ranks, penalty, shard, Net, close)


@on_ranks(1)
@forgetting
def test_users_hook_on_the_unsharded_parameter(rank: int, n_ranks: int) -> None:
    """It runs, and the gradient arrives."""
    model = Stemless()
    models.shard_blocks(model, fsdp_c)
    seen: list[bool] = []

    def watch(module: nn.Module, args: Any) -> None:
        if not seen:
            seen.append(False)
            module.weight.register_post_accumulate_grad_hook(lambda _: seen.append(True))

    model.blocks[0].up.register_forward_pre_hook(watch)
    for step in range(2):
        model.zero_grad()
        first(model, data(rank, step), 1)
        assert model.blocks[0].up.weight.grad is not None
    assert seen == [False, True, True]
