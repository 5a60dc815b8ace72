"""What optimizers see of sharded parameters: local tensors in torch's element-wise classes.

Updates and states are compared with torch's fully_shard, bit for bit.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import models
import pytest
import torch
from harness import cached_mesh
from models import Net, Tiny, data
from parity import EXACT, Pair, Side, on_ranks, total
from torch import nn, optim
from torch.distributed.tensor import DTensor, Shard

MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "adadelta": optim.Adadelta,
    "adagrad": functools.partial(optim.Adagrad, weight_decay=0.1),
    "adam": functools.partial(optim.Adam, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw": functools.partial(optim.AdamW, betas=(0.3, 0.8)),
    "adamax": optim.Adamax,
    "asgd": functools.partial(optim.ASGD, t0=1),
    "nadam": functools.partial(optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": optim.RAdam,
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.5, centered=True),
    "rprop": optim.Rprop,
    "sgd": optim.SGD,
    "momentum": functools.partial(
        optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    ),
}
KINDS = {"default": {}, "foreach": {"foreach": True}}


def make(name: str, **options: Any) -> Callable[[Any], optim.Optimizer]:
    return lambda parameters: MAKERS[name](list(parameters), lr=0.01, **options)


@contextlib.contextmanager
def seen_types(cls: type[optim.Optimizer]) -> Iterator[set[str]]:
    """Collects the types of parameters that the functional form of an optimizer gets."""
    home = cls.step.__module__  # AdamW's is Adam's
    module, name = sys.modules[home], home.rpartition(".")[2].lstrip("_")
    original, types = getattr(module, name), set()

    def spy(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        types.update(type(param).__name__ for param in params)
        return original(params, *args, **kwargs)

    with mock.patch.object(module, name, spy):
        yield types


def train(pair: Pair, rank: int, n_steps: int = 3) -> None:
    for step in range(n_steps):
        pair.step(data(rank, step), set_to_none=step % 2 == 0)
        pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "rprop"])
@on_ranks(2)
def test_every_class(rank: int, n_ranks: int, name: str, kind: str) -> None:
    pair = Pair(lambda: Net(n_blocks=1), models.shard_blocks, optimizer=make(name, **KINDS[kind]))
    train(pair, rank)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_rprop(rank: int, n_ranks: int, kind: str) -> None:
    """torch has no foreach Rprop for DTensors, so that this is compared with plain tensors."""
    import fsdp_c

    ours, plain = sharded_net(fsdp_c), Net(n_blocks=1)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            b.copy_(a.to_local())
    optimizers = [make("rprop", **KINDS[kind])(model.parameters()) for model in (ours, plain)]
    for step in range(3):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            total(model(data(rank, step))).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.to_local(), b)


def sharded_net(fsdp: Any, **options: Any) -> nn.Module:
    model = Net(n_blocks=1)
    models.shard_blocks(model, fsdp, **options)
    return model


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(1)
def test_local_tensors_are_seen(rank: int, n_ranks: int, name: str) -> None:
    import fsdp_c

    model = sharded_net(fsdp_c)
    optimizer = make(name)(model.parameters())
    for _ in range(2):
        total(model(data(rank))).backward()
        with seen_types(type(optimizer)) as types:
            optimizer.step()
        assert "DTensor" not in types
        for group in optimizer.param_groups:
            for param in group["params"]:
                assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
                for key, value in optimizer.state[param].items():
                    assert isinstance(value, DTensor) or value.dim() == 0, key
        assert all(isinstance(key, DTensor) for key in optimizer.state)


class Subclass(optim.AdamW):
    """Whatever a subclass does is its own business."""


@pytest.mark.parametrize("kind", ["subclass", "adafactor", "differentiable", "torch"])
@on_ranks(1)
def test_others_see_dtensors(rank: int, n_ranks: int, kind: str) -> None:
    import torch.distributed.fsdp as torch_fsdp

    import fsdp_c

    model = sharded_net(torch_fsdp if kind == "torch" else fsdp_c)
    sharded_net(fsdp_c)
    parameters = list(model.parameters())
    optimizer = {
        "subclass": lambda: Subclass(parameters),
        "adafactor": lambda: optim.Adafactor(parameters),
        "differentiable": lambda: optim.SGD(parameters, differentiable=True),
        "torch": lambda: optim.AdamW(parameters),
    }[kind]()
    total(model(data(rank))).backward()
    cls = optim.AdamW if kind == "subclass" else type(optimizer)
    with seen_types(cls) as types, contextlib.suppress(RuntimeError):
        optimizer.step()  # a leaf that requires grad cannot be changed where autograd records
    assert types == {"DTensor"}


def trained(fsdp_c: Any, rank: int, cls: type[optim.Optimizer]) -> optim.Optimizer:
    """One that has state and gradients for the next step."""
    model = sharded_net(fsdp_c)
    optimizer = cls(list(model.parameters()), lr=0.01)
    optimizer.kept_model = model
    for _ in range(2):
        optimizer.step()
        total(model(data(rank))).backward()
    return optimizer


@pytest.mark.parametrize("where", ["instance", "class"])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.RMSprop])
@on_ranks(1)
def test_other_steps_collect_dtensors(
    rank: int, n_ranks: int, cls: type[optim.Optimizer], where: str
) -> None:
    """A step that somebody put in finds the parameters, not stepped yet, when it collects them."""
    import fsdp_c

    optimizer = trained(fsdp_c, rank, cls)
    params = optimizer.param_groups[0]["params"]
    n_lists = {optim.AdamW: 6, optim.SGD: 3, optim.RMSprop: 6}[cls]
    lists: list[list[Any]] = [[] for _ in range(n_lists)]

    def step(self: Any) -> None:
        self._init_group(self.param_groups[0], *lists)

    before = [p.to_local().clone() for p in params]
    with mock.patch.object(cls if where == "class" else optimizer, "step", step):
        optimizer.step() if where == "class" else optimizer.step(optimizer)
    assert all(a is b for a, b in zip(lists[0], params, strict=True))
    assert all(torch.equal(p.to_local(), b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("part", ["adam", "_single_tensor_adam"])
@on_ranks(1)
def test_replaced_arithmetic_is_called(rank: int, n_ranks: int, part: str) -> None:
    import fsdp_c

    module = sys.modules[optim.Adam.__module__]
    optimizer = trained(fsdp_c, rank, optim.AdamW)
    original, seen = getattr(module, part), []

    @functools.wraps(original)
    def spy(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        seen.extend(params)
        return original(params, *args, **kwargs)

    with mock.patch.object(module, part, spy):
        optimizer.step()
    assert len(seen) == len(optimizer.param_groups[0]["params"])


class Counting(torch.Tensor):
    """Sees what is done with it."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(1)
def test_subclasses_beside_see_all_calls(rank: int, n_ranks: int) -> None:
    import fsdp_c

    model = sharded_net(fsdp_c)
    total(model(data(rank))).backward()

    def calls(*others: nn.Parameter) -> int:
        mine = nn.Parameter(torch.ones(3).as_subclass(Counting))
        mine.grad = torch.ones(3)
        optimizer = optim.RMSprop([*others, mine], lr=0.01, foreach=False)
        Counting.count = 0
        optimizer.step()
        return Counting.count

    assert calls() > 0
    assert calls(*model.parameters()) == calls()


def test_no_other_class_is_changed() -> None:
    from fsdp_c._optim import _step

    before = {cls: dict(vars(cls)) for cls in vars(optim).values() if isinstance(cls, type)}
    _step._install()
    changed = {
        cls for cls, fields in before.items() for key in fields if vars(cls)[key] != fields[key]
    }
    try:
        assert changed == set(_step.CLASSES) - {optim.AdamW}
    finally:
        _step.uninstall()
    assert all(dict(vars(cls)) == fields for cls, fields in before.items())


@on_ranks(4)
def test_two_dimensions_and_another_dim(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("replicate", "shard"))

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model.stem, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        models.shard_blocks(model, fsdp, mesh=mesh)

    train(Pair(Net, shard, optimizer=make("momentum"), tolerance=EXACT), rank)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(4)
def test_empty_shards(rank: int, n_ranks: int, name: str) -> None:
    pair = Pair(Tiny, models.shard_root, optimizer=make(name))
    pair.forward(data(rank))
    pair.backward()
    pair.optimize()


@pytest.mark.parametrize("name", ["adamw", "momentum", "rmsprop"])
@on_ranks(2)
def test_bfloat16_parameters(rank: int, n_ranks: int, name: str) -> None:
    def build() -> nn.Module:
        return Net(n_blocks=1).to(torch.bfloat16)

    pair = Pair(build, models.shard_blocks, optimizer=make(name), tolerance=EXACT)
    for step in range(3):
        pair.step(data(rank, step).bfloat16())
        pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(1)
def test_plain_parameters_beside(rank: int, n_ranks: int, name: str, foreach: bool) -> None:
    """One group of sharded and plain parameters: torch can step it one by one."""
    import fsdp_c

    ours, plain = sharded_net(fsdp_c), Net(n_blocks=1)
    twins = copy.deepcopy(plain)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), twins.parameters(), strict=True):
            b.copy_(a.to_local())
    mixed = make(name, foreach=foreach)([*ours.parameters(), *plain.parameters()])
    apart = [make(name, foreach=foreach)(model.parameters()) for model in (twins, plain)]
    copied = [p.detach().clone() for p in plain.parameters()]
    for step in range(2):
        for model in (ours, plain, twins):
            model.zero_grad()
            total(model(data(rank, step))).backward()
        mixed.step()
        apart[0].step()
        for a, b in zip(ours.parameters(), twins.parameters(), strict=True):
            assert torch.equal(a.to_local(), b)
    assert not any(map(torch.equal, copied, plain.parameters()))


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(1)
def test_after_an_error(rank: int, n_ranks: int, name: str) -> None:
    """What raises inside of step() leaves parameters and state as everyone knows them."""
    pair = Pair(lambda: Net(n_blocks=1), models.shard_blocks, optimizer=make(name))
    train(pair, rank, 2)
    pair.forward(data(rank))
    pair.backward()

    def closure() -> None:
        raise KeyError("closure")

    def fail(side: Side) -> None:
        with pytest.raises(KeyError):
            side.optimizer.step(closure)
        group = side.optimizer.param_groups[0]
        assert all(isinstance(p, DTensor) for p in group["params"])

    pair.do(fail)
    train(pair, rank, 2)


@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd"])
@on_ranks(2)
def test_gradients_laid_out_otherwise(rank: int, n_ranks: int, name: str) -> None:
    """A gradient that the user replicated is what DTensor makes of it."""
    pair = Pair(lambda: Net(n_blocks=1), models.shard_blocks, optimizer=make(name))
    pair.forward(data(rank))
    pair.backward()

    def replicate(side: Side) -> None:
        from torch.distributed.tensor import Replicate

        first = next(iter(side.shards.values()))
        first.grad = first.grad.redistribute(placements=[Replicate()])

    pair.do(replicate)
    pair.optimize()


@on_ranks(1)
def test_autograd_notices_the_update(rank: int, n_ranks: int) -> None:
    """A graph that needs the old parameter refuses to go back after a step."""
    pair = Pair(lambda: Net(n_blocks=1), models.shard_blocks, optimizer=make("sgd"))
    pair.forward(data(rank))
    pair.backward()

    def penalty(side: Side) -> str:
        loss = next(iter(side.shards.values())).pow(2).sum()
        side.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return "noticed"

    pair.both(penalty)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_copies_groups_and_missing_gradients(rank: int, n_ranks: int, name: str) -> None:
    """A deep copy of the optimizer, a group added late, gradients that are missing in a step."""
    pair = Pair(lambda: Net(n_blocks=2), models.shard_blocks, optimizer=None)

    def prepare(side: Side) -> None:
        side.optimizer = make(name)(list(side.shards.values())[:3])

    def extend(side: Side) -> None:
        side.optimizer.add_param_group({"params": list(side.shards.values())[3:], "lr": 0.1})

    def drop(side: Side) -> None:
        list(side.shards.values())[1].grad = None

    def resume(side: Side) -> Any:
        saved = side.optimizer.state_dict()
        side.optimizer = make(name)(list(side.shards.values())[:3])
        extend(side)
        side.optimizer.load_state_dict(saved)
        return copy.deepcopy(side.optimizer.state_dict())

    pair.do(prepare)
    train(pair, rank, 1)
    pair.do(extend)
    for step in range(3):
        pair.forward(data(rank, step))
        pair.backward()
        if step == 1:
            pair.do(drop)
        pair.optimize()
        pair.both(resume)


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.RMSprop])
def test_replaced_collecting_stays(cls: type[optim.Optimizer]) -> None:
    """A class in which somebody has put an `_init_group` of their own."""
    from fsdp_c._optim import _step

    owner = next(base for base in cls.__mro__ if "_init_group" in vars(base))
    _step.uninstall()

    @functools.wraps(vars(owner)["_init_group"])
    def spy(*args: Any) -> Any:
        return spy.__wrapped__(*args)

    try:
        with mock.patch.object(owner, "_init_group", spy):
            _step._install()
            assert vars(owner)["_init_group"] is spy
            _step.uninstall()
            assert vars(owner)["_init_group"] is spy
    finally:
        _step.uninstall()
