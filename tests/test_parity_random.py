"""Random models, policies and call sequences beside torch, each made from its seed alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from models import Block, data
from parity import Pair, Tolerance
from torch import Tensor, nn

WORLDS = (1, 2, 3, 4)
N_ITERATIONS = 6


@dataclass
class Plan:
    """All that is random in one test; what torch itself gets wrong is left out."""

    width: int
    hidden: list[int]
    bias: list[bool]
    # One letter per block: R stays in the root's unit, U is a unit, D one with a unit inside, G one
    # with the next.
    kinds: str
    tie: bool
    reshard: list[bool | None]
    frozen: list[str]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    optimizer: str
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def n_blocks(self) -> int:
        return len(self.hidden)


def make_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    n_blocks = rng.randint(1, 5)
    param_dtype, reduce_dtype = rng.choice(
        [(None, None)] * 3 + [(torch.bfloat16, torch.float32), (torch.float64, torch.float32)]
    )
    kinds = "".join(rng.choice("RUUUDG") for _ in range(n_blocks))
    plan = Plan(
        width=rng.randint(1, 9),
        hidden=[rng.randint(1, 9) for _ in range(n_blocks)],
        bias=[rng.random() < 0.7 for _ in range(n_blocks)],
        kinds=kinds,
        tie=rng.random() < 0.3,
        reshard=[rng.choice([None, True, True, False]) for _ in range(n_blocks + 1)],
        # Never a norm, so that no unit is all frozen: torch 2.13 then has no dtypes for it.
        frozen=rng.sample(["up.weight", "up.bias", "down.bias"], rng.randint(0, 2)),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=rng.choice(["sgd", "momentum", "adamw"]),
    )
    for step in range(N_ITERATIONS):
        plan.calls.append(make_call(rng, plan, step))
    return plan


def make_call(rng: random.Random, plan: Plan, step: int) -> tuple[Any, ...]:
    order = tuple(range(plan.n_blocks))
    # In torch a member of a group that runs twice in one pass, or held and fresh gradients of two
    # dtypes, fail.
    may_repeat = "G" not in plan.kinds
    may_hold_some = plan.reduce_dtype is None
    use = order
    if rng.random() < 0.4:
        use = tuple(rng.sample(order, rng.randint(1, len(order))))
        if may_repeat and rng.random() < 0.5:
            use += (rng.choice(order),)
    zero = rng.random() < 0.6
    action = rng.choice(["train", "train", "eval", "two", "hold", "unshard", "toggle", "state"])
    if action == "hold" and not may_hold_some:
        use = order
    target = rng.randrange(plan.n_blocks)
    return action, step, use, zero, target


class RandomNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = nn.Linear(plan.width, plan.width)
        self.blocks = nn.ModuleList(
            Block(plan.width, hidden, bias)
            for hidden, bias in zip(plan.hidden, plan.bias, strict=True)
        )
        self.scale = nn.Parameter(torch.rand(plan.width) + 0.5)
        for name, parameter in self.named_parameters():
            if any(part in name for part in plan.frozen):
                parameter.requires_grad_(False)
        self.twin = nn.LayerNorm(plan.width)
        if plan.tie:
            self.twin.weight = self.scale

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in use:
            x = self.blocks[index](x)
        return self.twin(x) * self.scale


def shard(model: RandomNet, fsdp: Any, plan: Plan) -> None:
    policy = fsdp.MixedPrecisionPolicy(plan.param_dtype, plan.reduce_dtype)

    def unit(module: Any, index: int) -> None:
        fsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=plan.reshard[index])

    index = 0
    while index < plan.n_blocks:
        kind, block = plan.kinds[index], model.blocks[index]
        if kind == "D":
            unit(block.down, index)
        if kind in "UD":
            unit(block, index)
        if kind == "G":
            group = list(model.blocks[index : index + 2])
            unit(group if len(group) > 1 else block, index)
            index += 1
        index += 1
    unit(model, plan.n_blocks)


def make_optimizer(plan: Plan) -> Callable[[Any], torch.optim.Optimizer]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[plan.optimizer]


def run_call(pair: Pair, plan: Plan, rank: int, call: tuple[Any, ...]) -> None:
    """One iteration: what the action says, then a training step that leaves all sharded."""
    action, step, use, zero, target = call
    x = [data(rank, 10 * step + micro, 3, plan.width) for micro in range(3)]
    block = f"blocks.{target}"
    if action == "eval":
        with torch.no_grad():
            pair.forward(x[1], use)
    elif action == "unshard":
        pair.do(
            lambda side: unit_of(side, target).unshard(async_op=step % 2 == 0), f"unshard {block}"
        )
    elif action == "toggle":
        pair.do(lambda side: toggle(side.shards[f"{block}.down.weight"]), f"toggle {block}")
    elif action == "hold":
        pair.do(lambda side: side.model.set_requires_gradient_sync(False), "hold")
        pair.forward(x[1], use)
        pair.backward()
        pair.do(lambda side: side.model.set_requires_gradient_sync(True), "release")
    if action == "two":
        pair.both(lambda side: keep_two(side, x, use))
    else:
        pair.forward(x[0], use)
    pair.backward()
    pair.optimize(set_to_none=zero)
    if action == "state":
        pair.check_state_dict()


def keep_two(side: Any, x: list[Tensor], use: tuple[int, ...]) -> list[Tensor]:
    side.kept = [side.model(x[0], use), side.model(x[1], use)]
    return side.kept


def unit_of(side: Any, target: int) -> nn.Module:
    """The block if it is a unit, or the root."""
    block = side.model.blocks[target]
    return block if isinstance(block, side.fsdp.FSDPModule) else side.model


def toggle(parameter: Tensor) -> None:
    parameter.requires_grad_(not parameter.requires_grad)


def run_plan(rank: int, n_ranks: int, seed: int) -> None:
    plan = make_plan(seed)
    tolerance = Tolerance.of(n_ranks)
    # A held gradient and those of two runs are three addends, whose order is free.
    adds_three = any(call[0] == "hold" and len(set(call[2])) < len(call[2]) for call in plan.calls)
    if n_ranks > 2 or adds_three:
        # AdamW makes whole steps of roundings where a gradient is near 0.
        plan.optimizer = "momentum" if plan.optimizer == "adamw" else plan.optimizer
        tolerance = Tolerance(relative=1e-4, scaled=1e-4, realign=True)
    done: list[Any] = []
    try:
        pair = Pair(
            lambda: RandomNet(plan),
            lambda model, fsdp: shard(model, fsdp, plan),
            tolerance=tolerance,
            optimizer=make_optimizer(plan),
        )
        for call in plan.calls:
            done.append(call)
            run_call(pair, plan, rank, call)
    except Exception as error:
        plan.calls = done
        command = f"pytest tests/test_parity_random.py --first-seed {seed} --seeds 1"
        raise AssertionError(f"{command}\n{plan}\n{type(error).__name__}: {error}") from error


def test_random(random_seed: int) -> None:
    harness.run_ranks(run_plan, WORLDS[random_seed % len(WORLDS)], random_seed)
