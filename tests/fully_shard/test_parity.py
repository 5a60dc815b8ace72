"""The shapes that models and units come in, trained beside torch's own fully_shard."""

import models
import pytest
from models import Branches, Net, Tied, Tiny, data, tokens
from parity import Pair, on_ranks

SHARDINGS = ["shard_root", "shard_blocks", "shard_deep", "shard_grouped", "shard_children"]


def shard(model, fsdp, sharding: str, **options) -> None:
    getattr(models, sharding)(model, fsdp, **options)


@pytest.mark.parametrize("own", [True, False], ids=["own", "bare"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(1, 2, 3, 4)
def test_structure(rank: int, n_ranks: int, sharding: str, own: bool) -> None:
    pair = Pair(lambda: Net(own=own), lambda model, fsdp: shard(model, fsdp, sharding))
    for step in range(3):
        pair.step(data(rank, step))
    pair.check_state_dict()
    pair.step(data(rank, 3))


@pytest.mark.parametrize("reshard", [True, False, None, 1, 2])
@pytest.mark.parametrize("sharding", ["shard_root", "shard_blocks", "shard_grouped"])
@on_ranks(1, 2, 4)
def test_reshard_after_forward(
    rank: int, n_ranks: int, sharding: str, reshard: bool | int | None
) -> None:
    if reshard == 2 and n_ranks == 1:
        pytest.skip("a world of one has no group of two")
    # Torch registers wrong shards for an int when rows do not divide, so these do.
    pair = Pair(
        lambda: Net(own=False, width=8, hidden=16),
        lambda model, fsdp: shard(model, fsdp, sharding, reshard_after_forward=reshard),
    )
    for step in range(3):
        pair.step(data(rank, step, 4, 8))
    pair.eval_forward(data(rank, 3, 4, 8))
    pair.step(data(rank, 4, 4, 8))


@on_ranks(1, 2, 3, 4)
def test_tiny_parameters(rank: int, n_ranks: int) -> None:
    pair = Pair(Tiny, models.shard_root)
    for step in range(2):
        pair.step(data(rank, step))
    pair.check_state_dict()


@on_ranks(1, 2, 3)
def test_tied_in_one_unit(rank: int, n_ranks: int) -> None:
    pair = Pair(Tied, models.shard_blocks)
    for step in range(3):
        pair.step(tokens(rank, step))
    pair.check_state_dict()
    assert pair.ours.model.head.weight is pair.ours.model.embedding.weight


@on_ranks(1, 2, 4)
def test_branches(rank: int, n_ranks: int) -> None:
    """Units that run several times, not at all, and in another order than before."""
    pair = Pair(Branches, models.shard_blocks)
    for step, use in enumerate([(0, 1, 2), (2, 1), (0, 0, 1), (1,), (2, 2, 2), (0, 1, 2)]):
        pair.step(data(rank, step), use=use)
