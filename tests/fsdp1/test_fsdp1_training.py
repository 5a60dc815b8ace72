"""Training under FullyShardedDataParallel: ours against torch's, step by step."""

from typing import Any

import fsdp1_sides as sides
import pytest
import torch
from fsdp1_sides import Side, Sides
from models import Block
from parity import Tolerance, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WRAPS: dict[str, Any] = {
    "root": sides.wrap_root,
    "blocks": sides.wrap_blocks,
    "policy": lambda model, fsdp, **o: fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **o),
}


def train(rank: int, n_ranks: int, wrap: str, strategy: str) -> None:
    pair = Sides(wrap=WRAPS[wrap], sharding_strategy=ShardingStrategy[strategy])
    names = [
        [name for name, _ in side.model.named_parameters()] for side in (pair.theirs, pair.ours)
    ]
    assert names[0] == names[1]
    for n_micro, clip in ((1, None), (2, 0.5), (1, 0.01)):
        pair.step(n_micro, clip)


@on_ranks(2)
def test_training(rank: int, n_ranks: int) -> None:
    for wrap in WRAPS:
        train(rank, n_ranks, wrap, "FULL_SHARD")
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        train(rank, n_ranks, "blocks", strategy)


def checkpointed(model: nn.Module, wrapper: Any = checkpoint_wrapper) -> None:
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Block)
    )


def inside(model: Any, fsdp: Any, **options: Any) -> nn.Module:
    checkpointed(model)
    return WRAPS["policy"](model, fsdp, **options)


def below(model: Any, fsdp: Any, **options: Any) -> nn.Module:
    """In between: the wrapper's module becomes another one after it was sharded."""
    wrapped = WRAPS["policy"](model, fsdp, **options)
    checkpointed(wrapped)
    return wrapped


def offloaded(model: Any, fsdp: Any, **options: Any) -> nn.Module:
    wrapped = WRAPS["policy"](model, fsdp, **options)
    checkpointed(wrapped, offload_wrapper)
    return wrapped


def around(model: Any, fsdp: Any, **options: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(
            fsdp(block, **options), checkpoint_impl=CheckpointImpl.REENTRANT
        )
    return fsdp(model, **options)


@on_ranks(2)
def test_activation_checkpointing(rank: int, n_ranks: int) -> None:
    for wrap in (inside, below, offloaded, around):
        pair = Sides(wrap=wrap)
        pair.both(lambda side: [[n for n, _ in side.model.named_parameters()]])
        pair.step(n_micro=2, clip=0.5)
        pair.both(lambda side: side.model.state_dict())


@on_ranks(2)
def test_grad_scaler(rank: int, n_ranks: int) -> None:
    """A rank whose loss overflows makes all of them skip the step."""
    half = MixedPrecision(torch.float16, torch.float16)
    for precision, error in ((half, 1e-3), (None, 1e-6)):  # the norms are rounded otherwise
        pair = Sides(mixed_precision=precision, tolerance=Tolerance(error, error))
        scalers = {
            side: ShardedGradScaler(device="cpu", init_scale=2.0**8, growth_interval=2)
            for side in (pair.theirs, pair.ours)
        }
        for step in range(4):

            def train(side: Side, step: int = step, scalers: Any = scalers) -> Any:
                scaler, optimizer = scalers[side], side.optimizer
                optimizer.zero_grad()
                loss = side.model(sides.batch(step)).float().square().mean()
                loss = loss * float("inf") if step == 2 and rank == 0 else loss
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = side.model.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                norms = [norm] if step != 2 else []
                return [scaler.get_scale(), norms, side.wholes(with_grads=False)]

            pair.both(train, f"step {step}")


@on_ranks(2)
def test_parameters_after_evaluation(rank: int, n_ranks: int) -> None:
    """Shards, although a forward without gradients leaves units whole."""
    pair = Sides(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with torch.no_grad():
        pair.both(lambda side: side.model(sides.batch(0)))
    for side in (pair.theirs, pair.ours):
        side.optimizer = torch.optim.Adam(side.model.parameters(), lr=0.05)
    pair.step()


@on_ranks(2)
def test_summoned_in_forward(rank: int, n_ranks: int) -> None:
    pair = Sides()

    def summon(side: Side) -> Any:
        def inside(*_: Any) -> None:
            with side.fsdp.summon_full_params(side.model):
                pass

        handle = side.model.stem.register_forward_hook(inside)
        with pytest.raises(AssertionError, match="Cannot manually unshard parameters"):
            side.model(sides.batch(0))
        handle.remove()

    summon(pair.theirs)
    summon(pair.ours)


class FirstOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@on_ranks(2)
def test_input_that_is_not_used(rank: int, n_ranks: int) -> None:
    """It gets no gradient: this class has no autograd.Function on inputs."""
    pair = Sides(FirstOf, sides.wrap_root)

    def step(side: Side) -> list[Any]:
        inputs = [torch.ones(2, sides.WIDTH, requires_grad=True) for _ in range(2)]
        side.model(*inputs).sum().backward()
        return [x.grad for x in inputs]

    assert pair.both(step)[1] is None
