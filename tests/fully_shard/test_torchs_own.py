"""Models that are handed over to torch's own implementation, from the start or some step on."""

import contextlib
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
from parity import Pair, Plain, full, on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_c._fully_shard import _torchs_own


def is_torchs(pair: Pair) -> bool:
    units = [unit for unit in pair.ours.model.modules() if isinstance(unit, torch_fsdp.FSDPModule)]
    return all(map(models.is_torchs, units))


@on_ranks(1, 2)
def test_function_replaced_before_the_first_forward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    with models.function_replaced():
        pair.step(data(rank, 0))
    for step in range(1, 3):
        pair.step(data(rank, step))
    pair.skip_if_same()
    assert is_torchs(pair)


@on_ranks(1, 2)
def test_function_replaced_between_steps(rank: int, n_ranks: int) -> None:
    """After the first forward, too, it hands the whole model over."""
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank, 0))
    assert pair.ours.fsdp is pair.theirs.fsdp or not is_torchs(pair)
    with models.function_replaced():
        pair.step(data(rank, 1))
    assert is_torchs(pair)
    for step in range(2, 5):
        pair.step(data(rank, step))


@on_ranks(2)
def test_unsharded_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """A unit alone is not handed over: the error says what to do."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return
    net = Net()
    models.shard_blocks(net, fsdp)
    with models.function_replaced():
        with pytest.raises(RuntimeError, match="'.*': torch's implementation is to run.*replaced"):
            net.blocks[1].unshard()
        net(data(rank)).sum().backward()
    assert models.is_torchs(net.blocks[1])
    net.blocks[1].unshard()
    assert net.blocks[1].up.weight.shape == (models.HIDDEN, models.WIDTH)
    net.blocks[1].reshard()


@on_ranks(2)
def test_spmd_types_are_named_as_the_reason(rank: int, n_ranks: int) -> None:
    """torch makes DTensors of parameters that have such types (from 2.14)."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return
    mesh = harness.cached_mesh((n_ranks, 1), ("dp", "tp"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    fsdp.fully_shard(layer, mesh=mesh["dp"])
    (param,) = layer._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert "DTensor" in _torchs_own.why_not_a_tensor(param)
    param.is_spmd_types = True
    assert _torchs_own.why_not_a_tensor(param) == "weight has spmd types"


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
def test_replaced_on_one_rank_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """The others learn of it and hand over too."""
    pair = Pair(Net, models.shard_blocks)
    with models.function_replaced() if rank == n_ranks - 1 else contextlib.nullcontext():
        pair.step(data(rank, 0))
    pair.step(data(rank, 1))
    pair.skip_if_same()
    assert is_torchs(pair)
    reason = pair.ours.model._get_fsdp_state()._fsdp_param_groups[0].why_torchs
    assert "was replaced" in reason
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
def test_replaced_on_one_rank_between_steps(rank: int, n_ranks: int) -> None:
    """Then the others are in their forward already, and are told at once; so is that rank."""
    model = after_a_step(rank)
    if model is None:
        return
    if rank == 0:
        with models.function_replaced():
            for _ in range(2):
                with pytest.raises(RuntimeError, match="rank 0 has left.*and rank 1 goes on"):
                    model(data(rank))
            dist.barrier()
            dist.barrier()
            check_torchs(model, rank)
        return
    model.reshard()
    before = [parameter._local_tensor.clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 0 has left.*set on all ranks"):
            model(data(rank))
    model.reshard()
    after = [parameter._local_tensor for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    dist.barrier()
    with models.function_replaced():
        dist.barrier()
        check_torchs(model, rank)


def check_torchs(model: Any, rank: int, n_ranks: int = 2, build: Any = Net) -> None:
    """Once all ranks have left the core they go on."""
    plain = Plain(build)
    model.reshard()
    model.zero_grad()
    model(data(rank)).sum().backward()
    assert models.is_torchs(model)
    model.reshard()
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
    with models.function_replaced():
        check_torchs(model, rank, n_ranks, Picky)


@on_ranks(2)
def test_each_rank_tries_once_more(rank: int, n_ranks: int) -> None:
    """A call that met the error waits, when it is repeated, for those that still have to leave."""
    model = after_a_step(rank)
    if model is None:
        return
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(models.function_replaced())
        try:
            model(data(rank))
        except RuntimeError as error:  # rank 0 may also come when the other one has left already
            assert "rank 0 has left" in str(error)
            if rank == 1:
                stack.enter_context(models.function_replaced())
            model(data(rank))
        check_torchs(model, rank)
