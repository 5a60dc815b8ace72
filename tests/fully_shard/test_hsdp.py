"""Two-dimensional meshes and the scaling of gradients, beside torch and a plain model."""

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh
from models import Branches, Net, data
from parity import Pair, Plain, Side, Tolerance, on_ranks, total
from test_accumulation import setter
from torch import nn
from torch.distributed.tensor import Replicate, Shard

NAMES = ("replicate", "shard")
CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def mesh_shapes(n_ranks: int) -> list[tuple[int, int]]:
    return [(r, n_ranks // r) for r in range(1, n_ranks + 1) if n_ranks % r == 0]


def sharding(shape: tuple[int, ...], mp: dict[str, Any] | None = None, **options: Any):
    """Blocks as units on a mesh of this shape."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        mesh = cached_mesh(shape, NAMES[-len(shape) :])
        policy = fsdp.MixedPrecisionPolicy(**(mp or {}))
        models.shard_blocks(model, fsdp, mesh=mesh, mp_policy=policy, **options)

    return shard


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2, 4)
def test_training(rank: int, n_ranks: int, reshard: bool) -> None:
    for shape in mesh_shapes(n_ranks):
        pair = Pair(Net, sharding(shape, reshard_after_forward=reshard))
        for step in range(3):
            pair.step(data(rank, step))
        pair.check_state_dict()
        assert pair.ours.shards["stem.weight"].placements == (Replicate(), Shard(0))


@on_ranks(2, 4)
def test_mixed_precision(rank: int, n_ranks: int) -> None:
    for shape in mesh_shapes(n_ranks):
        mp = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        pair = Pair(Net, sharding(shape, mp))
        for step in range(3):
            pair.step(data(rank, step))


@on_ranks(4)
def test_int_reshard(rank: int, n_ranks: int) -> None:
    shard = sharding((1, 4), reshard_after_forward=2)
    pair = Pair(lambda: Net(own=False, width=8, hidden=16), shard)
    for step in range(2):
        pair.step(data(rank, step, 4, 8))


def accumulate(pair: Pair, rank: int) -> None:
    for step in range(2):
        for micro, (sync, all_reduce) in enumerate(
            [(True, False), (False, False), (True, False), (True, True)]
        ):
            pair.both(setter("set_requires_gradient_sync", sync))
            pair.both(setter("set_requires_all_reduce", all_reduce))
            pair.forward(data(rank, 4 * step + micro))
            pair.backward()
        pair.optimize()


@on_ranks(2, 4)
def test_partial_reductions(rank: int, n_ranks: int) -> None:
    """Reduced over shards only and held; the last micro-batch brings the replicas together."""
    for shape in mesh_shapes(n_ranks):
        accumulate(Pair(Net, sharding(shape)), rank)


@on_ranks(4)
def test_partial_reductions_of_other_parameters(rank: int, n_ranks: int) -> None:
    """Torch 2.13 adds the held sum of one parameter to another here; an unsharded model is the
    reference.
    """

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, mesh=cached_mesh((2, 2), NAMES))

    pair = Pair(Branches, shard)
    pair.skip_if_same()
    plain = Plain(Branches)
    side = pair.ours
    for micro, use in enumerate([(0,), (1,), (1, 2)]):
        side.model.set_requires_all_reduce(micro == 2)
        total(side.model(data(rank, micro), use=use)).backward()
        losses = [total(plain.model(data(r, micro), use=use)) for r in range(n_ranks)]
        plain.backward(losses, n_ranks)
    plain.check(side, CLOSE)


@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
@on_ranks(1, 2, 3, 4)
def test_forced_sum(rank: int, n_ranks: int, factor: float | None) -> None:
    """With the factor, gloo can do it in torch as well."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp)
        for unit in [*model.blocks, model]:
            unit.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                unit.set_gradient_divide_factor(factor)

    if n_ranks == 1 and factor is not None:
        pytest.skip("torch divides twice in a world of one: see test_divide_factor")
    pair = Pair(Net, shard, tolerance=CLOSE)
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("reduce", [None, torch.float64])
@pytest.mark.parametrize("force_sum", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
@on_ranks(1, 2, 4)
def test_divide_factor(
    rank: int, n_ranks: int, factor: float, force_sum: bool, reduce: torch.dtype | None
) -> None:
    """Divided by the factor, once, on every mesh and backend."""
    for shape in [(n_ranks,), *mesh_shapes(n_ranks)]:
        pair = Pair(Net, sharding(shape, {"reduce_dtype": reduce}), optimizer=None)
        pair.skip_if_same()
        plain = Plain(Net)
        for unit in [*pair.ours.model.blocks, pair.ours.model]:
            unit.set_gradient_divide_factor(factor)
            unit.set_force_sum_reduction_for_comms(force_sum)
        total(pair.ours.model(data(rank))).backward()
        plain.backward([total(plain.model(data(r))) for r in range(n_ranks)], factor)
        plain.check(pair.ours, CLOSE)


@on_ranks(4)
def test_collectives_in_hooks_of_gradients(rank: int, n_ranks: int) -> None:
    """All ranks come to them in one order, which is torch's."""
    pair = Pair(Net, sharding((2, 2)))

    def register(side: Side) -> None:
        side.kept_hooks = []
        for place, (name, shard) in enumerate(side.shards.items()):

            def hook(param: nn.Parameter, name: str = name, place: int = place) -> None:
                places = torch.tensor([place])
                dist.all_reduce(places)
                assert places.item() == n_ranks * place
                side.kept_hooks.append(name)

            shard.register_post_accumulate_grad_hook(hook)

    pair.both(register)
    for step in range(3):
        pair.step(data(rank, step))
        pair.both(lambda side: side.kept_hooks, "hook calls")


@on_ranks(2, 4)
def test_all_reduce_hook(rank: int, n_ranks: int) -> None:
    """Sees the flat result and may change it."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        sharding((2, n_ranks // 2))(model, fsdp)
        model.seen = []

        def hook(flat: torch.Tensor) -> None:
            model.seen.append((flat.dtype, flat.sum().item()))
            flat.mul_(2)

        model.set_all_reduce_hook(hook)

    pair = Pair(Net, shard)
    for step in range(2):
        pair.step(data(rank, step))
        pair.both(lambda side: len(side.model.seen), "hook calls")
