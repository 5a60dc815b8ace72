"""Snapshots over several hosts, each with a memory of its own: what ranks tell by the store."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import run_hosts
from models import data
from test_snapshots import Net, adamw, units

import fsdp_c
from fsdp_c._snapshots import _files


class Killed(Exception):
    """Leaves the files as a killed process does."""


def train(snapshots: Any, model: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        model(data(rank, step, 4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.take(step + 1)


def go_on(rank: int, n_ranks: int) -> None:
    torch.manual_seed(rank)
    model = units(Net())
    optimizer = adamw(model)
    try:
        with fsdp_c.Snapshots(model, optimizer) as snapshots:
            assert snapshots.resume() == 0
            peers = snapshots._taking.peers
            assert peers is not None and peers._has_remote
            train(snapshots, model, optimizer, range(5), rank)
            raise Killed
    except Killed:
        pass
    kept = [param._local_tensor.clone() for param in model.parameters()]
    torch.manual_seed(rank)
    model = units(Net())
    optimizer = adamw(model)
    with fsdp_c.Snapshots(model, optimizer) as snapshots:
        assert snapshots.resume() == 5
        again = [param._local_tensor for param in model.parameters()]
        assert all(map(torch.equal, kept, again))
        train(snapshots, model, optimizer, range(5, 8), rank)
        dist.barrier()
    dist.barrier()
    assert _files.find() == []


def test_two_hosts() -> None:
    run_hosts(go_on, (1, 1), timeout=120)


def test_uneven_hosts() -> None:
    run_hosts(go_on, (2, 1), timeout=120)


def test_failure_is_told_by_the_store(tmp_path: Path) -> None:
    run_hosts(fail_on_one, (1, 1), timeout=120)


def fail_on_one(rank: int, n_ranks: int) -> None:
    """A rank without room: the other one keeps what they have in common."""
    model = units(Net())
    optimizer = adamw(model)
    with fsdp_c.Snapshots(model, optimizer) as snapshots:
        snapshots.resume()
        train(snapshots, model, optimizer, range(1), rank)
        if rank == 1:
            slot = snapshots._taking.slots[1]
            reserve, slot.reserve = slot.reserve, refuse
        train(snapshots, model, optimizer, range(1, 4), rank)
        snapshots.finish()
        steps = {found.step for found in _files.find()}
        assert steps == ({1, 4} if rank == 0 else {1, None}), steps
        if rank == 1:
            slot.reserve = reserve
        train(snapshots, model, optimizer, range(4, 6), rank)
        snapshots.finish()
        assert {found.step for found in _files.find()} == {5, 6}
        dist.barrier()


def refuse(n_bytes: int) -> None:
    raise _files.Unusable("no room")


def die_in_a_snapshot(rank: int, n_ranks: int, victim: int) -> tuple[str, float]:
    """What ended the wait for a rank that never told what became of its part; after how long."""

    def die(number: int, outcome: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    model = units(Net())
    snapshots = fsdp_c.Snapshots(model, adamw(model), name=f"{n_ranks}ranks")
    snapshots.resume()
    peers = snapshots._taking.peers
    assert peers is not None
    if rank == victim:
        peers.tell = die  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for step in range(1, 4):
            snapshots.take(step)
            snapshots.finish()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(("hosts", "victim"), [((1, 1), 1), ((1, 2), 2)])
def test_a_rank_that_dies_in_a_snapshot(hosts: tuple[int, ...], victim: int) -> None:
    env = {"FSDP_C_HOST_TIMEOUT": "4"}
    outcomes = run_hosts(die_in_a_snapshot, hosts, victim, env=env, timeout=40, fresh=True)
    assert outcomes.pop(victim).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.ok, outcome
        text, seconds = outcome.value
        assert f"for rank {victim}" in text or f"rank {victim} " in text, text
        assert seconds < 15, outcome  # not the process group's timeout
