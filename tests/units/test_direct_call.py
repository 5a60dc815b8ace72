"""Calls of sharded modules go around nn.Module's Python only while nobody would miss it."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules import module as module_file

import fsdp_c

SIDES = {"torch": torch.distributed.fsdp.fully_shard, "fsdp_c": fsdp_c.fully_shard}
NATIVE_CALL = "_call_impl"  # the function of nn.Module that runs hooks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.callers: list[str] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        self.callers.append(frame.f_back.f_code.co_name)
        return self.linear(x) * scale


class CallsItself(Layer):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().__call__(*args, **kwargs) + 1


class CallsOtherwise(Layer):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._call_impl(*args, **kwargs) + 2


class FindsOtherwise(Layer):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return (lambda x: found(x) + 3) if name == "forward" else found


def build(side: str, layer: type[Layer] = Layer, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer())
    for part in (*model, model):
        SIDES[side](part, **options)
    return model


def train(model: nn.Module) -> list[float]:
    out = model(torch.ones(2, 4, requires_grad=True))
    out.sum().backward()
    return [out.sum().item(), *(p.grad.full_tensor().sum().item() for p in model.parameters())]


def same(scenario: Callable[[str], Any]) -> Any:
    torchs, ours = scenario("torch"), scenario("fsdp_c")
    assert ours == torchs
    return ours


@on_ranks(1)
def test_direct(rank: int, n_ranks: int) -> None:
    """Between a module's forward and who called it stands no function of nn.Module."""
    model = build("fsdp_c")
    train(model)
    model[0](torch.ones(2, 4), scale=2.0)
    assert model[0].callers == ["forward", "test_direct"]
    # ... and a cast of inputs, which replaces the arguments, arrives
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = build("fsdp_c", mp_policy=policy)
    seen = []
    model[1].linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert model[1](x=torch.ones(2, 4)).dtype == torch.float32
    assert seen == [torch.bfloat16] and model[1].callers == ["test_direct"]


@contextlib.contextmanager
def global_hook(log: list[str]) -> Iterator[None]:
    handle = module_file.register_module_forward_hook(lambda m, *_: log.append(type(m).__name__))
    yield
    handle.remove()


@contextlib.contextmanager
def profiled(log: list[str]) -> Iterator[None]:
    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == NATIVE_CALL:
            log.append(type(frame.f_locals["self"]).__name__)

    sys.setprofile(note)
    yield
    sys.setprofile(None)


def patched(name: str) -> Callable[[list[str]], Any]:
    @contextlib.contextmanager
    def patch(log: list[str]) -> Iterator[None]:
        plain = getattr(nn.Module, name)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            log.append(type(self).__name__)
            return plain(self, *args, **kwargs)

        with mock.patch.object(nn.Module, name, call):
            yield

    return patch


WATCHERS = {
    "global hook": global_hook,
    "profile function": profiled,
    **{name: patched(name) for name in ("__call__", NATIVE_CALL)},
}


@on_ranks(1)
def test_watchers_see_the_calls(rank: int, n_ranks: int) -> None:
    """Who watches all modules sees the same calls as under torch, also after a direct one."""
    for name, watcher in WATCHERS.items():

        def scenario(side: str, watcher: Any = watcher) -> Any:
            model = build(side)
            figures = [train(model)]
            log: list[str] = []
            with watcher(log):
                figures.append(train(model))
            n_seen = len(log)
            figures.append(train(model))
            assert len(log) == n_seen
            return figures, log

        assert "FSDPLayer" in same(scenario)[1], name


@on_ranks(1)
def test_hooks_of_the_user(rank: int, n_ranks: int) -> None:
    def scenario(side: str) -> Any:
        model = build(side)
        log: list[str] = [str(train(model))]

        def note(name: str) -> Callable[..., None]:
            return lambda *args: log.append(f"{name} {len(args)}")

        handles = [
            model[0].register_forward_pre_hook(note("pre")),
            model[0].register_forward_pre_hook(note("first pre"), prepend=True, with_kwargs=True),
            model[0].register_forward_hook(note("post"), with_kwargs=True),
            model[1].register_full_backward_hook(note("backward")),
            model[1].register_full_backward_pre_hook(note("pre-backward")),
        ]
        log.append(str(train(model)))
        for handle in handles:
            handle.remove()
        n_seen = len(log)
        log.append(str(train(model)))
        assert len(log) == n_seen + 1
        return log

    assert len(same(scenario)) == 3 + 5


@on_ranks(1)
def test_replaced_parts_are_called(rank: int, n_ranks: int) -> None:
    def scenario(side: str) -> Any:
        model = build(side)
        figures = [train(model)]
        plain = model[0].forward
        model[0].forward = lambda x: plain(x, scale=3.0)
        figures.append(train(model))
        del model[0].forward
        impl = model[0]._call_impl
        model[0]._compiled_call_impl = lambda x: impl(x, scale=4.0)
        figures.append(train(model))
        model[0]._compiled_call_impl = None
        figures.append(train(model))
        return figures

    figures = same(scenario)
    assert len({row[0] for row in figures}) == 3
    for layer in (CallsItself, CallsOtherwise, FindsOtherwise):
        kinds = same(lambda side, layer=layer: train(build(side, layer)))
        assert kinds[0] != figures[0][0]


@on_ranks(1)
def test_errors_pass_through(rank: int, n_ranks: int) -> None:
    x = torch.ones(2, 4)
    mistakes = [((), {}), ((x,), {"unknown": 1}), ((x[:, :3],), {})]

    def scenario(side: str) -> Any:
        model = build(side)
        log: list[Any] = [train(model)]
        for args, kwargs in mistakes:
            with pytest.raises((TypeError, RuntimeError)) as caught:
                model[0](*args, **kwargs)
            log += [str(caught.value), train(model)]
        return log

    assert len(same(scenario)) == 7
