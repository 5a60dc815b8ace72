"""Units with replicas whose gradients are added up over a process group, beside torch's."""

import functools
from typing import Any

import harness
import models
import pytest
import torch.distributed as dist
from models import Branches, Net, data
from parity import EXACT, Pair, Plain, Tolerance, compare_values, full, on_ranks, total
from test_batches import messages
from test_hsdp import accumulate
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from fsdp_c._comm import _transport

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


@functools.cache
def mesh_of(over: str) -> DeviceMesh:
    """Two replicas of two shards each; `over` messages, or replicas only."""
    names = ("replicate", "shard")
    groups = [
        [dist.new_group(ranks) for ranks in parts][dist.get_rank() in parts[1]]
        for parts in ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    ]
    mesh = DeviceMesh.from_group(groups, "cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    with messages():
        _transport.transport_for(groups[0])
        if over == "all":
            _transport.transport_for(groups[1])
    return mesh


def shard(model: nn.Module, fsdp: Any, over: str = "all", **options: Any) -> None:
    models.shard_blocks(model, fsdp, mesh=mesh_of(over), **options)


@pytest.mark.parametrize("over", ["all", "replicas"])
@on_ranks(4)
def test_training(rank: int, n_ranks: int, over: str) -> None:
    """Sums of two by two have torch's bits."""

    def build() -> nn.Module:
        model = Net()
        model.blocks[1].up.requires_grad_(False)
        return model

    for options in ({}, {"reshard_after_forward": False}):
        pair = Pair(build, functools.partial(shard, over=over, **options), tolerance=EXACT)
        for step in range(4):  # frozen at set-up, and again later
            if step:
                on = step != 2
                pair.do(lambda side, on=on: side.model.blocks[1].up.requires_grad_(on))
            pair.step(data(rank, step))


@pytest.mark.parametrize("over", ["all", "replicas"])
@on_ranks(4)
def test_partial_reductions(rank: int, n_ranks: int, over: str) -> None:
    """Held for the last micro-batch, which brings the replicas together."""
    accumulate(Pair(Net, functools.partial(shard, over=over), tolerance=EXACT), rank)


@on_ranks(4)
def test_parameters_that_replicas_do_not_use(rank: int, n_ranks: int) -> None:
    """Under torch ranks that use other parameters of a unit wait for each other in vain."""
    plain = Plain(Branches)
    harness.seed_everything(1)
    model = Branches()
    fsdp_c.fully_shard(model, mesh=mesh_of("all"))
    uses = [(0, 1), (0, 1), (1,), (1,)]
    with messages() as calls:
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            total(model(data(rank, micro), use=uses[rank])).backward()
            losses = [total(plain.model(data(r, micro), use=uses[r])) for r in range(n_ranks)]
            plain.backward(losses, n_ranks)
        assert calls["reduce_scatter"] == 2, calls
        assert calls["all_reduce"] == 1, calls
    for (name, ours), theirs in zip(
        model.named_parameters(), plain.model.parameters(), strict=True
    ):
        if ours.grad is None:
            assert "blocks.2" in name or (rank > 1 and "blocks.0" in name), name
        else:
            compare_values(full(ours.grad), theirs.grad, CLOSE, name)


@on_ranks(4)
def test_collectives(rank: int, n_ranks: int) -> None:
    """One per unit and direction of its mesh, whatever it has frozen."""
    model = Net(own=False)
    model.blocks[0].up.requires_grad_(False)
    shard(model, fsdp_c)
    with messages() as calls:
        for step in range(2):
            calls.update(dict.fromkeys(calls, 0))
            model(data(rank, step)).square().sum().backward()
            assert calls == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 3}, calls


@on_ranks(4)
def test_parameters_that_are_trained_later(rank: int, n_ranks: int) -> None:
    """From the second micro-batch of a step on; what the first has left stays."""
    plain = Plain(Net)
    harness.seed_everything(1)
    model = Net()
    for each in (plain.model, model):
        each.blocks[1].up.requires_grad_(False)
    shard(model, fsdp_c)
    for micro in range(3):
        model.set_requires_gradient_sync(micro > 0)
        model.set_requires_all_reduce(micro > 1)
        total(model(data(rank, micro))).backward()
        plain.backward([total(plain.model(data(r, micro))) for r in range(n_ranks)], n_ranks)
        for each in (plain.model, model):
            each.blocks[1].up.requires_grad_(True)
    for (name, ours), theirs in zip(
        model.named_parameters(), plain.model.parameters(), strict=True
    ):
        compare_values(full(ours.grad), theirs.grad, CLOSE, name)


def replicate_over_messages(rank: int, n_ranks: int) -> None:
    """Beside the mean over ranks of what the plain model has."""
    plain = Plain(Net)
    harness.seed_everything(1)
    model = Net()
    fsdp_c.install()
    try:
        for block in model.blocks:
            replicate(block)
        replicate(model)
    finally:
        fsdp_c.uninstall()
    for step in range(2):
        model.zero_grad()
        model(data(rank, step)).sum().backward()
        plain.model.zero_grad()
        plain.backward([plain.model(data(r, step)).sum() for r in range(n_ranks)], n_ranks)
        for name, parameter in plain.model.named_parameters():
            mine = full(model.get_parameter(name).grad)
            compare_values(mine, parameter.grad, CLOSE, name)
    assert {row.road for row in fsdp_c.explain(model).units} == {"core over messages"}


def test_replicate_over_messages() -> None:
    """Its shards are a group of one, which is no process group that could send anything."""
    harness.run_ranks(replicate_over_messages, 2, env={"FSDP_C_TRANSPORT": "callback"})
