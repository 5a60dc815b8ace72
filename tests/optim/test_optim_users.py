"""Optimizers and wrappers as users write them, step by step beside torch's fully_shard."""

import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import Net, data
from parity import EXACT, Pair, Side, on_ranks, total
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Lion(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


class Lamb(optim.AdamW):
    """A subclass that scales what its base would do, by norms of whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        super().step()
        for p, old in zip(params, before, strict=True):
            way = p - old
            trust = (old.norm() / way.norm().clamp(min=1e-6)).clamp(max=10)
            p.copy_(old + trust.full_tensor().item() * 0.1 * way)


class LowBit(optim.Optimizer):
    """Its state is eight bits of each local element and a scale."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            local, grad, state = p.to_local(), p.grad.to_local(), self.state[p]
            if not state:
                codes = torch.zeros_like(local, dtype=torch.int8)
                state["codes"] = DTensor.from_local(codes, p.device_mesh, p.placements)
                state["scale"] = torch.zeros(())
            codes = state["codes"].to_local()
            average = (codes.float() * state["scale"]).mul_(0.9).add_(grad)
            local.add_(average, alpha=-0.01)
            if average.numel() > 0:
                state["scale"] = average.abs().amax() / 127
                codes.copy_((average / state["scale"].clamp(min=1e-12)).round())


class ScheduleFree(optim.Optimizer):
    """Gradients at y, averages in x; `eval` shows x in the parameters' data."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def swap(self, weight: float) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if "z" in self.state[p]:
                p.data.lerp_(end=self.state[p]["z"], weight=weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            params = group["params"]
            for p in params:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.detach().clone()
            z = [self.state[p]["z"] for p in params]
            torch._foreach_lerp_(params, z, 1 / group["k"])
            torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1 * group["lr"])
            torch._foreach_sub_(z, [p.grad * group["lr"] for p in params])


class Lookahead:
    """Holds an optimizer, and is none."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.AdamW(params, lr=0.01)
        self.slow = [p.detach().clone() for p in self.params()]
        self.n_steps = 0

    def params(self) -> list[Tensor]:
        return self.inner.param_groups[0]["params"]

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.n_steps += 1
        if self.n_steps % 2 == 0:
            for p, slow in zip(self.params(), self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()


OWN: dict[str, Callable[..., Any]] = {
    "lion": Lion,
    "lamb": functools.partial(Lamb, lr=0.01),
    "low bit": LowBit,
    "schedule free": ScheduleFree,
    "lookahead": Lookahead,
}


def pair_of(optimizer: Callable[..., Any], build: Callable[[], nn.Module] | None = None) -> Pair:
    return Pair(
        build or (lambda: Net(n_blocks=1)),
        models.shard_blocks,
        optimizer=lambda params: optimizer(list(params)),
        tolerance=EXACT,
    )


def train(pair: Pair, rank: int, n_steps: int = 3) -> None:
    for step in range(n_steps):
        pair.step(data(rank, step), set_to_none=step % 2 == 0)
        pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@pytest.mark.parametrize("name", OWN)
@on_ranks(2)
def test_written_by_users(rank: int, n_ranks: int, name: str) -> None:
    pair = pair_of(OWN[name])
    train(pair, rank)
    if name == "schedule free":
        pair.do(lambda side: side.optimizer.swap(0.3), "eval")
        pair.eval_forward(data(rank))
        pair.do(lambda side: side.model.reshard())
        pair.do(lambda side: side.optimizer.swap(-0.4), "train")
        train(pair, rank, 2)


@on_ranks(2)
def test_hooks_of_steps(rank: int, n_ranks: int) -> None:
    """They change gradients before a step and parameters after it."""

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.clamp_(-0.2, 0.2)

    pair = pair_of(functools.partial(optim.AdamW, lr=0.01))
    for side in (pair.theirs, pair.ours):
        side.optimizer.register_step_pre_hook(before)
        side.optimizer.register_step_post_hook(after)
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        train(pair, rank)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.RMSprop])
@on_ranks(2)
def test_closures(rank: int, n_ranks: int, cls: type[optim.Optimizer]) -> None:
    pair = pair_of(functools.partial(cls, lr=0.01))

    def step(side: Side, x: Tensor) -> float:
        def closure() -> Tensor:
            side.optimizer.zero_grad()
            loss = total(side.model(x))
            loss.backward()
            return loss

        return side.optimizer.step(closure).item()

    for index in range(3):
        pair.both(functools.partial(step, x=data(rank, index)))


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.RMSprop])
@on_ranks(2)
def test_steps_in_backward(rank: int, n_ranks: int, cls: type[optim.Optimizer]) -> None:
    """An optimizer for each parameter steps as soon as its gradient is there."""
    pair = Pair(lambda: Net(n_blocks=2), models.shard_blocks, optimizer=None, tolerance=EXACT)
    options = {"momentum": 0.9} if cls is optim.SGD else {}

    def prepare(side: Side) -> None:
        side.kept_all = {p: cls([p], lr=0.01, **options) for p in side.shards.values()}

        def step(p: Tensor) -> None:
            side.kept_all[p].step()
            side.kept_all[p].zero_grad()

        for p in side.shards.values():
            p.register_post_accumulate_grad_hook(step)

    pair.do(prepare)
    for index in range(3):
        pair.forward(data(rank, index))
        pair.backward()
        pair.both(lambda side: [o.state_dict() for o in side.kept_all.values()], "states")


@on_ranks(2)
def test_hooks_outlive_a_conversion(rank: int, n_ranks: int) -> None:
    """module.to() swaps the shards' tensors, also where nothing is to be converted."""
    pair = Pair(lambda: Net(n_blocks=2), models.shard_blocks, tolerance=EXACT)

    def prepare(side: Side) -> None:
        side.kept_all = []
        for name, p in side.shards.items():
            handle = p.register_post_accumulate_grad_hook(
                lambda p, side=side, name=name: side.kept_all.append((name, p.dtype, p.grad.dtype))
            )
        side.model.to("cpu")
        handle.remove()

    pair.do(prepare)
    for index in range(3):
        pair.forward(data(rank, index))
        pair.backward()
        ran = pair.both(lambda side: sorted(side.kept_all, key=str), "hooks")
        assert len(ran) == (index + 1) * (len(pair.ours.shards) - 1)
        pair.optimize()
        pair.do(lambda side: side.model.float(), "conversion")


@pytest.mark.parametrize("kind", ["swa", "ema"])
@on_ranks(2)
def test_averages(rank: int, n_ranks: int, kind: str) -> None:
    """torch's AveragedModel around a copy that is sharded like the model."""
    pair = pair_of(functools.partial(optim.SGD, lr=0.05, momentum=0.9))

    def prepare(side: Side) -> None:
        function = swa_utils.get_ema_multi_avg_fn(0.9) if kind == "ema" else None
        average = swa_utils.AveragedModel(Net(n_blocks=1), multi_avg_fn=function)
        models.shard_blocks(average.module, side.fsdp)
        side.average = average

    def update(side: Side) -> Any:
        side.average.update_parameters(side.model)
        return [p.to_local() for p in side.average.module.parameters()]

    pair.do(prepare)
    for step in range(3):
        pair.step(data(rank, step))
        pair.both(update)
    x = data(rank)
    pair.both(lambda side: side.average(x).detach(), "the average's output")


@on_ranks(2)
def test_schedules(rank: int, n_ranks: int) -> None:
    """Rates and momenta that change in each step."""
    for cls in (optim.AdamW, optim.SGD, optim.RMSprop):
        options = {} if cls is optim.AdamW else {"momentum": 0.9}
        pair = pair_of(functools.partial(cls, lr=0.01, **options))
        for side in (pair.theirs, pair.ours):
            side.schedule = optim.lr_scheduler.OneCycleLR(side.optimizer, 0.05, total_steps=5)
        for step in range(4):
            pair.step(data(rank, step))
            pair.do(lambda side: side.schedule.step(), "schedule")
            pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@on_ranks(2)
def test_sharpness_aware(rank: int, n_ranks: int) -> None:
    """Moves the parameters, takes gradients there, moves back and steps."""
    pair = pair_of(functools.partial(optim.AdamW, lr=0.01))

    def move(side: Side) -> None:
        with torch.no_grad():
            side.ways = [p.grad * 0.1 for p in side.shards.values()]
            for p, way in zip(side.shards.values(), side.ways, strict=True):
                p.add_(way)
        side.optimizer.zero_grad()

    def back(side: Side) -> None:
        with torch.no_grad():
            for p, way in zip(side.shards.values(), side.ways, strict=True):
                p.sub_(way)

    for step in range(3):
        x = data(rank, step)
        pair.forward(x)
        pair.backward()
        pair.do(move)
        pair.forward(x)
        pair.backward()
        pair.do(back)
        pair.optimize()


@on_ranks(2)
def test_states_in_another_type(rank: int, n_ranks: int) -> None:
    """Momenta that the user keeps in bfloat16."""
    pair = pair_of(functools.partial(optim.SGD, lr=0.01, momentum=0.9))
    train(pair, rank, 2)

    def shorten(side: Side) -> None:
        for own in side.optimizer.state.values():
            own["momentum_buffer"] = own["momentum_buffer"].bfloat16()

    pair.do(shorten)
    train(pair, rank, 2)


@on_ranks(1)
def test_states_made_in_inference_mode(rank: int, n_ranks: int) -> None:
    for cls in (optim.AdamW, optim.RMSprop):
        pair = pair_of(functools.partial(cls, lr=0.01))

        def step(side: Side) -> str:
            try:
                side.optimizer.step()
            except RuntimeError as error:
                return str(error).partition("\n")[0]
            return "stepped"

        def infer(side: Side) -> str:
            with torch.inference_mode():
                return step(side)

        for act in (infer, step, infer, infer):
            pair.forward(data(rank))
            pair.backward()
            pair.both(act)


@on_ranks(2)
def test_frozen_midway_and_two_optimizers(rank: int, n_ranks: int) -> None:
    pair = pair_of(functools.partial(optim.RMSprop, lr=0.01))

    def second(side: Side) -> None:
        side.other = optim.Adamax(list(side.shards.values())[::2], lr=0.01)

    pair.do(second)
    for step in range(4):
        pair.forward(data(rank, step))
        pair.backward()
        pair.do(lambda side: side.other.step())
        pair.optimize()
        pair.both(lambda side: [side.optimizer.state_dict(), side.other.state_dict()], "states")
        if step == 1:
            pair.do(lambda side: list(side.shards.values())[0].requires_grad_(False))
