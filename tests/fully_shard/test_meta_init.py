"""Models built on the meta device and filled after sharding, beside torch."""

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import Net, data
from parity import Pair, Plain, Side, Tolerance, on_ranks, sgd, total
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def build_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def full_state() -> dict[str, Tensor]:
    """What every rank loads: the same seeds as a plain model's."""
    torch.manual_seed(1)
    return Net().state_dict()


def fill_reset(side: Side) -> None:
    """Layers initialise their shards themselves; parameters of the root are filled."""
    side.model.to_empty(device="cpu")
    with torch.no_grad():
        side.model.offset.fill_(0.25)
        side.model.scale.fill_(0.5)
    for module in side.model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()


def fill_copy(side: Side) -> None:
    """The whole values are cut and loaded into the empty shards, which stay the same objects."""
    side.model.to_empty(device="cpu")
    cut = {}
    for name, value in full_state().items():
        shard = side.model.state_dict()[name]
        is_sharded = isinstance(shard, DTensor)
        cut[name] = (
            distribute_tensor(value, shard.device_mesh, shard.placements) if is_sharded else value
        )
    side.model.load_state_dict(cut)


def fill_assign(side: Side) -> None:
    """The same, without empty shards: loaded tensors become the parameters."""
    cut = {}
    shards = side.model.state_dict()
    for name, value in full_state().items():
        shard = shards[name]
        is_sharded = isinstance(shard, DTensor)
        cut[name] = (
            distribute_tensor(value, shard.device_mesh, shard.placements) if is_sharded else value
        )
    side.model.load_state_dict(cut, assign=True)


def fill_broadcast(side: Side) -> None:
    """Only rank 0 has the values."""
    state = full_state() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    side.model.to_empty(device="cpu")
    set_model_state_dict(side.model, state, options=options)


FILLS = {
    "reset": fill_reset,
    "copy": fill_copy,
    "assign": fill_assign,
    "broadcast": fill_broadcast,
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("sharding", ["shard_blocks", "shard_root"])
@on_ranks(1, 2, 3)
def test_filled_and_trained(rank: int, n_ranks: int, sharding: str, fill: str) -> None:
    pair = Pair(build_meta, getattr(models, sharding), optimizer=None)
    # Uninitialised memory differs while they fill, so the comparison is of what is there after both
    # did.
    for side in (pair.theirs, pair.ours):
        torch.manual_seed(5)
        FILLS[fill](side)
    pair.recapture()
    pair.check("after filling")
    for side in (pair.theirs, pair.ours):
        side.optimizer = sgd(side.model.parameters())
    for step in range(3):
        pair.step(data(rank, step))
    pair.check_state_dict()


@pytest.mark.parametrize("fill", ["copy", "assign", "broadcast"])
@on_ranks(1, 2, 3)
def test_filled_with_the_right_values(rank: int, n_ranks: int, fill: str) -> None:
    pair = Pair(build_meta, models.shard_blocks, optimizer=None)
    FILLS[fill](pair.ours)
    pair.ours.shards = dict(pair.ours.model.named_parameters())
    plain = Plain(Net)
    total(pair.ours.model(data(rank))).backward()
    plain.backward([total(plain.model(data(r))) for r in range(n_ranks)], n_ranks)
    plain.check(pair.ours, CLOSE)


@on_ranks(1, 2)
def test_mixed_precision(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        models.shard_blocks(model, fsdp, mp_policy=policy)

    pair = Pair(build_meta, shard, optimizer=None)
    for side in (pair.theirs, pair.ours):
        fill_copy(side)
    pair.check("after filling")
    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward()


@on_ranks(1, 2)
def test_not_filled(rank: int, n_ranks: int) -> None:
    """A forward with parameters still on meta is refused, and works once they are filled."""
    pair = Pair(build_meta, models.shard_blocks, optimizer=None)

    def forward(side: Side) -> None:
        with pytest.raises(RuntimeError, match="materialized from meta device before training"):
            side.model(data(rank))

    pair.both(forward)
    # Torch keeps what the refused forward began and cannot go on.
    pair.skip_if_same()
    fill_copy(pair.ours)
    plain = Plain(Net)
    total(pair.ours.model(data(rank))).backward()
    plain.backward([total(plain.model(data(r))) for r in range(n_ranks)], n_ranks)
    plain.check(pair.ours, CLOSE)


@on_ranks(1, 2)
def test_sharded_under_a_meta_context(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        with torch.device("meta"):
            models.shard_blocks(model, fsdp)

    pair = Pair(build_meta, shard, optimizer=None)
    for side in (pair.theirs, pair.ours):
        fill_copy(side)
    pair.forward(data(rank))
    pair.backward()


@on_ranks(1, 2, 3)
def test_state_dicts_between_both(rank: int, n_ranks: int) -> None:
    """What torch's side saves ours loads, and the other way round, sharded or whole."""
    pair = Pair(Net, models.shard_blocks, optimizer=lambda p: torch.optim.SGD(p, lr=0.005))
    pair.step(data(rank))
    for _ in range(2):
        saved = {key: value.clone() for key, value in pair.theirs.model.state_dict().items()}
        pair.step(data(rank, 1))
        pair.do(lambda side: side.model.load_state_dict(saved), "load sharded")
        pair.step(data(rank, 2))
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(pair.ours.model, options=options)
    pair.both(lambda side: get_model_state_dict(side.model, options=options), "get whole")
    pair.step(data(rank, 3))
    pair.do(lambda side: set_model_state_dict(side.model, whole, options=options), "set whole")
    pair.step(data(rank, 4))
