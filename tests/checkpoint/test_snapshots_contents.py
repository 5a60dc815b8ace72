"""What snapshots of one process hold: tensors, optimizers and options of many kinds."""

import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from one_process import LARGE, Net, by_step, leave, resumed, train, trained
from torch import nn, optim
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c
from fsdp_c._snapshots import _files


class WithMemory(optim.SGD):
    """An optimizer with state of its own."""

    n_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.n_steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n_steps": self.n_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_steps = state.pop("n_steps")
        super().load_state_dict(state)


class Kinds(nn.Module):
    """Tensors of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.image = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.short = nn.Parameter(torch.randn(5, 7).bfloat16())
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flags", torch.rand(9) > 0.5)
        self.register_buffer("numbers", torch.randint(99, (3, 5)).t())
        self.register_buffer("every_other", torch.randn(8)[::2])
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def test_tensors_of_many_kinds(tmp_path: Path) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    extra = {"position": [1, 2], "sparse": torch.eye(3).to_sparse(), "rng": generators[0]}
    model = Kinds(1)
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, folder=tmp_path, extra=extra) as snapshots,
    ):
        snapshots.resume()
        drawn = [torch.rand(3), random.random(), numpy.random.rand()]
        snapshots.take(7)
        drawn = [torch.rand(3), random.random(), numpy.random.rand()]
        raise ZeroDivisionError
    again = {"position": None, "sparse": None, "rng": generators[1]}
    other = Kinds(2)
    assert resumed(tmp_path, other, extra=again) == 7
    pairs = [*zip(model.parameters(), other.parameters(), strict=True)]
    pairs += [*zip(model.buffers(), other.buffers(), strict=True)]
    for one, two in pairs:
        assert torch.equal(one, two) and one.stride() == two.stride()
    assert again["position"] == [1, 2] and torch.equal(again["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(*(torch.rand(3, generator=generator) for generator in generators))
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == [random.random(), numpy.random.rand()]


def test_subclasses_that_can_be_taken_apart(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.Module()
        parts = torch.full((3, 2), 1.0 * value), torch.full((3, 2), value + 1.0)
        model.pair = nn.Parameter(TwoTensor(*parts))
        return model

    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(
            make(1), folder=tmp_path, extra={"pair": TwoTensor(torch.ones(2), torch.zeros(2))}
        ) as snapshots,
    ):
        snapshots.resume()
        snapshots.take(1)
        raise ZeroDivisionError
    model, extra = make(7), {"pair": None}
    assert resumed(tmp_path, model, extra=extra) == 1
    assert torch.equal(model.pair.a, torch.ones(3, 2)) and model.pair.b[0, 0] == 2
    found: Any = extra["pair"]
    assert type(found) is TwoTensor and found.a[0] == 1 and found.b[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_parts_of_subclasses_that_are_replaced(tmp_path: Path) -> None:
    """A quantized weight gets another scale: the weight is the same object."""
    model = nn.Module()
    model.pair = nn.Parameter(TwoTensor(torch.ones(3, 2), torch.ones(3, 2)))
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        snapshots.take(1)
        model.pair.b = torch.full((3, 2), 9.0)
        snapshots.take(2)
        raise ZeroDivisionError
    other = nn.Module()
    other.pair = nn.Parameter(TwoTensor(torch.zeros(3, 2), torch.zeros(3, 2)))
    assert resumed(tmp_path, other, ()) == 2
    assert torch.equal(other.pair.b, model.pair.b)


def test_state_that_pickle_takes(tmp_path: Path) -> None:
    """A tensor without memory of its own, written in place."""
    model, optimizer = trained(1)
    mask = torch.eye(3).to_sparse()
    optimizer.state[model.wide]["mask"] = mask
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        snapshots.take(1)
        mask.mul_(3)
        snapshots.take(2)
        raise ZeroDivisionError
    other, others = trained(0)
    assert resumed(tmp_path, other, others) == 2
    assert torch.equal(others.state[other.wide]["mask"].to_dense(), 3 * torch.eye(3))


def test_optimizers_with_state_of_their_own(tmp_path: Path) -> None:
    """State that is loaded has memory of its own, when the files are gone."""

    def make() -> tuple[Net, list[Any]]:
        model = Net()
        optimizers = [
            WithMemory([model.wide], lr=0.1, momentum=0.9),
            optim.Adam(model.layer.parameters(), lr=torch.tensor(0.1)),
        ]
        return model, optimizers

    def step(model: Net, optimizers: list[Any], n_steps: int) -> None:
        for _ in range(n_steps):
            model(torch.ones(2, 4)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, optimizers = make()
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, optimizers, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        step(model, optimizers, 2)
        snapshots.take(2)
        raise ZeroDivisionError
    other, others = make()
    step(other, others, 1)  # it is no matter what was there
    assert resumed(tmp_path, other, others) == 2
    assert others[0].n_steps == 2 and list(tmp_path.iterdir()) == []
    for net, by in ((model, optimizers), (other, others)):
        step(net, by, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class ByData:
    """No class of torch's; writes as many do, so that no version tells."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.moments = [torch.zeros_like(p) for p in self.params]

    def step(self) -> None:
        for param, moment in zip(self.params, self.moments, strict=True):
            moment.data.add_(1)
            param.data.add_(moment.data)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["moments"]


class Around(optim.Optimizer):
    """Looks like torch's and holds one: only the inner one has hooks."""

    def __init__(self, inner: ByData) -> None:
        self.inner = inner
        self.step = inner.step  # type: ignore[method-assign]

    @property
    def state(self) -> Any:
        return {i: {"moment": moment} for i, moment in enumerate(self.inner.moments)}

    @property
    def param_groups(self) -> Any:
        return [{"params": self.inner.params}]

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class NotYet:
    """A copier whose thread has not begun when its owner waits for it."""

    def __init__(self, copier: Any) -> None:
        self.copier = copier
        self.about: dict[str, Any] = {}

    def start(self, **about: Any) -> None:
        about["locals"] = [
            local.clone() if now else local
            for local, now in zip(about["locals"], about["now"], strict=True)
        ]
        about["sources"] = about["locals"]
        self.about = about

    def finish(self) -> list[int]:
        about, self.about = self.about, {}
        if about:
            self.copier.start(**about)
        return self.copier.finish()


@pytest.mark.parametrize("is_around", [False, True])
def test_optimizers_that_call_no_hooks(tmp_path: Path, is_around: bool) -> None:
    """Nothing that they write is read later."""

    def make() -> tuple[nn.Module, Any]:
        model = nn.Module()
        model.wide = nn.Parameter(torch.zeros(LARGE))
        optimizer = ByData(model.parameters())
        return model, Around(optimizer) if is_around else optimizer

    model, optimizer = make()
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        snapshots._taking.copier = NotYet(snapshots._taking.copier)
        optimizer.step()
        snapshots.take(1)
        optimizer.step()
        snapshots.finish()
        raise ZeroDivisionError
    other, others = make()
    assert resumed(tmp_path, other, others) == 1
    assert torch.equal(other.wide, torch.ones(LARGE))
    moments = others.state_dict()["moments"]
    assert all(torch.equal(moment, torch.ones(LARGE)) for moment in moments)


def test_compiled_steps_wait(tmp_path: Path) -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.zeros(LARGE))
    model.wide.grad = torch.ones(LARGE)
    optimizer = optim.SGD(model.parameters(), lr=1.0, foreach=True)
    step = torch.compile(optimizer.step, backend="eager")
    with fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots:
        snapshots.resume()
        snapshots._taking.copier = NotYet(snapshots._taking.copier)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Snapshots")
            for number in range(1, 4):
                step()
                snapshots.take(number)
            step()
        assert by_step(tmp_path).keys() == {2, 3}
        data, _ = _files.Slot(by_step(tmp_path)[3]).data()
        assert torch.equal(data[: 4 * LARGE].view(torch.float32), torch.full((LARGE,), -3.0))


class Slow:
    """A copier whose copy is not over before an update, or before it is clear that none comes."""

    def __init__(self, copier: Any, update: threading.Event) -> None:
        self.copier, self.update = copier, update
        self.is_awaited = threading.Event()
        self.is_too_late = False

    def start(self, **about: Any) -> None:
        self.copier.start(**about)

    def finish(self) -> list[int]:
        self.is_awaited.set()
        self.is_too_late |= self.update.wait(0.5)
        return self.copier.finish()


def test_steps_of_two_threads(tmp_path: Path) -> None:
    """Each waits for the copy, not only the one that comes first."""
    model, optimizer = trained(1)
    update = threading.Event()
    with fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots:
        snapshots.resume()
        snapshots._taking.copier = copier = Slow(snapshots._taking.copier, update)
        snapshots.take(1)
        first = threading.Thread(target=snapshots.finish)
        first.start()
        copier.is_awaited.wait()
        train(model, optimizer)
        update.set()
        first.join()
        assert not copier.is_too_late


def whole_after(folder: Path, longest_s: float) -> bool:
    """Whether a snapshot becomes whole while this thread runs Python code."""
    end = time.monotonic() + longest_s
    while time.monotonic() < end:
        if set(by_step(folder)) != {None}:
            return True
    return False


class Writing(TorchDispatchMode):
    """The copy begins when the memory is about to be written, and is over before the version says
    so: that comes when the operator has ended."""

    def __init__(self, folder: Path, copier: Any) -> None:
        super().__init__()
        self.folder, self.copier = folder, copier
        self.was_whole: list[bool] = []

    def start(self, **about: Any) -> None:
        self.about = about

    def finish(self) -> list[int]:
        return self.copier.finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copier.start(**self.about)
        found = func(*args, **(kwargs or {}))
        self.was_whole.append(whole_after(self.folder, 0.3))
        return found


def test_killed_while_a_parameter_is_written(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    snapshots.resume()
    snapshots._taking.copier = mode = Writing(tmp_path, snapshots._taking.copier)
    snapshots.take(1)
    with torch.no_grad(), mode:
        model.wide.normal_()
    assert mode.was_whole == [False]
    with pytest.warns(UserWarning, match="'wide' was written between take"):
        snapshots.finish()
    assert set(by_step(tmp_path)) == {None}
    snapshots.close()


def test_counts_before_the_next_update(tmp_path: Path) -> None:
    """A process that is killed in its backward goes on from the last step."""
    model, optimizer = trained(1)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    snapshots.resume()
    for step in range(1, 3):
        snapshots.take(step)
        assert whole_after(tmp_path, 60)
        train(model, optimizer)
        assert step in by_step(tmp_path)
    snapshots.close()


def test_taken_by_another_thread(tmp_path: Path) -> None:
    """Its writes are its own: it commits itself, before its next update."""
    model, optimizer = trained(1)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    snapshots.resume()
    found = []

    def body() -> None:
        snapshots.take(1)
        found.append(whole_after(tmp_path, 0.3))
        train(model, optimizer)
        found.append(whole_after(tmp_path, 0.3))

    thread = threading.Thread(target=body)
    thread.start()
    while thread.is_alive():  # this one runs Python code, too
        pass
    assert found == [False, True]
    snapshots.close()


@pytest.mark.parametrize("has_list", [False, True])
def test_options_and_parameters_that_change(tmp_path: Path, has_list: bool) -> None:
    """What is packed once is packed again when its objects are others, or change inside."""
    model, optimizer = trained(1)
    optimizer.param_groups[0]["notes"] = [1] if has_list else 1
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        for step in (1, 2, 3):
            snapshots.take(step)
        if has_list:
            optimizer.param_groups[0]["notes"].append(2)
        else:
            optimizer.param_groups[0]["lr"] = 0.5
            model.wide.data = model.wide.detach() * 2
            optimizer.state[model.wide]["exp_avg"] = torch.ones(LARGE)
        snapshots.take(4)
        raise ZeroDivisionError
    other, others = trained(0)
    assert resumed(tmp_path, other, others) == 4
    for key in ("notes", "lr"):
        assert others.param_groups[0][key] == optimizer.param_groups[0][key]
    assert torch.equal(other.wide, model.wide)
    pairs = others.state[other.wide]["exp_avg"], optimizer.state[model.wide]["exp_avg"]
    assert torch.equal(*pairs)


def set_data(model: nn.Module, convert: Any) -> None:
    for param in model.parameters():
        param.data = convert(param.data)


@pytest.mark.parametrize(
    "convert",
    [
        lambda data: data.contiguous(memory_format=torch.channels_last),
        lambda data: data.transpose(0, 1).contiguous().transpose(0, 1),
        lambda data: data.half(),
    ],
    ids=["channels last", "transposed", "dtype"],
)
def test_layouts_that_change_in_place(tmp_path: Path, convert: Any) -> None:
    """As `model.to` does it: the parameter is the same object, and takes as many bytes."""

    def make() -> nn.Module:
        model = nn.Module()
        model.image = nn.Parameter(torch.randn(4, 3, 5, 5).bfloat16())
        return model

    model = make()
    with (
        pytest.raises(ZeroDivisionError),
        fsdp_c.Snapshots(model, folder=tmp_path) as snapshots,
    ):
        snapshots.resume()
        snapshots.take(1)
        set_data(model, convert)
        snapshots.take(2)
        raise ZeroDivisionError
    other = make()
    set_data(other, convert)
    assert resumed(tmp_path, other, ()) == 2
    assert torch.equal(other.image, model.image)


def test_memory_is_what_is_planned(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2, numel=2_000_000)
    plan = fsdp_c.memory_plan(
        Net(numel=2_000_000), world_size=1, optimizer=optim.AdamW, snapshots=True
    )
    held = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert plan.rank["snapshots"] == pytest.approx(held, rel=0.01)
    assert "snapshots" in str(plan) and plan.rank_total > plan.rank["snapshots"]
