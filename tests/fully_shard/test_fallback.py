"""Trees that the core leaves to torch's own implementation, from the start or from some step on."""

import copy
import io
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import Net, data
from parity import Pair, Plain, Side, full, on_ranks


def replace_method(side: Side) -> None:
    models.use_fallback(side.model.blocks[1])


def runs_on_core(side: Side) -> bool:
    return side.model.blocks[0]._get_fsdp_state()._root is not None


@on_ranks(1, 2)
def test_method_replaced_before_the_first_forward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.do(replace_method)
    for step in range(3):
        pair.step(data(rank, step))
    pair.skip_if_same()
    assert not runs_on_core(pair.ours)


@on_ranks(1, 2)
def test_method_replaced_between_steps(rank: int, n_ranks: int) -> None:
    """After the first forward, too, it takes the whole tree to torch's implementation."""
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank, 0))
    is_torch = pair.ours.fsdp is pair.theirs.fsdp
    assert is_torch or runs_on_core(pair.ours)
    pair.do(replace_method)
    assert is_torch or not runs_on_core(pair.ours)
    for step in range(1, 4):
        pair.step(data(rank, step))


@on_ranks(1, 2)
def test_unsharded_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """The parameters that an early unshard() gave, and hooks on them, are those of the forward."""
    pair = Pair(Net, models.shard_blocks)
    pair.do(replace_method)

    def unshard(side: Side) -> None:
        block = side.model.blocks[1]
        block.unshard()
        side.hooked = block.up.weight
        side.hooked.register_hook(lambda grad: grad * 3)

    pair.do(unshard)
    pair.forward(data(rank))
    pair.backward()

    def still_the_same(side: Side) -> bool:
        side.model.blocks[1].unshard()
        found = side.model.blocks[1].up.weight
        side.model.blocks[1].reshard()
        return found is side.hooked

    assert pair.both(still_the_same) is True


@on_ranks(1, 2)
def test_parameters_can_be_copied_and_saved(rank: int, n_ranks: int) -> None:
    net = Net()
    models.shard_blocks(net, harness.implementation())
    net(data(rank, 0)).sum().backward()
    net.reshard()
    weight = next(net.blocks[0].parameters())
    torch.testing.assert_close(copy.deepcopy(weight).to_local(), weight.to_local())
    torch.save({"weight": weight}, io.BytesIO())


@on_ranks(2, 3)
def test_method_of_one_rank_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """The others learn of it and take the fallback too."""
    pair = Pair(Net, models.shard_blocks)
    if rank == n_ranks - 1:
        pair.do(lambda side: models.use_fallback(side.model.blocks[0]))
    for step in range(2):
        pair.step(data(rank, step))
    pair.skip_if_same()
    assert not runs_on_core(pair.ours)
    reason = pair.ours.model._get_fsdp_state()._fsdp_param_groups[0].fallback_reason
    assert "blocks.0" in reason and "was replaced" in reason
    assert (f"on rank {n_ranks - 1}" in reason) == (rank < n_ranks - 1)


def after_a_step(rank: int, build: Any = Net) -> Any:
    """A model with gradients, sharded by blocks; None where torch itself is tested."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return None
    harness.seed_everything(1)
    model = build()
    models.shard_blocks(model, fsdp)
    model(data(rank)).sum().backward()
    return model


@on_ranks(2)
def test_method_of_one_rank_between_steps(rank: int, n_ranks: int) -> None:
    """Then the others are in their forward already, and are told at once; so is that rank."""
    model = after_a_step(rank)
    if model is None:
        return
    if rank == 0:
        models.use_fallback(model.blocks[0])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 0 no longer runs.*and rank 1 does"):
                model(data(rank))
        dist.barrier()
        dist.barrier()
        check_fallback(model, rank)
        return
    model.reshard()
    before = [parameter._local_tensor.clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 0 no longer runs.*set on all ranks"):
            model(data(rank))
    model.reshard()
    after = [parameter._local_tensor for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    dist.barrier()
    models.use_fallback(model.blocks[1])
    dist.barrier()
    check_fallback(model, rank)


def check_fallback(model: Any, rank: int, n_ranks: int = 2, build: Any = Net) -> None:
    """Once all ranks have left the core they go on."""
    plain = Plain(build)
    model.zero_grad()
    model(data(rank)).sum().backward()
    plain.backward([plain.model(data(r)).sum() for r in range(n_ranks)], n_ranks)
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), parameter.grad, msg=name)


class Picky(Net):
    """A root without parameters that may fail before any unit runs."""

    def __init__(self) -> None:
        super().__init__(own=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return super().forward(x)


@on_ranks(2, 3)
def test_left_after_one_rank_failed(rank: int, n_ranks: int) -> None:
    """A forward that failed on one rank alone, before all left, does not mean that it goes on."""
    model = after_a_step(rank, Picky)
    if model is None:
        return
    if rank == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="not a number"):
                model(data(rank).fill_(torch.nan))
    models.use_fallback(model.blocks[0])
    check_fallback(model, rank, n_ranks, Picky)


@on_ranks(2)
def test_each_rank_tries_once_more(rank: int, n_ranks: int) -> None:
    """A call that met the error waits, when it is repeated, for those that still have to leave."""
    model = after_a_step(rank)
    if model is None:
        return
    if rank == 0:
        models.use_fallback(model.blocks[0])
    try:
        model(data(rank))
    except RuntimeError as error:  # rank 0 may also come when the other one has left already
        assert "rank 0 no longer runs" in str(error)
        if rank == 1:
            models.use_fallback(model.blocks[0])
        model(data(rank))
    check_fallback(model, rank)
