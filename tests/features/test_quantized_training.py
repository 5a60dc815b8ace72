"""Training with quantized weights: LoRA over a frozen base in four bits, products in int8."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Net, data, shard_blocks
from parity import Pair, Side, Tolerance, on_ranks
from quantized import FourBit, Int8Weight, LoraNet, convert_to_int8
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

CLOSE = Tolerance(relative=1e-4, scaled=1e-4, realign=True)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 8


def of_adapters(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


def lora_pair(**options: Any) -> Pair:
    def shard(model: nn.Module, fsdp: Any) -> None:
        shard_blocks(model, fsdp, **options)

    return Pair(LoraNet, shard, tolerance=CLOSE, optimizer=of_adapters)


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    return data(rank, step, 3, WIDTH)


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2, 4)
def test_lora_over_four_bits(rank: int, n_ranks: int, reshards: bool) -> None:
    """The base stays as it was, and has no gradient; micro-batches add up."""
    pair = lora_pair(reshard_after_forward=reshards)
    shards = pair.ours.shards
    base = [name for name, shard in shards.items() if isinstance(shard._local_tensor, FourBit)]
    before = {name: shards[name]._local_tensor.codes.clone() for name in base}
    assert len(base) == 6
    for step in range(2):
        for is_last in (False, True):
            for side in (pair.theirs, pair.ours):
                side.model.set_requires_gradient_sync(is_last)
            pair.forward(inputs(rank, 2 * step + is_last))
            pair.backward()
        pair.optimize()
    for name in base:
        assert shards[name].grad is None
        assert torch.equal(shards[name]._local_tensor.codes, before[name])


@on_ranks(2)
def test_lora_in_eval_and_by_hand(rank: int, n_ranks: int) -> None:
    pair = lora_pair()
    pair.eval_forward(inputs(rank))

    def base(side: Side) -> Any:
        side.model.blocks[0].unshard()
        weight = side.model.blocks[0].up.weight
        found = type(weight).__name__, tuple(weight.shape), weight.dequantize()
        side.model.blocks[0].reshard()
        return found

    pair.both(base)
    pair.step(inputs(rank, 1))


def int8_pair(n_ranks: int, mesh: Any = None, **options: Any) -> Pair:
    def shard(model: nn.Module, fsdp: Any) -> None:
        convert_to_int8(model)
        shard_blocks(model, fsdp, mesh=mesh, **options)

    tolerance = Tolerance.of(n_ranks, torch.bfloat16) if "mp_policy" in options else CLOSE
    return Pair(Net, shard, tolerance=tolerance)


@pytest.mark.parametrize("is_mixed", [False, True])
@on_ranks(2)
def test_int8_products(rank: int, n_ranks: int, is_mixed: bool) -> None:
    """Rows that no number of ranks divides."""
    pair = int8_pair(n_ranks, **({"mp_policy": BF16} if is_mixed else {}))
    assert isinstance(pair.ours.shards["blocks.0.up.weight"]._local_tensor, Int8Weight)
    for step in range(2):
        pair.step(data(rank, step))
    pair.eval_forward(data(rank, 5))


@on_ranks(4)
def test_int8_products_with_replicas(rank: int, n_ranks: int) -> None:
    pair = int8_pair(n_ranks, cached_mesh((2, 2), ("replicate", "shard")))
    for step in range(2):
        pair.step(data(rank, step))


@on_ranks(2)
def test_collectives_of_quantized_weights(rank: int, n_ranks: int) -> None:
    pair = lora_pair()

    def counted(side: Side) -> dict[str, int]:
        with CommDebugMode() as mode:
            side.model(inputs(rank)).square().sum().backward()
        side.optimizer.zero_grad()
        return {str(name): count for name, count in mode.get_comm_counts().items()}

    assert sum(pair.both(counted).values()) > 0
    pair.both(counted)
    pair.step(inputs(rank, 1))
