"""Adam and SGD in one pass over local tensors, with torch's bits; torch's code elsewhere."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import models
import pytest
import torch
from harness import cached_mesh
from models import Net, Odd, Tiny, data
from parity import EXACT, Pair, Side, compare, on_ranks, total
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "fused, a tensor as rate": {"fused": True, "lr": torch.tensor(0.01)},
}


@contextlib.contextmanager
def passes() -> Iterator[list[bool]]:
    """Collects whether groups were stepped in one pass."""
    from fsdp_c._optim import _step

    results: list[bool] = []

    def spy(step: Callable[..., bool]) -> Callable[..., bool]:
        def call(*args: Any) -> bool:
            results.append(step(*args))
            return results[-1]

        return call

    steps = {cls: spy(step) for cls, step in _step._STEPS.items()}
    with mock.patch.dict(_step._STEPS, steps):
        yield results


def make(cls: type[optim.Optimizer] = optim.AdamW, **options: Any) -> Callable[..., Any]:
    return lambda params: cls(list(params), **{"lr": 0.01, **options})


def train(pair: Pair, rank: int, n_steps: int = 3) -> list[bool]:
    """Steps both sides; says which steps of ours took the pass, but the first that makes state."""
    with passes() as results:
        for step in range(n_steps):
            pair.step(data(rank, step))
            pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")
    return results[1:]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_bits(rank: int, n_ranks: int, kind: str) -> None:
    for cls in (optim.AdamW, optim.Adam):
        for options in (
            {},
            {"weight_decay": 0.1, "betas": (0.3, 0.8), "eps": 1e-3},
            {"amsgrad": True},
            {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
        ):
            optimizer = make(cls, **options, **KINDS[kind])
            pair = Pair(Odd, models.shard_root, optimizer=optimizer, tolerance=EXACT)
            results = train(pair, rank)
            assert results == [True] * len(results) and results


def use_compile() -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@on_ranks(2, apart=True)
def test_beside_torch_compile(rank: int, n_ranks: int, is_first: bool) -> None:
    """Which wraps a method of all optimizers when it is used for the first time."""
    if is_first:
        use_compile()
    pair = Pair(Tiny, models.shard_root, optimizer=make())
    assert all(train(pair, rank))
    use_compile()
    assert all(train(pair, rank)), "from torch.compile on"
    for cls in (optim.RMSprop, optim.SGD):  # whose lists get local tensors
        Pair(Tiny, models.shard_root, optimizer=make(cls)).step(data(rank))


@pytest.mark.parametrize("kernels", ["ref", "avx2", "avx512"])
@on_ranks(1)
def test_bits_with_any_kernels(rank: int, n_ranks: int, kernels: str) -> None:
    """Where none of their square roots is torch's, torch's operator takes them."""
    from fsdp_c._native import _C

    in_use = _C.kernels()
    if not _C.use_kernels(kernels):
        pytest.skip("this CPU lacks them")
    try:
        pair = Pair(Odd, models.shard_root, optimizer=make(weight_decay=0.1), tolerance=EXACT)
        assert all(train(pair, rank))
    finally:
        _C.use_kernels(in_use)


# The smallest exponents, with numbers that have fewer digits; around 1; the largest.
@pytest.mark.parametrize("exponent", [0, 126, 252])
def test_square_roots_are_torchs(exponent: int) -> None:
    """Every number of two exponents in turn: as far as a step shows which root it took."""
    from fsdp_c._native import _C

    bits = torch.arange(exponent << 23, (exponent + 2) << 23, dtype=torch.int32)
    squares = bits.view(torch.float32)
    for exp_avg in (1.0, 1.4):
        param, averages = torch.zeros_like(squares), torch.full_like(squares, exp_avg)
        param.grad = torch.zeros_like(squares)
        state = {"step": torch.tensor(999.0), "exp_avg": averages * 2, "exp_avg_sq": squares * 2}
        plan = _C.Params(params=[param], sharded={id(param)})
        # Both averages are halved; what is left is their quotient.
        options = {"lr": -1.0, "beta1": 0.5, "beta2": 0.5, "eps": 0.0, "weight_decay": 0.0}
        kind = {"decoupled_weight_decay": True, "amsgrad": False, "maximize": False}
        assert plan.step_adam(state={param: state}, **options, **kind, fused_lanes=0)
        assert torch.equal(param, averages / squares.sqrt())


@pytest.mark.parametrize("kind", ["default", "foreach"])
@on_ranks(1, 2)
def test_bits_of_sgd(rank: int, n_ranks: int, kind: str) -> None:
    for options in (
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.5, "nesterov": kind == "default"},
        {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    ):
        optimizer = make(optim.SGD, **options, **KINDS[kind])
        pair = Pair(Odd, models.shard_root, optimizer=optimizer, tolerance=EXACT)
        results = train(pair, rank)
        assert results == [True] * len(results) and results


SGD_OPTIONS = (
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
)
ADAM_OPTIONS = (
    {},
    {"weight_decay": 0.1},
    {"betas": (0.3, 0.8), "eps": 1e-3},
    {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
)


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adam, optim.SGD])
@on_ranks(1)
def test_fused_steps_of_every_length(rank: int, n_ranks: int, cls: type[optim.Optimizer]) -> None:
    """Beside plain tensors: torch's kernels round otherwise after their last whole vector."""
    import fsdp_c

    for options in SGD_OPTIONS if cls is optim.SGD else ADAM_OPTIONS:
        model = nn.ParameterList(torch.randn(numel) for numel in range(1, 101))
        plain = [p.detach().clone() for p in model]
        fsdp_c.fully_shard(model)
        ours = make(cls, fused=True, **options)(model)
        theirs = make(cls, fused=True, **options)(plain)
        with passes() as results:
            for _ in range(3):
                for sharded, whole in zip(model, plain, strict=True):
                    sharded.grad = torch.randn_like(sharded)
                    whole.grad = sharded.grad.to_local().clone()
                ours.step()
                theirs.step()
                for sharded, whole in zip(model, plain, strict=True):
                    compare(sharded.detach().to_local(), whole, EXACT, "parameter")
                    for key, value in theirs.state[whole].items():
                        compare(whole_of(ours.state[sharded][key]), value, EXACT, key)
        # The first step makes the state, where there is any.
        assert results == [cls is optim.SGD and "momentum" not in options, True, True]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("has_unscaled", [True, False])
@on_ranks(1, 2)
def test_scaler_beside_fused_steps(rank: int, n_ranks: int, has_unscaled: bool) -> None:
    """The step itself leaves out gradients that are not finite."""
    pair = Pair(Tiny, models.shard_root, optimizer=make(fused=True), tolerance=EXACT)
    for side in (pair.theirs, pair.ours):
        side.kept = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(side: Side, x: torch.Tensor) -> float:
        scaler = side.kept
        scaler.scale(total(side.model(x))).backward()
        if has_unscaled:
            scaler.unscale_(side.optimizer)
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
        return scaler.get_scale()

    for index in range(4):
        x = data(rank, index)
        if index == 2 and rank == n_ranks - 1:
            x[0] = math.inf
        pair.both(functools.partial(step, x=x), "scaled step")
        pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
def test_trial_is_nobodys_step(cls: type[optim.Optimizer]) -> None:
    """Hooks of all optimizers do not see it, and it does not depend on the caller's modes."""
    from fsdp_c._optim import _step

    agrees = _step._sgd_agrees if cls is optim.SGD else _step._agrees
    usual, seen = [_step._lanes(agrees, is_fused) for is_fused in (False, True)], []
    _step._lanes.cache_clear()
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        with torch.inference_mode():
            assert [_step._lanes(agrees, is_fused) for is_fused in (False, True)] == usual
    finally:
        hook.remove()
    assert not seen and None not in usual


@on_ranks(4)
def test_replicas_and_empty_shards(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    shard = functools.partial(models.shard_blocks, mesh=mesh)
    for build, how in ((Net, shard), (Tiny, models.shard_root)):
        pair = Pair(build, how, optimizer=make(weight_decay=0.1))
        assert all(train(pair, rank))


@on_ranks(2)
def test_groups_and_what_changes_between_steps(rank: int, n_ranks: int) -> None:
    """Decay and no decay, a schedule, missing gradients, loaded state, a group added late."""

    def groups(params: Any) -> optim.Optimizer:
        params = list(params)
        decayed = [p for p in params if p.ndim > 1]
        plain = [p for p in params if p.ndim <= 1]
        return optim.AdamW([{"params": decayed}, {"params": plain[1:], "weight_decay": 0.0}])

    pair = Pair(Net, models.shard_blocks, optimizer=groups, tolerance=EXACT)
    assert any(train(pair, rank, 2))

    def change(side: Side) -> None:
        side.optimizer.param_groups[0]["lr"] = 0.003
        missing = side.optimizer.param_groups[0]["params"].pop()
        side.optimizer.add_param_group({"params": [missing], "betas": (0.5, 0.7)})
        side.optimizer.load_state_dict(side.optimizer.state_dict())

    pair.do(change)
    with passes() as results:
        for step in range(3):
            pair.forward(data(rank, step))
            pair.backward()
            if step == 1:
                pair.do(lambda side: setattr(next(iter(side.shards.values())), "grad", None))
            pair.optimize()
            pair.both(lambda side: side.optimizer.state_dict(), "optimizer state")
    # Three groups; their state was all there.
    assert results == [True] * 9


class Watch(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watch.count += 1
        return func(*args, **(kwargs or {}))


class Listen(TorchFunctionMode):
    """The same of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watch.count += 1
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_where_torch_has_to_step(rank: int, n_ranks: int) -> None:
    """Each of these is torch's own arithmetic; results are torch's all the same."""
    for options in (
        {"lr": torch.tensor(0.01)},
        {"cls": optim.SGD, "momentum": 0.9, "nesterov": True, "foreach": True},
        {"cls": optim.SGD, "momentum": 0.9, "lr": torch.tensor(0.01)},
    ):
        pair = Pair(Tiny, models.shard_root, optimizer=make(**options), tolerance=EXACT)
        assert not any(train(pair, rank)), options
    pair = Pair(Tiny, models.shard_root, optimizer=make(), tolerance=EXACT)
    train(pair, rank, 2)
    pair.forward(data(rank))
    pair.backward()

    def watched(side: Side) -> None:
        for mode in (Watch(), Listen()):
            Watch.count = 0
            with mode:
                side.optimizer.step()
            assert Watch.count > len(side.shards)

    with passes() as results:
        pair.do(watched)
        assert results == [False, False]
        with torch.device("cpu"):  # a mode too
            pair.do(lambda side: side.optimizer.step())
    assert results == [False, False, True]


@on_ranks(1)
def test_refused_rows_touch_nothing(rank: int, n_ranks: int) -> None:
    """One row that cannot be stepped here leaves the whole group to torch, before any write."""
    import fsdp_c

    model = Net(n_blocks=1)
    models.shard_blocks(model, fsdp_c)
    optimizer = make(amsgrad=True)(model.parameters())
    for _ in range(2):
        total(model(data(rank))).backward()
        optimizer.step()
    params = optimizer.param_groups[0]["params"]
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "fused_lanes": 0}
    options |= {"decoupled_weight_decay": True, "amsgrad": True, "maximize": False}
    from fsdp_c._native import _C

    def attempt(break_it: Callable[[], None], mend: Callable[[], None]) -> None:
        plan = _C.Params(params=params, sharded=set(map(id, params)))
        copies = [p.to_local().clone() for p in params]
        steps = [optimizer.state[p]["step"].item() for p in params]
        break_it()
        assert not plan.step_adam(state=optimizer.state, lr=0.1, **options)
        mend()
        assert all(torch.equal(p.to_local(), copy) for p, copy in zip(params, copies, strict=True))
        assert steps == [optimizer.state[p]["step"].item() for p in params]
        assert plan.step_adam(state=optimizer.state, lr=0.0, **options)

    last = params[-1]
    state = optimizer.state[last]
    kept = dict(state)
    for key in ("exp_avg", "max_exp_avg_sq"):
        attempt(lambda: state.pop(key), lambda: state.update(kept))
    for key in ("exp_avg", "max_exp_avg_sq", "step"):
        attempt(lambda: state.update({key: kept[key].double()}), lambda: state.update(kept))
    attempt(lambda: optimizer.state.pop(last), lambda: optimizer.state.update({last: state}))
    plan = _C.Params(params=params, sharded=set(map(id, params)))
    assert plan.is_for(params) and not plan.is_for(params[:-1]) and not plan.is_for(params[::-1])


@on_ranks(1)
def test_versions_count(rank: int, n_ranks: int) -> None:
    """Autograd sees that parameters and state were written."""
    import fsdp_c

    model = Net(n_blocks=1)
    models.shard_blocks(model, fsdp_c)
    optimizer = make()(model.parameters())

    def versions() -> list[int]:
        state = [v for s in optimizer.state.values() for v in s.values()]
        tensors = [*model.parameters(), *state]
        tensors += [t.to_local() for t in tensors if isinstance(t, DTensor)]
        return [t._version for t in tensors]

    for step in range(3):
        total(model(data(rank))).backward()
        before = versions()
        with passes() as results:
            optimizer.step()
        if step > 0:
            assert results == [True]
            assert all(a > b for a, b in zip(versions(), before, strict=True))
