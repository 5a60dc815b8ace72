"""One rank alone on a device: forward uses its shards, and its gradients are autograd's own."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Net, data, tokens
from parity import Pair, Side, Tolerance, on_ranks
from test_device_memory import UNIT, allocations, step, two_units
from test_device_schedule import groups_of, is_on_device, shard_blocks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_c
from fsdp_c._comm import _device

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def is_resident(unit: nn.Module) -> bool:
    return all(group._core_is_resident for group in groups_of(unit))


def whole(side: Side) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in side.shards.values()]


def gradients(side: Side) -> list[Any]:
    found = [p.grad for p in side.shards.values()]
    return [None if grad is None else grad.to_local().clone() for grad in found]


def train(rank: int, number: int) -> Callable[[Side], torch.Tensor]:
    def run(side: Side) -> torch.Tensor:
        loss = side.model(data(rank, number)).square().mean()
        loss.backward()
        return loss.detach()

    return run


# Of parameters, what fully_shard is given, and whether shards are of the type that computes.
POLICIES: dict[str, tuple[torch.dtype, dict[str, Any], bool]] = {
    "float32": (F32, {}, True),
    "bfloat16": (BF16, {}, True),
    "cast": (F32, {"mp_policy": MixedPrecisionPolicy(BF16, F32)}, False),
    "summed wide": (BF16, {"mp_policy": MixedPrecisionPolicy(BF16, F32)}, True),
    "summed narrow": (F32, {"mp_policy": MixedPrecisionPolicy(None, BF16)}, True),
    "half": (F32, {"mp_policy": MixedPrecisionPolicy(F16, F16)}, False),
}
# torch divides sums of narrow types twice: as one rank's, and by what is left after the sum.
DIVIDED = [(policy, 3.0) for policy in POLICIES if policy not in ("summed narrow", "half")]


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize(("policy", "divisor"), [*((p, None) for p in POLICIES), *DIVIDED])
@on_ranks(1)
def test_equals_torch_in_each_precision(
    rank: int, n_ranks: int, policy: str, divisor: float | None, by_torch: bool
) -> None:
    """Bit for bit: rounded where torch rounds, with and without a gradient that is added to."""
    dtype, options, resides = POLICIES[policy]

    def divide(side: Side) -> None:
        for module in side.model.modules():
            if isinstance(module, side.fsdp.FSDPModule):
                module.set_gradient_divide_factor(divisor)

    def run(side: Side) -> torch.Tensor:
        loss = side.model(data(rank).to(dtype)).float().square().mean()
        loss.backward()
        return loss.detach()

    def build() -> nn.Module:
        return Net().to(dtype)

    with _device.on_cpu(by_torch):
        pair = Pair(build, shard_blocks(**options), tolerance=Tolerance(0, 0))
        if divisor is not None:
            pair.do(divide, "divide")
        for _ in range(3):
            pair.both(run, "first")
            pair.both(run, "second, on top")
            pair.both(gradients, "gradients")
            pair.optimize()
        assert is_on_device(pair)
        assert is_resident(pair.ours.model) == resides


@on_ranks(1)
def test_held_kept_and_missing_gradients(rank: int, n_ranks: int) -> None:
    kept: dict[Side, list[Any]] = {}

    def sync(is_synced: bool) -> Callable[[Side], None]:
        return lambda side: side.model.set_requires_gradient_sync(is_synced)

    def keep(side: Side) -> None:
        kept[side] = [p.grad for p in side.shards.values()]

    def look(side: Side) -> list[torch.Tensor]:
        return [grad.to_local().clone() for grad in kept[side]]

    def drop_one(side: Side) -> None:
        next(iter(side.shards.values())).grad = None

    def zero(side: Side) -> None:
        side.model.zero_grad(set_to_none=False)

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks(), tolerance=Tolerance(0, 0))
        pair.do(sync(False), "no sync")
        pair.both(train(rank, 0))
        pair.do(sync(True), "sync")
        pair.both(train(rank, 1))
        pair.do(keep, "keep gradients")
        pair.both(gradients)
        pair.optimize()
        pair.both(train(rank, 2))
        pair.both(look, "gradients that were kept are those of then")
        pair.do(drop_one, "one gradient less")
        pair.both(train(rank, 3))
        pair.both(gradients)
        pair.do(zero, "zeros")
        pair.both(train(rank, 4))
        pair.both(gradients)
        assert is_on_device(pair) and is_resident(pair.ours.model)


@on_ranks(1)
def test_hooks_see_reduced_gradients(rank: int, n_ranks: int) -> None:
    seen: dict[Side, list[torch.Tensor]] = {}

    def hook(side: Side) -> None:
        seen[side] = []
        for param in side.shards.values():
            param.register_post_accumulate_grad_hook(
                lambda p: seen[side].append(p.grad.to_local().clone())
            )

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks(), tolerance=Tolerance(0, 0))
        pair.do(hook, "hook")
        for number in range(2):
            pair.both(train(rank, number))
            pair.optimize()
        assert len(seen[pair.ours]) == 2 * len(list(pair.ours.model.parameters()))
        pair.both(lambda side: seen[side], "what hooks saw")


@on_ranks(1)
def test_a_gradient_that_a_hook_keeps_is_copied(rank: int, n_ranks: int) -> None:
    """Autograd's tensor has another owner: what is written to it stays there."""
    kept: dict[Side, list[torch.Tensor]] = {}

    def hook(side: Side) -> None:
        kept[side] = []
        side.model.register_forward_pre_hook(lambda *_: kept[side].clear())
        block = side.model.blocks[0]

        def watch(*_: Any) -> None:
            block.up.weight.register_hook(lambda grad: kept[side].append(grad))

        block.register_forward_pre_hook(watch)

    def spoil(side: Side) -> None:
        assert kept[side]
        for grad in kept[side]:
            grad.fill_(7.0)

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks(), tolerance=Tolerance(0, 0))
        pair.do(hook, "hook")
        pair.both(train(rank, 0))
        before = gradients(pair.ours)
        pair.do(spoil, "spoil")
        torch.testing.assert_close(gradients(pair.ours), before, rtol=0, atol=0)


# --- what is not moved ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(1)
def test_nothing_is_copied_and_no_memory_taken(rank: int, n_ranks: int, by_torch: bool) -> None:
    with _device.on_cpu(by_torch):
        model = two_units(n_ranks)
        step(model)
        with torch.no_grad():
            assert allocations(lambda: model(torch.ones(3, 256))) == []
        assert allocations(lambda: step(model)) == [UNIT, UNIT], "gradients, autograd's own"
        shards = [p.to_local().data_ptr() for p in model.parameters()]
        model[0].unshard()
        assert model[0].weight.data_ptr() == shards[0]
        model[0].reshard()
        assert is_resident(model)
        assert "used where" in str(fsdp_c.explain(model))


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(1)
def test_gradients_are_given_back_when_nobody_has_them(
    rank: int, n_ranks: int, in_backward: bool
) -> None:
    """As the next forward begins, or the backward, and not before: `zero_grad` tells nobody."""

    def storages(model: nn.Module) -> list[int]:
        return [p.grad.to_local().untyped_storage()._weak_ref() for p in model.parameters()]

    def are_gone(refs: list[int]) -> list[bool]:
        return [torch.UntypedStorage._expired(ref) for ref in refs]

    with _device.on_cpu():
        model = two_units(n_ranks)
        step(model)
        refs = storages(model)
        kept = model[1].weight.grad
        if in_backward:
            loss = model(torch.ones(3, 256)).sum()
            assert are_gone(refs) == [False, False]
            model.zero_grad()
            loss.backward()
        else:
            model.zero_grad()
            model(torch.ones(3, 256))
        assert are_gone(refs) == [True, False]
        assert kept.to_local().abs().sum() > 0


# --- who goes by the schedule ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "n_ranks", "is_nvidia", "expected"),
    [
        ("", 1, True, True),
        ("", 2, True, True),
        ("", 1, False, False),
        ("cuda", 2, True, True),
        ("none", 1, True, False),
        ("cpu", 1, True, False),
    ],
)
def test_nvidia_gpus_go_by_it_unasked(
    asked: str, n_ranks: int, is_nvidia: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_C_DEVICES", asked)
    monkeypatch.setattr(_device, "_is_nvidia", lambda device: is_nvidia)
    mesh = SimpleNamespace(size=lambda: n_ranks)
    group = SimpleNamespace(device=torch.device("cuda", 0), mesh_info=SimpleNamespace(mesh=mesh))
    assert _device.is_wanted(group) == expected


# --- what cannot stay there -----------------------------------------------------------------------


class Clamped(nn.Linear):
    """Writes to its own parameter in each forward, in a way that no version counter sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(1)
def test_units_that_write_to_their_parameters_are_copied(
    rank: int, n_ranks: int, reshard: bool, by_torch: bool
) -> None:
    """Their first forward shows it, on a copy: the shards never have such a write, and no warning
    tells of it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 6, max_norm=0.5), Clamped(6, 6), nn.Linear(6, 6))

    def shard(model: Any, fsdp: Any) -> None:
        for unit in (*model, model):
            fsdp.fully_shard(unit, reshard_after_forward=reshard)

    with _device.on_cpu(by_torch), warnings.catch_warnings():
        warnings.filterwarnings("error", "the unsharded parameter")
        pair = Pair(build, shard, tolerance=Tolerance(0, 0))
        for number in range(3):
            pair.step(tokens(rank, number))
            pair.eval_forward(tokens(rank, 5 + number))
        assert is_on_device(pair)
        assert [is_resident(unit) for unit in pair.ours.model] == [False, False, True]


class Scaled(nn.Module):
    """Writes to its own parameter, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.writes = self.goes_around_counter = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                (self.weight.data if self.goes_around_counter else self.weight).mul_(2)
        return x @ self.weight.detach()


@pytest.mark.parametrize("goes_around_counter", [False, True])
@on_ranks(1)
def test_a_late_write_stays_and_the_unit_is_copied_from_then_on(
    rank: int, n_ranks: int, goes_around_counter: bool
) -> None:
    """With a warning if torch's counter tells that it was one."""
    with _device.on_cpu():
        model = Scaled()
        model.goes_around_counter = goes_around_counter
        fsdp_c.fully_shard(model, mesh=cached_mesh((1,)), reshard_after_forward=True)
        x = torch.ones(1, 4)
        with torch.no_grad():
            model(x)
            model(x)
            assert is_resident(model), "a detached tensor has its counter"
            model.writes = True
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                model(x)
            assert ["'weight' of FSDP unit" in str(w.message) for w in told] == (
                [] if goes_around_counter else [True]
            )
            assert not is_resident(model)
            assert model.weight.to_local()[0, 0] == 2
            assert model(x)[0, 0] == 16
            model.writes = False
        assert model.weight.to_local()[0, 0] == 2, "lost with the copy, as on several ranks"
        assert model(x)[0, 0] == 8


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@on_ranks(1)
def test_what_stays_unsharded_moves_after_the_first_forward(
    rank: int, n_ranks: int, grad: bool, is_early: bool
) -> None:
    """If it was unsharded before, too."""
    with _device.on_cpu(), torch.set_grad_enabled(grad):
        model = two_units(n_ranks, reshard_after_forward=False)
        shards = list(model.parameters())
        if is_early:
            model[0].unshard()
        x = torch.ones(3, 256)
        out = model(x)
        assert [layer.weight.data_ptr() for layer in model] == [
            p.to_local().data_ptr() for p in shards
        ]
        assert torch.equal(model(x), out)
        assert is_resident(model)


@pytest.mark.parametrize("case", ["offload", "replaced"])
@on_ranks(1)
def test_shards_that_do_not_reside(rank: int, n_ranks: int, case: str) -> None:
    """Trained all the same."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if case == "offload" else {}

    def exchange(side: Side) -> None:
        for param in side.shards.values():
            param._local_tensor = param._local_tensor.clone()

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks(**options), tolerance=Tolerance(0, 0))
        pair.both(train(rank, 0))
        assert is_resident(pair.ours.model) == (case == "replaced")
        if case == "replaced":
            pair.do(exchange, "others")
        pair.both(train(rank, 1))
        pair.both(whole)
        pair.both(gradients)
        assert is_on_device(pair)


@on_ranks(2)
def test_replicas_of_whole_shards(rank: int, n_ranks: int) -> None:
    """Shards of a group of one: nothing is gathered, gradients are added up over the replicas."""
    with _device.on_cpu():
        mesh = cached_mesh((2, 1), ("replicate", "shard"))
        pair = Pair(Net, shard_blocks(mesh=mesh))
        for number in range(3):
            pair.step(data(rank, number))
        assert is_on_device(pair) and is_resident(pair.ours.model)
