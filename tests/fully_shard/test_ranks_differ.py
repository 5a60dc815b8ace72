"""Ranks that do different things in one step get the mean gradients, zeros from who skipped.

Torch hangs, aborts or mixes gradients up here, so an unsharded model with every rank's loss is the
reference.
"""

import functools
import itertools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import Branches, data
from parity import Plain, Side, Tolerance, on_ranks, sgd, total
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# Blocks that each rank uses, by step; rank r of more ranks than listed takes entry r modulo their
# number.
PLANS = {
    "one rank only": [[(0, 1), (0,)], [(2,), (2, 1)]],
    "nobody": [[(0,), (0,)], [(1, 2), (1, 2)]],
    "other order": [[(0, 1, 2), (2, 1, 0)], [(1, 0, 2), (0, 2, 1)]],
    "disjoint": [[(0,), (1,)], [(2, 1), (0,)]],
    "twice on one": [[(0, 0, 1), (0, 1)], [(1,), (2, 2, 1)]],
    "none on one": [[(0, 1, 2), ()], [(), (0, 1, 2)]],
}


def make(build: Callable[[], nn.Module], shard: Callable[..., None]) -> Side:
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        pytest.skip("torch fails here")
    return Side("tested", fsdp, build, shard, sgd)


def tolerance() -> Tolerance:
    # Ranks' losses are added to one graph after the other in the reference, and in rank order by
    # the sharded model.
    return Tolerance(relative=1e-5, scaled=1e-5)


@pytest.mark.parametrize("sharding", ["shard_blocks", "shard_root", "shard_deep"])
@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2, 3)
def test_units_differ(rank: int, n_ranks: int, plan: str, sharding: str) -> None:
    side = make(Branches, getattr(models, sharding))
    plain = Plain(Branches)
    for step, uses in enumerate(PLANS[plan] * 2):
        use = [uses[r % len(uses)] for r in range(n_ranks)]
        total(side.model(data(rank, step), use=use[rank])).backward()
        plain.backward(
            [total(plain.model(data(r, step), use=use[r])) for r in range(n_ranks)], n_ranks
        )
        plain.check(side, tolerance())
        for optimizer in (side.optimizer, plain.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    plain.check(side, tolerance())


class Choosy(nn.Module):
    """One unit whose parameters are used by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(5, 3))
        self.c = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = x + getattr(self, name).sum() * x
        return x


@pytest.mark.parametrize("names", [("a", "b"), ("ab", "a"), ("c", "abc"), ("a", ""), ("", "b")])
@on_ranks(2, 3, 4)
def test_parameters_differ(rank: int, n_ranks: int, names: tuple[str, str]) -> None:
    """Sets of equal size too, where sums by position would mix two parameters."""
    side = make(Choosy, models.shard_root)
    plain = Plain(Choosy)
    for step in range(2):

        def loss(model: nn.Module, r: int, step: int = step) -> Tensor:
            x = data(r, step).requires_grad_()
            return total(model(x, names[(r + step) % 2]))

        loss(side.model, rank).backward()
        plain.backward([loss(plain.model, r) for r in range(n_ranks)], n_ranks)
        plain.check(side, tolerance())
        for optimizer in (side.optimizer, plain.optimizer):
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, 3)
def test_accumulated_micro_batches_differ(rank: int, n_ranks: int) -> None:
    """Without synchronisation ranks may use what they like; the last micro-batch brings all
    together.
    """
    side = make(Branches, models.shard_blocks)
    plain = Plain(Branches)
    uses = [[(0,), (1, 2)], [(1,), (0,)], [(2,), (2, 0)]]
    for micro, use in enumerate(uses):
        side.model.set_requires_gradient_sync(micro == len(uses) - 1)
        total(side.model(data(rank, micro), use=use[rank % 2])).backward()
        losses = [total(plain.model(data(r, micro), use=use[r % 2])) for r in range(n_ranks)]
        plain.backward(losses, n_ranks)
    plain.check(side, tolerance())


@on_ranks(2, 3)
def test_frozen_on_all_after_some_have_used_it(rank: int, n_ranks: int) -> None:
    """Who has no gradient of it is not taken for one that has frozen it alone."""
    side = make(Choosy, models.shard_root)
    plain = Plain(Choosy)
    for micro, names in enumerate([("ab", "b"), ("ab", "ab")]):
        side.model.set_requires_gradient_sync(micro == 1)
        for model in (side.model, plain.model):
            model.a.requires_grad_(micro == 0)
        total(side.model(data(rank, micro), names[rank % 2])).backward()
        losses = [total(plain.model(data(r, micro), names[r % 2])) for r in range(n_ranks)]
        plain.backward(losses, n_ranks)
    assert side.model.a.grad is not None
    plain.check(side, tolerance())


class TwoMeshes(nn.Module):
    """Units so large that a rank cannot post three of a mesh before the other has read one."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(850, 850, bias=False) for _ in range(6))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for index in use:
            x = self.units[index](x)
        return x


@functools.cache
def other_mesh() -> DeviceMesh:
    """Over the same ranks, in a process group of its own."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def shard_two_meshes(model: nn.Module, fsdp: Any) -> None:
    meshes = [harness.cached_mesh((dist.get_world_size(),)), other_mesh()]
    for index, unit in enumerate(model.units):
        fsdp.fully_shard(unit, mesh=meshes[index // 3])
    fsdp.fully_shard(model, mesh=meshes[0])


@on_ranks(2, timeout=20)
def test_meshes_in_different_orders(rank: int, n_ranks: int) -> None:
    """A rank that waits in one mesh does not keep the other from going on in another."""
    side = make(TwoMeshes, shard_two_meshes)
    plain = Plain(TwoMeshes)
    for step, use in enumerate(
        [((0, 1, 2, 3, 4, 5), (3, 4, 5, 0, 1, 2)), ((0,), (5, 3, 4)), ((3,), (2, 1, 0))]
    ):
        loss = side.model(data(rank, step, 2, 850), use=use[rank]).square().mean()
        loss.backward()
        losses = [plain.model(data(r, step, 2, 850), use=use[r]).square().mean() for r in range(2)]
        plain.backward(losses, 2)
        plain.check(side, tolerance())
        for one in (side.model, plain.model):
            one.zero_grad()


def skip_a_unit(rank: int, n_ranks: int) -> str:
    fsdp = harness.implementation()
    group = dist.new_group(timeout=timedelta(seconds=1))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Branches()
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError if rank else TimeoutError) as caught:
        model(data(rank), use=(0, 1) if rank == 0 else ())
        dist.barrier(group)  # which rank 0 does not come to
    return str(caught.value)


def test_skipped_unit_over_a_process_group() -> None:
    """Who waits says for which unit, once the group's time is over."""
    answers = harness.run_ranks(skip_a_unit, 2, apart=True, env={"FSDP_C_TRANSPORT": "callback"})
    assert "while rank 0 waited for it in all-gather of unit blocks.0" in answers[0]


USES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "a forward with gradients": lambda model, x: total(model(x)).backward(),
    "a forward without gradients": torch.no_grad()(lambda model, x: model(x)),
    r"unshard\(\)": lambda model, x: [block.unshard() for block in model.blocks],
}


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)])
def test_uses_that_differ_are_named(shape: tuple[int, ...]) -> None:
    """Else a forward of the one would be paired with a later one of the others, to the end."""
    harness.run_ranks(uses_that_differ, math.prod(shape), shape)


def uses_that_differ(rank: int, n_ranks: int, shape: tuple[int, ...]) -> None:
    mesh = harness.cached_mesh(shape, ("replicate", "shard")[-len(shape) :])
    for first, second in itertools.permutations(USES, 2):
        if shape == (2, 1) and "unshard" in first + second:
            continue  # nothing is gathered
        model = Branches()
        models.shard_blocks(model, harness.implementation(), mesh=mesh)
        model(data(rank, 0))
        use, other = (first, second) if rank % 2 == 0 else (second, first)
        with pytest.raises(RuntimeError, match=f"is {use} on rank {rank} and {other} on rank"):
            USES[use](model, data(rank, 0))


POLICIES = {
    "param_dtype": torch.bfloat16,
    "reduce_dtype": torch.float64,
    "output_dtype": torch.float64,
    "cast_forward_inputs": False,
}


@pytest.mark.parametrize("field", POLICIES)
@on_ranks(2)
def test_policies_that_differ_are_named(rank: int, n_ranks: int, field: str) -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(**({field: POLICIES[field]} if rank == 1 else {}))
    side = make(Branches, lambda model, fsdp: models.shard_blocks(model, fsdp, mp_policy=policy))
    with pytest.raises(RuntimeError, match="different models: rank 0 has .* where rank 1 has"):
        side.model(data(rank))


@on_ranks(2)
def test_divide_factors_that_differ_are_named(rank: int, n_ranks: int) -> None:
    side = make(Branches, models.shard_blocks)
    side.model.set_gradient_divide_factor(2.0 + rank)
    with pytest.raises(RuntimeError, match="divide factor 2.0.* where rank 1 .*divide factor 3.0"):
        side.model(data(rank))
