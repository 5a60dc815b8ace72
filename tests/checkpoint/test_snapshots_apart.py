"""Ranks that do not take the same snapshots are named, on both sides, long before a time-out."""

import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn, optim

import fsdp_c

SKIPS_ONE, STOPS, DOUBLES, COUNTS_ON = "skips one", "stops", "doubles", "counts on"


def training(kind: str) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "sharded":
        fsdp_c.fully_shard(model)
    return model, optim.SGD(model.parameters(), lr=0.1)


def steps_of(step: int, mistake: str) -> list[int]:
    """Which are taken after a step by the rank that is wrong."""
    if mistake == SKIPS_ONE:
        return [] if step == 3 else [step]
    if mistake == STOPS:
        return [] if step >= 3 else [step]
    if step == 3:
        return [3, 3] if mistake == DOUBLES else [3, 4]
    return [step + (mistake == COUNTS_ON and step > 3)]


def one_is_wrong(rank: int, n_ranks: int, *args: Any) -> None:
    """As a script does, the process ends with its exception."""
    try:
        train(rank, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def train(rank: int, kind: str, mistake: str, folder: Path) -> None:
    model, optimizer = training(kind)
    with fsdp_c.Snapshots(model, optimizer, folder=folder) as snapshots:
        assert snapshots.resume() == 0
        for step in range(1, 8):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for taken in steps_of(step, mistake) if rank == 1 else [step]:
                snapshots.take(taken)


def errors(kind: str, mistake: str, folder: Path, **options: Any) -> list[str]:
    outcomes = run_ranks(one_is_wrong, 2, kind, mistake, folder, fresh=True, timeout=40, **options)
    return [outcome.output.strip().splitlines()[-1] for outcome in outcomes]


OTHER_STEPS = r"of step \d on rank \d is of step \d on rank \d: .* once after the same steps"
GONE_ON = "rank 1 has gone on to another update without the snapshot of step 3, which rank 0 has"
IN_TAKE = r"rank \d is in a collective \(.*, in Snapshots\.take\(step=\d\)\) that rank \d has not"


@pytest.mark.parametrize("mistake", [SKIPS_ONE, STOPS, DOUBLES, COUNTS_ON])
def test_of_a_sharded_model(mistake: str, tmp_path: Path) -> None:
    found = errors("sharded", mistake, tmp_path)
    wanted = {SKIPS_ONE: f"{OTHER_STEPS}|{GONE_ON}", STOPS: GONE_ON}.get(mistake, IN_TAKE)
    assert any(re.search(wanted, error) for error in found), found
    ends = "ended its script|was killed, or left|exited or was killed|an exception has ended"
    others = f"{OTHER_STEPS}|{GONE_ON}|{IN_TAKE}|{ends}"
    assert all(re.search(others, error) for error in found), found


@pytest.mark.parametrize("mistake", [SKIPS_ONE, DOUBLES])
def test_of_a_plain_model(mistake: str, tmp_path: Path) -> None:
    """No wait of its steps tells; its snapshots' steps do."""
    found = errors("plain", mistake, tmp_path)
    assert any(re.search(OTHER_STEPS, error) for error in found), found


def all_call_it_twice(rank: int, n_ranks: int, folder: Path) -> None:
    model, optimizer = training("sharded")
    with fsdp_c.Snapshots(model, optimizer, folder=folder) as snapshots:
        snapshots.resume()
        for step in range(1, 4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            snapshots.take(step)
            snapshots.take(step)


def test_all_ranks_may_call_it_twice(tmp_path: Path) -> None:
    run_ranks(all_call_it_twice, 2, tmp_path)
