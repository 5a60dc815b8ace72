"""Where optimizers find their lists filled without torch's collecting, and where torch collects.

Updates and states are compared with torch's fully_shard, bit for bit.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import models
import pytest
import torch
from models import Net, data
from parity import EXACT, Pair, Side, on_ranks, total
from torch import optim
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def collected() -> Iterator[list[bool]]:
    """Collects whether lists were filled here."""
    from fsdp_c._optim._param_lists import Members

    results: list[bool] = []
    original = Members.collect

    def spy(*args: Any) -> bool:
        results.append(original(*args))
        return results[-1]

    with mock.patch.object(Members, "collect", spy):
        yield results


def make(cls: type[optim.Optimizer], **options: Any) -> Callable[..., Any]:
    return lambda params: cls(list(params), **{"lr": 0.01, **options})


def train(
    pair: Pair, rank: int, change: Callable[[Side], None] = lambda side: None, n_steps: int = 3
) -> list[bool]:
    """Says which steps of ours were collected here; `change` comes before the last."""
    with collected() as results:
        for step in range(n_steps):
            pair.forward(data(rank, step).to(next(pair.ours.model.parameters()).dtype))
            pair.backward()
            if step == n_steps - 1:
                pair.do(change)
            pair.optimize(set_to_none=False)
            pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")
    return results


def pair_of(optimizer: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Pair:
    return Pair(
        lambda: Net(n_blocks=1).to(dtype),
        models.shard_blocks,
        optimizer=optimizer,
        tolerance=EXACT,
    )


CASES = {
    "adadelta": make(optim.Adadelta),
    "adagrad": make(optim.Adagrad, foreach=True),
    "adamw": make(optim.AdamW, amsgrad=True, lr=torch.tensor(0.01)),
    "adamax": make(optim.Adamax, foreach=True),
    "asgd": make(optim.ASGD, t0=1),
    "nadam": make(optim.NAdam),
    "radam": make(optim.RAdam),
    "rmsprop": make(optim.RMSprop, momentum=0.5, centered=True),
    "sgd": make(optim.SGD, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, apart=True)
def test_from_the_second_step_on(rank: int, n_ranks: int, name: str) -> None:
    assert train(pair_of(CASES[name]), rank) == [False, True, True]


@pytest.mark.parametrize("cls", [optim.Adagrad, optim.Rprop])
@on_ranks(1)
def test_beside_plain_tensors(rank: int, n_ranks: int, cls: type[optim.Optimizer]) -> None:
    """torch refuses to step DTensors by these."""
    import fsdp_c

    optimizer = make(cls, **({"fused": True} if cls is optim.Adagrad else {}))
    model, plain = Net(n_blocks=1), Net(n_blocks=1)
    plain.load_state_dict(model.state_dict())
    models.shard_blocks(model, fsdp_c)
    optimizers = [optimizer(side.parameters()) for side in (model, plain)]
    with collected() as results:
        for step in range(3):
            for side, stepped in zip((model, plain), optimizers, strict=True):
                stepped.zero_grad()
                total(side(data(rank, step))).backward()
                stepped.step()
    assert results == [False, True, True]
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.to_local(), whole)
        for key, value in optimizers[1].state[whole].items():
            ours = optimizers[0].state[sharded][key]
            assert torch.equal(ours.to_local() if isinstance(ours, DTensor) else ours, value)


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
@on_ranks(2, apart=True)
def test_bfloat16_parameters(rank: int, n_ranks: int, kind: dict[str, Any]) -> None:
    pair = pair_of(make(optim.AdamW, **kind), torch.bfloat16)
    assert train(pair, rank) == [False, True, True]


def no_center(side: Side) -> None:
    side.optimizer.param_groups[0]["centered"] = False


def schedule(side: Side) -> None:
    side.optimizer.param_groups[0].update(lr=0.003, momentum=0.25, alpha=0.5)


def resume(side: Side) -> None:
    side.optimizer.load_state_dict(side.optimizer.state_dict())


def lose_a_gradient(side: Side) -> None:
    list(side.shards.values())[1].grad = None


def lose_a_state(side: Side) -> None:
    del side.optimizer.state[list(side.shards.values())[1]]


def hold_a_tuple(side: Side) -> None:
    group = side.optimizer.param_groups[0]
    group["params"] = tuple(group["params"])


@pytest.mark.parametrize(
    ("change", "is_collected"),
    [
        (no_center, [False]),
        (schedule, [True]),
        (resume, [False]),  # its groups are new
        (lose_a_gradient, [True]),
        (lose_a_state, [False]),
        (hold_a_tuple, []),
    ],
)
@on_ranks(1)
def test_what_changes_between_steps(
    rank: int, n_ranks: int, change: Callable[[Side], None], is_collected: list[bool]
) -> None:
    pair = pair_of(make(optim.RMSprop, momentum=0.5, centered=True))
    assert train(pair, rank, change) == [False, True, *is_collected]


class Elsewhere(dict):
    """Shows at each look what it keeps in another place; what a dict has is old."""

    def __init__(self, state: dict[Any, Any]) -> None:
        super().__init__((key, copy.deepcopy(value)) for key, value in state.items())
        self.kept = dict(state)

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self.kept.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kept[key] = value

    def items(self) -> Any:
        return self.kept.items()


def move_all(side: Side) -> None:
    side.optimizer.state = Elsewhere(side.optimizer.state)


def move_each(side: Side) -> None:
    state = side.optimizer.state
    state.update((param, Elsewhere(own)) for param, own in state.items())


@pytest.mark.parametrize("move", [move_all, move_each])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.RMSprop])
@on_ranks(1)
def test_state_of_another_type(
    rank: int, n_ranks: int, cls: type[optim.Optimizer], move: Callable[[Side], None]
) -> None:
    """What it gives and takes is its own business: torch's code looks into it."""
    pair = pair_of(make(cls, **({"momentum": 0.9} if cls is optim.SGD else {})))
    results = train(pair, rank, move)
    assert not any(results[2:])


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
@on_ranks(1)
def test_a_look_at_the_state_is_seen(rank: int, n_ranks: int, cls: type[optim.Optimizer]) -> None:
    seen: list[str] = []

    class Watched(dict):
        def __getitem__(self, key: Any) -> Any:
            seen.append(type(key).__name__)
            return super().__getitem__(key)

    def watch(side: Side) -> None:
        side.optimizer.state = Watched(side.optimizer.state)

    pair = pair_of(make(cls, momentum=0.9) if cls is optim.SGD else make(cls))
    train(pair, rank, watch)
    n_params = len(pair.ours.shards)
    assert seen.count("DTensor") == len(seen) >= 2 * n_params


class Listen(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Listen.count += 1
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_modes_see_the_collecting(rank: int, n_ranks: int) -> None:
    pair = pair_of(make(optim.RMSprop))
    train(pair, rank)

    def watched(side: Side) -> None:
        with Listen():
            side.optimizer.step()

    pair.forward(data(rank))
    pair.backward()
    with collected() as results:
        pair.do(watched)
    assert results == [False] and Listen.count > len(pair.ours.shards)


@on_ranks(1)
def test_versions_count(rank: int, n_ranks: int) -> None:
    """Autograd sees that parameters and state were written."""
    import fsdp_c

    model = Net(n_blocks=1)
    models.shard_blocks(model, fsdp_c)
    optimizer = make(optim.RMSprop)(model.parameters())
    for step in range(3):
        total(model(data(rank))).backward()
        state = [value for own in optimizer.state.values() for value in own.values()]
        tensors = [*model.parameters(), *state]
        tensors += [t.to_local() for t in tensors if isinstance(t, DTensor)]
        before = [t._version for t in tensors]
        with collected() as results:
            optimizer.step()
        assert results == [step > 0]
        assert all(t._version > b for t, b in zip(tensors, before, strict=True))


# --- SGD's buffers --------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True])
@on_ranks(1, 2)
def test_sgd_is_stepped_without_collecting_once_it_has_buffers(
    rank: int, n_ranks: int, foreach: bool | None
) -> None:
    """Of a type that the C pass does not take."""
    from fsdp_c._optim import _param_lists

    results: list[bool] = []
    original = _param_lists.step_buffers

    def spy(*args: Any) -> bool:
        results.append(original(*args))
        return results[-1]

    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": foreach}
    pair = pair_of(make(optim.SGD, **options), torch.bfloat16)
    with mock.patch.object(_param_lists, "step_buffers", spy):
        train(pair, rank, n_steps=4)
    assert results == [False, True, True, True]


@on_ranks(1)
def test_a_buffer_that_is_none_becomes_one(rank: int, n_ranks: int) -> None:
    """As states that were saved without momentum may have it."""

    def forget(side: Side) -> None:
        for param in side.model.parameters():
            side.optimizer.state[param]["momentum_buffer"] = None

    pair = pair_of(make(optim.SGD, momentum=0.9), torch.bfloat16)
    train(pair, rank, forget, n_steps=2)
    train(pair, rank, n_steps=2)
