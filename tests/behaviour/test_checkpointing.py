"""K: activation checkpointing around and inside units."""

from typing import Any

import models
import pytest
import torch
from models import Branches, Net, data
from parity import on_ranks, total
from test_checkpointing import shard as shard_checkpointed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from behaviour.pairs import agree, backward, counts, gradients, sharded, shards


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("kind", ["plain", "composable"])
@on_ranks(2)
def test_k1_recomputation_gathers_nothing_more(
    rank: int, n_ranks: int, kind: str, place: str
) -> None:
    def see(fsdp: Any) -> Any:
        def build() -> Any:
            return sharded(
                fsdp,
                lambda: Net(own=False),
                lambda model, fsdp: shard_checkpointed(model, fsdp, kind, place),
            )

        n = counts(lambda: backward(build(), data(rank)))
        model = build()
        parameters = shards(model)
        backward(model, data(rank))
        first = gradients(parameters)
        backward(model, data(rank, 1))
        blocks = [getattr(b, "_checkpoint_wrapped_module", b) for b in model.blocks]
        return n, [block.n_calls for block in blocks], first, gradients(parameters)

    n, calls, first, second = agree(see)
    assert n == [6, 3, 0] and calls == [4] * 3 and None not in first.values()


@on_ranks(2)
def test_k1_reentrant_around_the_root(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        seen = []
        for step in range(2):
            x = data(rank, step).requires_grad_()
            total(checkpoint(model, x, use_reentrant=True)).backward()
            seen.append((gradients(parameters), x.grad))
        return seen

    (first, x_grad), _ = agree(see)
    assert None not in first.values() and x_grad is not None


@on_ranks(2)
def test_k2_recomputation_casts_alike(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen: list[str] = []

        class Unit(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(str(x.dtype))
                return super().forward(x)

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.unit = Unit(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.double, x, use_reentrant=False)

            def double(self, x: Tensor) -> Tensor:
                x = self.unit(x)
                seen.append(str(x.dtype))
                return x * x

        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float64, reduce_dtype=torch.float32
        )
        model = Root()
        with torch.no_grad():
            model.unit.weight.fill_(1)
            model.unit.bias.fill_(0.5)
        fsdp.fully_shard(model.unit, mp_policy=policy)
        fsdp.fully_shard(model)
        parameters = shards(model)
        model(torch.ones(2, 4)).sum().backward()
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == ["torch.bfloat16", "torch.float64"] * 2


@on_ranks(2)
def test_k3_nested_units_are_recomputed(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(
            fsdp, Net, lambda model, fsdp: shard_checkpointed(model, fsdp, "plain", "around", True)
        )
        parameters = shards(model)
        seen = []
        for step in range(2):
            backward(model, data(rank, step))
            seen.append(gradients(parameters))
        return seen

    _, second = agree(see)
    assert None not in second.values()


@on_ranks(2)
def test_k4_two_forwards_before_backward(rank: int, n_ranks: int) -> None:
    """A model that is compared with itself, with nested units and checkpointing."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches, models.shard_deep)
        parameters = shards(model)
        first, second = (
            checkpoint(model, data(rank, step), use_reentrant=False) for step in range(2)
        )
        (total(first) - 0.5 * total(second)).backward()
        return gradients(parameters)

    assert None not in agree(see).values()
