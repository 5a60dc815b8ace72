"""FSDP1's communication hooks: ours against torch's, torch's compressing ones against a policy."""

from typing import Any

import fsdp1_sides as sides
import pytest
import torch
import torch.distributed as dist
from fsdp1_sides import Side, Sides
from harness import cached_mesh, implementation
from models import Net
from parity import compare, on_ranks
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

WHOLE = {"sharding_strategy": ShardingStrategy.NO_SHARD}


def hooked(hook: Any, state: Any = None, **options: Any) -> Sides:
    pair = Sides(optimizer=sgd, **options)
    pair.both(lambda side: side.model.register_comm_hook(state, hook))
    assert all(w._comm_hook is hook for w in pair.ours.fsdp.fsdp_modules(pair.ours.model))
    return pair


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@on_ranks(2)
def test_torchs_own(rank: int, n_ranks: int) -> None:
    state = default_hooks.DefaultState(dist.group.WORLD)
    for hook, options in (
        (default_hooks.reduce_scatter_hook, {}),
        (default_hooks.allreduce_hook, WHOLE),
    ):
        pair = hooked(hook, state, **options)
        pair.step(n_micro=2)
        assert pair.ours.model._unit._root is not None


@on_ranks(2)
def test_compression(rank: int, n_ranks: int) -> None:
    """torch's fails on CPU ranks: held to gradients that are reduced in that dtype."""
    fsdp = implementation().FullyShardedDataParallel
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    for hook, dtype in (
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (default_hooks.fp16_compress_hook, torch.float16),
    ):
        for is_late in (False, True):
            expected, side = (
                Side(fsdp, Net, lambda m, cls, o=o: sides.wrap_blocks(m, cls, **o), sgd)
                for o in ({"mixed_precision": MixedPrecision(reduce_dtype=dtype)}, {})
            )
            if is_late:
                side.model(sides.batch(0)).sum().backward()
                side.optimizer.zero_grad()
            side.model.register_comm_hook(state, hook)
            for each in (expected, side):
                each.model(sides.batch(1)).sum().backward()
            compare(side.wholes(), expected.wholes(), sides.Tolerance(), str(hook))
            assert side.model._unit._root is not None


@on_ranks(2)
def test_of_the_user(rank: int, n_ranks: int) -> None:
    """It alone says what a gradient is: nothing is divided before or after."""

    def scattered(calls: list[str], grad: Tensor, output: Tensor) -> None:
        calls.append(f"{grad.dtype} {grad.numel() // output.numel()} {output.dtype}")
        dist.reduce_scatter_tensor(output, grad * 3)
        output.div_(7)

    def summed(calls: list[str], grad: Tensor) -> None:
        calls.append(str(grad.dtype))
        dist.all_reduce(grad)
        grad.div_(5)

    half = {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    low = sides.Tolerance(scaled=0.05)  # sums of bf16 numbers
    for hook, options in (
        (scattered, {}),
        (scattered, {**half, "tolerance": low}),
        (summed, WHOLE),
    ):
        pair = Sides(optimizer=sgd, **options)
        calls: dict[Side, list[str]] = {pair.theirs: [], pair.ours: []}
        pair.both(lambda side, c=calls, h=hook: side.model.register_comm_hook(c[side], h))
        pair.step(n_micro=2)
        pair.step()
        assert calls[pair.ours] == calls[pair.theirs] != []


@on_ranks(2)
def test_states_that_are_not_the_units_own(rank: int, n_ranks: int) -> None:
    """A hook of torch's with other factors does what it says."""
    state = default_hooks.DefaultState(dist.group.WORLD)
    state.gradient_postdivide_factor = 5.0
    pair = hooked(default_hooks.reduce_scatter_hook, state)
    pair.step()
    assert pair.ours.model._unit._root is not None


@on_ranks(2)
def test_refusals(rank: int, n_ranks: int) -> None:
    fsdp = implementation().FullyShardedDataParallel
    hook, state = default_hooks.reduce_scatter_hook, default_hooks.DefaultState(dist.group.WORLD)
    model = sides.wrap_blocks(Net(), fsdp)
    with pytest.raises(AssertionError, match="root"):
        model.blocks[0].register_comm_hook(state, hook)
    with pytest.raises(ValueError, match="callable"):
        model.register_comm_hook(state, 3)
    model.register_comm_hook(state, hook)
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(state, hook)
    mesh = cached_mesh((1, 2), ("replicate", "shard"))
    hybrid = fsdp(Net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(AssertionError, match="hybrid"):
        hybrid.register_comm_hook(state, hook)
