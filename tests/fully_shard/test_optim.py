"""Stock optimizers over several steps beside torch: implementations, states, groups, resuming."""

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import Branches, Net, Tiny, data
from parity import Pair, Side, Tolerance, on_ranks
from torch import nn, optim

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **o: optim.SGD(p, lr=0.05, **o),
    "momentum": lambda p, **o: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, **o),
    "nesterov": lambda p, **o: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, **o),
    "adam": lambda p, **o: optim.Adam(p, lr=0.01, weight_decay=0.01, **o),
    "amsgrad": lambda p, **o: optim.Adam(p, lr=0.01, amsgrad=True, **o),
    "adamw": lambda p, **o: optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), **o),
    "maximize": lambda p, **o: optim.AdamW(p, lr=0.01, maximize=True, **o),
    "adagrad": lambda p, **o: optim.Adagrad(p, lr=0.01, **o),
}
UNFUSED: dict[str, Callable[..., optim.Optimizer]] = {
    "rmsprop": lambda p, **o: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, **o),
    "adamax": lambda p, **o: optim.Adamax(p, lr=0.01, **o),
    "nadam": lambda p, **o: optim.NAdam(p, lr=0.01, **o),
    "adadelta": lambda p, **o: optim.Adadelta(p, **o),
}
IMPLEMENTATIONS = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Torch has no fused SGD or Adagrad for DTensors.
CASES = [(name, kind) for name in [*OPTIMIZERS, *UNFUSED] for kind in ("default", "foreach")] + [
    *[(name, "fused") for name in ("adam", "amsgrad", "adamw", "maximize")],
    *[(name, "loop") for name in ("momentum", "adamw")],
]


def make(name: str, implementation: str) -> Callable[[Any], optim.Optimizer]:
    kind = {**OPTIMIZERS, **UNFUSED}[name]
    return lambda parameters: kind(list(parameters), **IMPLEMENTATIONS[implementation])


def tolerance(n_ranks: int) -> Tolerance | None:
    # Over more than two ranks gradients differ by roundings, which Adam turns into whole steps
    # where they are near 0.
    return Tolerance(relative=1e-4, scaled=1e-3, realign=True) if n_ranks > 2 else None


def check_state(pair: Pair) -> None:
    pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@pytest.mark.parametrize("name, implementation", CASES)
@on_ranks(1, 2)
def test_optimizer(rank: int, n_ranks: int, name: str, implementation: str) -> None:
    pair = Pair(lambda: Net(n_blocks=2), models.shard_blocks, optimizer=make(name, implementation))
    for step in range(3):
        pair.step(data(rank, step), set_to_none=step % 2 == 0)
        check_state(pair)
    pair.check_state_dict()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@on_ranks(3)
def test_three_ranks(rank: int, n_ranks: int, name: str) -> None:
    pair = Pair(
        Net, models.shard_blocks, optimizer=make(name, "default"), tolerance=tolerance(n_ranks)
    )
    for step in range(3):
        pair.step(data(rank, step))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_ranks(4)
def test_ranks_without_rows(rank: int, n_ranks: int, implementation: str) -> None:
    pair = Pair(
        Tiny,
        models.shard_root,
        optimizer=make("adamw", implementation),
        tolerance=tolerance(n_ranks),
    )
    for step in range(3):
        pair.step(data(rank, step))


def grouped(parameters: Any) -> optim.Optimizer:
    """Matrices decay and vectors do not, as most training scripts have it; the first few learn
    slower.
    """
    matrices = [p for p in parameters if p.ndim >= 2]
    groups = [
        {"params": matrices[:2], "lr": 0.001},
        {"params": matrices[2:], "weight_decay": 0.1},
    ]
    return optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def with_groups(side: Side) -> None:
    parameters = list(side.model.parameters())
    side.optimizer = grouped(parameters)
    side.optimizer.add_param_group({"params": [p for p in parameters if p.ndim < 2], "lr": 0.02})


@on_ranks(1, 2)
def test_groups_and_schedule(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, optimizer=None)
    pair.both(with_groups)

    def schedule(side: Side) -> None:
        side.kept_schedule = optim.lr_scheduler.CosineAnnealingLR(side.optimizer, T_max=5)

    pair.both(schedule)
    for step in range(4):
        pair.step(data(rank, step))
        pair.do(lambda side: side.kept_schedule.step(), "schedule")
        check_state(pair)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@on_ranks(1, 2)
def test_resumed(rank: int, n_ranks: int, name: str) -> None:
    """The saved state of one optimizer goes on in a new one."""
    pair = Pair(Net, models.shard_blocks, optimizer=make(name, "default"))
    for step in range(2):
        pair.step(data(rank, step))

    def resume(side: Side) -> None:
        saved = copy.deepcopy(side.optimizer.state_dict())
        side.optimizer = make(name, "default")(side.model.parameters())
        side.optimizer.load_state_dict(saved)

    pair.both(resume)
    check_state(pair)
    for step in range(2, 4):
        pair.step(data(rank, step))
        check_state(pair)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@on_ranks(1, 2)
def test_states_of_different_age(rank: int, n_ranks: int, implementation: str) -> None:
    """Parameters without a gradient are left out of a step, so their states fall behind."""
    pair = Pair(Branches, models.shard_blocks, optimizer=make("adamw", implementation))
    for step, use in enumerate([(0, 1), (1,), (0, 1, 2), (2,), (0, 1, 2)]):
        pair.step(data(rank, step), use=use)
        check_state(pair)


@on_ranks(1, 2)
def test_closure_and_hooks(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, optimizer=make("adamw", "default"))

    def step(side: Side) -> tuple[torch.Tensor, list[str]]:
        calls: list[str] = []

        def closure() -> torch.Tensor:
            calls.append("closure")
            side.optimizer.zero_grad()
            loss = side.model(data(rank)).pow(2).sum()
            loss.backward()
            return loss

        before = side.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        after = side.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        loss = side.optimizer.step(closure)
        before.remove()
        after.remove()
        return loss.detach(), calls

    for _ in range(3):
        pair.both(step)
        check_state(pair)


@on_ranks(1, 2)
def test_tensor_learning_rate(rank: int, n_ranks: int) -> None:
    def adam(parameters: Any) -> optim.Optimizer:
        return optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)

    pair = Pair(Net, models.shard_blocks, optimizer=adam)
    for step in range(3):
        pair.step(data(rank, step))


class Doubling(optim.Optimizer):
    """One that no library knows: it works on parameters and gradients as it finds them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.kinds: set[str] = set()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.kinds.add(type(parameter).__name__)
                    parameter.add_(parameter.grad, alpha=-0.02)


@on_ranks(1, 2)
def test_unknown_optimizer(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, optimizer=Doubling)
    for step in range(3):
        pair.step(data(rank, step))
        pair.both(lambda side: sorted(side.optimizer.kinds), "kinds")


@on_ranks(1, 2)
def test_two_optimizers_and_averaging(rank: int, n_ranks: int) -> None:
    """One optimizer per half of the model, and an average of the weights kept beside."""
    pair = Pair(Net, models.shard_blocks, optimizer=None)

    def prepare(side: Side) -> None:
        shards = list(side.shards.values())
        half = len(shards) // 2
        side.kept_optimizers = [
            optim.SGD(shards[:half], lr=0.05, momentum=0.9),
            optim.AdamW(shards[half:], lr=0.01),
        ]
        side.kept_average = [shard.detach().clone() for shard in shards]

    def update(side: Side) -> list[torch.Tensor]:
        for optimizer in side.kept_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, shard in zip(side.kept_average, side.shards.values(), strict=True):
                mean.lerp_(shard, 0.1)
        return side.kept_average

    pair.both(prepare)
    for step in range(3):
        pair.forward(data(rank, step))
        pair.backward()
        pair.both(update)


@on_ranks(1, 2)
def test_whole_matrices(rank: int, n_ranks: int) -> None:
    """Muon needs matrices, not pieces of them."""
    if not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon")

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](torch.tanh(self.blocks[0](x)))

    close = Tolerance(relative=1e-4, scaled=1e-4)
    pair = Pair(
        Matrices, models.shard_blocks, optimizer=lambda p: optim.Muon(p, lr=0.01), tolerance=close
    )
    for step in range(2):
        pair.step(data(rank, step))
