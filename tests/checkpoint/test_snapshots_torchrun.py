"""Snapshots under torchrun --max-restarts: a run that is killed again and again."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from test_snapshots import N_STEPS, undisturbed

import fsdp_c
from fsdp_c._snapshots import _files

pytestmark = pytest.mark.usefixtures("quick_scripts")
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "killed.py"
TIMEOUT_S = 300


def torchrun(n_ranks: int, n_restarts: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(n_ranks), "--max-restarts", str(n_restarts)]
    return subprocess.run(
        [*command, str(SCRIPT), *arguments],
        # Without the last one gloo fails about every other restart.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_killed_again_and_again(tmp_path: Path) -> None:
    n_ranks, deaths = 2, ["1:forward:1", "0:copy:3"]
    done = torchrun(n_ranks, len(deaths), str(tmp_path), *deaths)
    assert done.returncode == 0, done.stdout[-4000:]
    for rank, (losses, found) in enumerate(undisturbed(n_ranks, "sharded")):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == found
        rows = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        n_done = 0
        for life in range(len(deaths) + 1):
            steps = [step for number, step, _ in rows if number == life]
            # At most one step is made again. A life may end before any is: gloo fails at times.
            assert not steps or n_done - 1 <= steps[0] <= n_done, rows
            n_done = max([n_done, *(step + 1 for step in steps)])
        assert all(loss == losses[step] for _, step, loss in rows)
        assert {step for _, step, _ in rows} == set(range(N_STEPS))
    ours = [file for file in _files.find() if file.owner and file.owner.run == str(SCRIPT)]
    # Another one of these tests may run beside this one.
    assert [file.path for file in ours if file.owner and _files.is_over(file.owner)] == []


def meet(rank: int, n_ranks: int, folder: Path) -> None:
    """An agent that is new has started its ranks for the first time, the other one has again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        with fsdp_c.Snapshots(torch.nn.Linear(2, 2), folder=folder) as snapshots:
            assert snapshots.resume() == 0
            snapshots.take(1)


def test_agents_count_restarts_of_their_own_host(tmp_path: Path) -> None:
    outcomes = run_ranks(meet, 2, tmp_path, fresh=True, timeout=60)
    assert all(outcome.ok for outcome in outcomes), outcomes


def warned(rank: int, n_ranks: int, folder: Path, uses_agents: bool, n_restarts: int) -> list[str]:
    """What `resume()` says of torchrun's store."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", str(n_restarts))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(uses_agents))
        with fsdp_c.Snapshots(torch.nn.Linear(2, 2), folder=folder) as snapshots:
            snapshots.resume()
    return [str(warning.message) for warning in caught if "store of" in str(warning.message)]


@pytest.mark.parametrize(("uses_agents", "n_restarts"), [(True, 3), (True, 0), (False, 3)])
def test_store_of_dead_processes(tmp_path: Path, uses_agents: bool, n_restarts: int) -> None:
    outcomes = run_ranks(warned, 2, tmp_path, uses_agents, n_restarts, fresh=True, timeout=60)
    assert all(outcome.ok for outcome in outcomes), outcomes
    first, *others = [outcome.value for outcome in outcomes]
    assert others == [[]]
    assert len(first) == (uses_agents and n_restarts > 0)
    assert all("--rdzv-backend=c10d --rdzv-endpoint" in text for text in first)
