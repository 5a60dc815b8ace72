"""Units whose parameters are sharded over several meshes: each mesh has a group of its own."""

import copy
import re
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
from behaviour.records import collectives
from behaviour.test_meshes import Layers, expert_info, shard_experts
from differential.ways import SAID, TRANSPORTS, WAYS, Trial
from harness import cached_mesh
from models import Net, data
from parity import Pair, Side, Tolerance, on_ranks, total
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)

import fsdp_c
from fsdp_c._comm import _device

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def vectors_apart(info: Any, **options: Any) -> Any:
    def place(parameter: Any) -> Any:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    def shard(model: Any, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp, shard_placement_fn=place, **options)

    return shard


def runs_on_core(side: Side) -> bool:
    return all(row.road.startswith("core over") for row in fsdp_c.explain(side.model).units)


def info_of(kind: str, n_ranks: int) -> Any:
    if kind == "hsdp":
        return HSDPMeshInfo(cached_mesh((2, n_ranks // 2), ("replica", "experts")), 1, 0)
    if kind == "smaller":
        mesh = cached_mesh((2, n_ranks // 2), ("replica", "experts"))
        return FSDPMeshInfo(mesh["experts"], 0)
    return expert_info(n_ranks)


@pytest.mark.parametrize("kind", ["same", "hsdp", "smaller"])
@on_ranks(2, 4)
def test_training(rank: int, n_ranks: int, kind: str) -> None:
    pair = Pair(Net, vectors_apart(info_of(kind, n_ranks)), tolerance=CLOSE)
    pair.check_state_dict()
    models.train(pair, rank)
    pair.check_state_dict()
    pair.skip_if_same()
    assert runs_on_core(pair.ours)


@on_ranks(2)
def test_reduced_precision_and_kept_parameters(rank: int, n_ranks: int) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mp_policy": policy, "reshard_after_forward": False}
    pair = Pair(Net, vectors_apart(expert_info(n_ranks), **options), tolerance=CLOSE)
    for step in range(2):
        pair.step(data(rank, step).bfloat16())


@on_ranks(2)
def test_unsharded_by_hand_before_the_first_forward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, vectors_apart(expert_info(n_ranks)))
    pair.do(lambda side: side.model.blocks[1].unshard())
    pair.do(lambda side: side.model.blocks[2].unshard())
    pair.do(lambda side: side.model.blocks[2].reshard())
    for step in range(2):
        pair.step(data(rank, step))
    pair.skip_if_same()
    assert runs_on_core(pair.ours)


@on_ranks(2)
def test_members_of_a_grouped_unit(rank: int, n_ranks: int) -> None:
    info = expert_info(n_ranks)

    def place(parameter: Any) -> Any:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    def shard(model: Any, fsdp: Any) -> None:
        fsdp.fully_shard([model.blocks[0], model.blocks[2]], shard_placement_fn=place)
        fsdp.fully_shard(model, shard_placement_fn=place)

    pair = Pair(Net, shard)
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("way", ["default", "explicit"])
@on_ranks(2)
def test_order_of_collectives_in_sight(rank: int, n_ranks: int, way: str) -> None:
    """Group by group in order; in backward the unit before is gathered ahead, last group first."""
    pair = Pair(Layers, shard_experts(expert_info(n_ranks)), tolerance=CLOSE)

    def prefetch(side: Side) -> None:
        layers = side.model.layers
        layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
        layers[2].set_modules_to_backward_prefetch([layers[1], layers[0]])

    def seen(side: Side) -> Any:
        with collectives(sizes=True) as calls:
            out = side.model(data(rank))
            calls.append(("backward", torch.float32, 0))
            total(out).backward()
        return [(name, size) for name, _, size in calls]

    if way == "explicit":
        pair.do(prefetch)
    for _ in range(2):
        calls = pair.both(seen)
    assert len(calls) == 2 * 3 * 2 + 1 + 2 * 3
    pair.skip_if_same()
    assert runs_on_core(pair.ours)


def make_trial(rank: int, n_ranks: int) -> Trial:
    torch.manual_seed(0)
    model: Any = models.Branches()
    plain = copy.deepcopy(model)
    vectors_apart(expert_info(n_ranks))(model, harness.implementation())
    return Trial(model, plain, list(model.blocks), lambda step: data(rank, step))


def differ(rank: int, n_ranks: int) -> dict[str, str]:
    """The last rank does something else in one step; each time with a new model."""
    found = {}
    for name in ("loss_passed_over", "backward_left_out"):
        trial = make_trial(rank, n_ranks)
        try:
            for step in range(5):
                if step == 2 and rank == n_ranks - 1:
                    WAYS[name](trial, step)
                else:
                    trial.step(step)
            dist.barrier()
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_differ_are_named(transport: str) -> None:
    if harness.implementation() is torch.distributed.fsdp:
        pytest.skip("torch hangs here")
    for answer in harness.run_ranks(differ, 2, apart=True, env=TRANSPORTS[transport], timeout=60):
        for name, text in answer.items():
            assert re.search(SAID[name], text, re.DOTALL), (name, text)


@on_ranks(2)
def test_ranks_that_place_parameters_differently(rank: int, n_ranks: int) -> None:
    fsdp = harness.implementation()
    if fsdp is torch.distributed.fsdp:
        return
    info = expert_info(n_ranks)
    harness.seed_everything(1)
    model = Net()
    if rank == 0:
        models.shard_blocks(model, fsdp)
    else:
        vectors_apart(info)(model, fsdp)
    with pytest.raises(
        RuntimeError, match=r"rank 1 shards FSDP unit '.root.' over process group .*ranks \[0\]"
    ):
        model(data(rank))
    dist.barrier()


@on_ranks(2)
def test_forward_and_backward_that_raise(rank: int, n_ranks: int) -> None:
    """On all ranks; the next step is as if nothing had been."""
    pair = Pair(Net, vectors_apart(expert_info(n_ranks)))
    pair.step(data(rank))

    def raise_in_forward(side: Side) -> None:
        handle = side.model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            side.model(data(rank))
        handle.remove()
        side.model.reset_iter_state()

    pair.do(raise_in_forward)
    pair.step(data(rank, 1))


@on_ranks(2)
def test_on_the_schedule_of_devices(rank: int, n_ranks: int) -> None:
    with _device.on_cpu():
        pair = Pair(Net, vectors_apart(expert_info(n_ranks)))
        for step in range(2):
            pair.step(data(rank, step))
        pair.skip_if_same()
        group, vectors = pair.ours.model.blocks[0]._get_fsdp_state()._fsdp_param_groups
        assert _device.is_taken(group) and _device.is_taken(vectors)
