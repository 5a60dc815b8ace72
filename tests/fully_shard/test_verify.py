"""The self-check of a model's first steps: silent where all is well; planted errors are found."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import Net, data, shard_blocks
from torch import nn
from torch.distributed.tensor import Shard

import fsdp_c
from fsdp_c._fully_shard import _verify

WAYS = {
    "shared memory": {},
    "messages": {"FSDP_C_TRANSPORT": "callback"},
    "device": {"FSDP_C_DEVICES": "cpu"},
}


def make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, fsdp_c, **options)
    return model


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    model(data(rank, number)).square().mean().backward()


def road(model: nn.Module) -> set[str]:
    return {row.road.split()[0].strip(":") for row in fsdp_c.explain(model).units}


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The parameters that were compared."""
    names: list[str] = []
    compare = _verify.compare

    def count(seen: Any) -> list[str]:
        names.append(seen.name)
        return compare(seen)

    with mock.patch.object(_verify, "compare", count):
        yield names


def check_good(rank: int, n_ranks: int) -> None:
    policy = fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    meshes = {"": {}, "bf16": {"mp_policy": policy}, "stays": {"reshard_after_forward": False}}
    if n_ranks == 4:
        meshes["hsdp"] = {"mesh": cached_mesh((2, 2), ("replicate", "shard"))}
    for name, options in meshes.items():
        model = make(**options)
        n_params = len(list(model.parameters()))
        with counted() as names:
            step(model, rank)
            step(model, rank, 1)  # adds to the gradients
            assert len(names) == 2 * n_params, (name, names)
            model.zero_grad()
            step(model, rank, 2)
            assert len(names) == 2 * n_params, "it has ended"
        assert "torch" not in road(model), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_right_steps_pass(n_ranks: int, way: str) -> None:
    run_ranks(check_good, n_ranks, env={"FSDP_C_VERIFY": "2", **WAYS[way]})


class Unusual(nn.Module):
    """A scalar, fewer rows than ranks, no elements, other strides, complex numbers, other dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.columns = nn.Parameter(torch.randn(6, 4).t())
        self.kernel = nn.Parameter(
            torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        )
        self.modes = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [p.abs().sum() * (i + 1) for i, p in enumerate(self.parameters())]
        return torch.stack(parts) * x.mean()


def check_unusual(rank: int, n_ranks: int) -> None:
    for place in (None, lambda param: Shard(1) if param.shape == (3, 4) else None):
        torch.manual_seed(0)
        model = Unusual()
        fsdp_c.fully_shard(model, shard_placement_fn=place)
        with counted() as names:
            step(model, rank)
            step(model, rank, 1)
        assert len(names) == 2 * len(list(model.parameters()))
        assert "torch" not in road(model)


@pytest.mark.parametrize("way", WAYS)
def test_unusual_parameters(way: str) -> None:
    run_ranks(check_unusual, 2, env={"FSDP_C_VERIFY": "2", **WAYS[way]})


def check_cast(rank: int, n_ranks: int) -> None:
    """A cast output tells of a backward before the root has queued its end."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fsdp_c.fully_shard(block)
    fsdp_c.fully_shard(model, mp_policy=fsdp_c.MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with counted() as names:
        outputs = [model(data(rank, number)) for number in range(2)]
        for number, output in enumerate(reversed(outputs)):
            output.square().mean().backward()
            assert len(names) == (number + 1) * len(list(model.parameters()))
    assert "torch" not in road(model)


@pytest.mark.parametrize("way", WAYS)
def test_cast_outputs(way: str) -> None:
    run_ranks(check_cast, 2, env={"FSDP_C_VERIFY": "2", **WAYS[way]})


def check_held(rank: int, n_ranks: int) -> None:
    """Gradients that are held are compared when they are reduced, with those of all backwards."""
    model: Any = make()
    with counted() as names:
        model.set_requires_gradient_sync(False)
        for number in range(3):
            step(model, rank, number)
        assert not names
        model.set_requires_gradient_sync(True)
        step(model, rank, 3)
        assert len(names) == len(list(model.parameters()))
    assert "torch" not in road(model)


def test_held_gradients() -> None:
    run_ranks(check_held, 2, env={"FSDP_C_VERIFY": "2"})


def check_halves(rank: int, n_ranks: int) -> None:
    """Sums of float16 that round to multiples of its least number, and sums that overflow."""
    policy = fsdp_c.MixedPrecisionPolicy(param_dtype=torch.float16)
    for scale in (1e-7, 1e-5, 1e-3, 1.0, 1e4, 1e5):
        model = make(mp_policy=policy)
        with counted() as names:
            (model(data(0, 0)).float().square().mean() * scale).backward()
        assert len(names) == len(list(model.parameters()))
        assert "torch" not in road(model), scale


@pytest.mark.parametrize("way", WAYS)
def test_float16_rounds_and_overflows(way: str) -> None:
    run_ranks(check_halves, 2, env={"FSDP_C_VERIFY": "1", **WAYS[way]})


def spoil_gathered(model: Any, rank: int) -> None:
    """One element of what one rank gathered: a wrong offset, a missing wait, a stale shard."""

    def spoil(module: Any, *_: Any) -> None:
        if rank == 1:
            with torch.no_grad():
                module.up.weight.data.view(-1)[3] *= 1.5

    model.blocks[1].register_forward_pre_hook(spoil)


def spoil_frozen(model: Any, rank: int) -> None:
    """What backward gathers of a unit in which no gradient tells of it."""
    model.blocks[1].requires_grad_(False)

    def spoil(grad: Any) -> None:
        if rank == 1:
            with torch.no_grad():
                model.blocks[1].up.weight.data.view(-1)[3] *= 1.5

    def await_backward(module: Any, inputs: Any, output: Any) -> None:
        output.register_hook(spoil)

    model.blocks[1].register_forward_hook(await_backward)


def before_comparing(model: Any, plant: Callable[[Any], None]) -> None:
    """Between the reduction and the check."""
    compare = _verify._compare_gradient
    chosen = model.blocks[0].up.weight

    def compare_spoilt(seen: Any) -> str:
        if seen.param.sharded_param is chosen:
            plant(chosen)
        return compare(seen)

    mock.patch.object(_verify, "_compare_gradient", compare_spoilt).start()


def spoil_gradient(model: Any, rank: int) -> None:
    """A sum to which a rank's part was not added."""

    def spoil(shard: Any) -> None:
        if rank == 0:
            shard.grad._local_tensor.view(-1)[-1] *= 0.5

    before_comparing(model, spoil)


def lose_nan(model: Any, rank: int) -> None:
    """That one rank's gradient has."""

    def lose(shard: Any) -> None:
        shard.grad._local_tensor.fill_(0.5)

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        output.register_hook(lambda grad: grad * torch.nan)

    if rank == 1:
        model.blocks[0].up.register_forward_hook(spoil)
    before_comparing(model, lose)


def lose_gradient(model: Any, rank: int) -> None:
    def lose(shard: Any) -> None:
        shard.grad = None

    before_comparing(model, lose)


PLANTED: dict[Callable[[Any, int], None], str] = {
    spoil_gathered: "up.*of unit blocks.1 was gathered with other bits",
    spoil_frozen: "up.*of unit blocks.1 was gathered with other bits",
    lose_nan: "reduced gradient of parameter .*weight of unit blocks.0 is .* sum is nan",
    spoil_gradient: "reduced gradient of parameter .*weight of unit blocks.0 is .* where a",
    lose_gradient: "the gradient of parameter .*weight of unit blocks.0 was lost",
}


IN_BFLOAT16 = (spoil_gathered, spoil_frozen)


def find_planted(rank: int, n_ranks: int, plant: Callable[[Any, int], None]) -> str:
    # In bfloat16 what was gathered is not the memory of the shards.
    policy = fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = make(mp_policy=policy if plant in IN_BFLOAT16 else fsdp_c.MixedPrecisionPolicy())
    plant(model, rank)
    with pytest.raises(RuntimeError) as caught:
        step(model, rank)
    mock.patch.stopall()
    model.zero_grad()
    assert road(model) == {"torch"}, road(model)
    step(model, rank)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_errors_are_found_on_all_ranks(plant: Callable[[Any, int], None], way: str) -> None:
    env = {"FSDP_C_VERIFY": "1", **WAYS[way]}
    for text in run_ranks(find_planted, 2, plant, env=env):
        assert re.search(PLANTED[plant], text), text


def find_among_many(rank: int, n_ranks: int) -> str:
    """A lost sum of many gradients in bfloat16, whose roundings add up."""
    model: Any = make(mp_policy=fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before_comparing(model, lambda shard: shard.grad._local_tensor.zero_())
    model.set_requires_gradient_sync(False)
    for number in range(31):
        step(model, rank, number)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError) as caught:
        step(model, rank, 31)
    mock.patch.stopall()
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_sum_of_many_is_found(way: str) -> None:
    for text in run_ranks(find_among_many, 2, env={"FSDP_C_VERIFY": "1", **WAYS[way]}):
        assert "weight of unit blocks.0 is 0 where" in text, text


def test_several_gpus_are_checked_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_C_VERIFY", raising=False)

    def group(kind: str, n_ranks: int) -> Any:
        mesh = mock.Mock(size=lambda: n_ranks)
        return mock.Mock(device=torch.device(kind), mesh_info=mock.Mock(mesh=mesh))

    assert _verify.steps_for([group("cuda", 2)]) == 1
    assert _verify.steps_for([group("cuda", 1)]) == 0
    assert _verify.steps_for([group("cpu", 2)]) == 0
    monkeypatch.setenv("FSDP_C_VERIFY", "3")
    assert _verify.steps_for([group("cpu", 1)]) == 3


def differ_in_sync(rank: int, n_ranks: int) -> str:
    model: Any = make()
    model.set_requires_gradient_sync(rank == 0)
    with pytest.raises(RuntimeError) as caught:
        step(model, rank)
        step(model, rank)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ_are_told_so_by_the_core(way: str) -> None:
    """Not by a plain collective that only one of them calls."""
    env = {"FSDP_C_VERIFY": "1", **WAYS[way]}
    for text in run_ranks(differ_in_sync, 2, apart=True, env=env, timeout=30):
        assert "rank 1" in text and "set_requires_gradient_sync" in text, text
