"""fully_shard over several hosts: what is compared with torch on one host, over rails; the same
bits in each run; ranks that die."""

import os
import signal
from typing import Any

import models
import pytest
import test_accumulation
import test_clip
import test_hsdp
import test_mixed_precision
import test_parity
import test_training
import torch
import torch.distributed as dist
from hosts import run_hosts
from parity import Pair
from torch.distributed.device_mesh import DeviceMesh

F32, BF16 = torch.float32, torch.bfloat16

# Functions of ranks that compare with torch's fully_shard, and their arguments.
BESIDE_TORCH = [
    (test_parity.test_reshard_after_forward, "shard_blocks", True),
    (test_parity.test_reshard_after_forward, "shard_blocks", False),
    (test_parity.test_branches,),
    (test_parity.test_tiny_parameters,),
    (test_hsdp.test_mixed_precision,),
    (test_mixed_precision.test_dtypes, F32, BF16, BF16),
    (test_mixed_precision.test_many_dtypes_in_a_unit, BF16),
    (test_accumulation.test_no_sync, True),
    (test_accumulation.test_post_accumulate_hooks,),
    (test_clip.test_clip_grad_norm, 2.0, True),
    (test_clip.test_two_dimensions,),
    (test_training.test_two_forwards_then_backward,),
]


def name_of(value: Any) -> str:
    return "-".join([value[0].__name__, *map(str, value[1:])]) if isinstance(value, tuple) else ""


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)])
@pytest.mark.parametrize("of", BESIDE_TORCH, ids=name_of)
def test_beside_torch(of: tuple[Any, ...], hosts: tuple[int, ...]) -> None:
    if of[0] is test_clip.test_two_dimensions and hosts == (1, 1):
        pytest.skip("one host is one dimension of two")
    run_hosts(of[0].on_rank, hosts, *of[1:], timeout=120)


# Every unit travels alone: its gather in backward begins, and its sum ends, while others compute.
ALONE = {"FSDP_C_BATCH_BYTES": "1"}


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1, 1)])
def test_units_that_travel_meanwhile_beside_torch(hosts: tuple[int, ...]) -> None:
    run_hosts(each_beside_torch, hosts, timeout=240, env=ALONE)


def each_beside_torch(rank: int, n_ranks: int) -> None:
    for function, *args in BESIDE_TORCH:
        if function is not test_clip.test_two_dimensions:
            function.on_rank(rank, n_ranks, *args)


@pytest.mark.parametrize("of", BESIDE_TORCH[:5], ids=name_of)
def test_uneven_hosts_beside_torch(of: tuple[Any, ...]) -> None:
    run_hosts(of[0].on_rank, (2, 1, 1), *of[1:], timeout=120)


def train_replicas(rank: int, n_ranks: int, shards_stay: bool) -> list[str]:
    import fsdp_c

    ranks = torch.arange(4).view(2, 2)
    mesh = DeviceMesh(
        "cpu", ranks if shards_stay else ranks.T, mesh_dim_names=("replicate", "shard")
    )

    def shard(model: Any, api: Any) -> None:
        models.shard_blocks(model, api, mesh=mesh)

    pair = Pair(models.Net, shard)
    for step in range(3):
        pair.step(models.data(rank, step))
    pair.check_state_dict()
    return sorted({row.road for row in fsdp_c.explain(pair.ours.model).units})


@pytest.mark.parametrize("shards_stay", [True, False])
def test_replicas_on_other_hosts_or_on_one(shards_stay: bool) -> None:
    """Shards and replicas: one of them is inside of hosts, the other between."""
    for roads in run_hosts(train_replicas, (2, 2), shards_stay):
        assert roads == ["core over rails between 2 hosts of 1 rank and shared memory"]


def bits(rank: int, n_ranks: int) -> bytes:
    import fsdp_c

    torch.manual_seed(0)
    model = models.Net()
    models.shard_blocks(model, fsdp_c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model.zero_grad()
        model(models.data(rank, step)).square().mean().backward()
        optimizer.step()
    whole = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
    return torch.cat(whole).numpy().tobytes()


@pytest.mark.parametrize("hosts", [(2, 2), (2, 1, 1)])
def test_the_same_bits_in_each_run(hosts: tuple[int, ...]) -> None:
    first, again = run_hosts(bits, hosts), run_hosts(bits, hosts)
    assert len({*first, *again}) == 1


def lose(rank: int, n_ranks: int, victim: int) -> str:
    import fsdp_c

    model = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(3):
            model(models.data(rank, step)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("hosts", "victim"), [((1, 1), 1), ((2, 2), 3), ((2, 2), 0)])
def test_killed_rank(hosts: tuple[int, ...], victim: int) -> None:
    outcomes = run_hosts(lose, hosts, victim, timeout=40, fresh=True)
    texts = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert all(texts), outcomes
    of_rail = [text for text in texts if f"for rank {victim} (host host" in text]
    assert of_rail, texts


def programs(rank: int, n_ranks: int, seeds: list[int], kind: str) -> list[str]:
    from differential import execute

    report = execute.run_seeds(rank, n_ranks, seeds, "", kind)
    return [f"seed {f.seed}: {f.kind} at {f.line}\n{f.text}" for f in report.failures]


@pytest.mark.parametrize("kind", ["", "features"])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)])
def test_random_programs_equal_torch(hosts: tuple[int, ...], kind: str) -> None:
    """As `python -m tests.differential --hosts 2,2` runs any of them."""
    for found in run_hosts(programs, hosts, list(range(600, 606)), kind, timeout=100):
        assert not found, "\n".join(found)
