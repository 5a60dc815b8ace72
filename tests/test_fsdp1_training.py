"""Training under FullyShardedDataParallel: ours against torch's, step by step."""

from typing import Any

import fsdp1_sides as sides
from fsdp1_sides import Sides
from models import Block
from parity import on_ranks
from torch.distributed.fsdp import ShardingStrategy
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
