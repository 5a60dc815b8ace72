"""Benchmarks at tiny sizes: each gives a table and a JSON record, and wrong results stop each.

Most run in forked ranks of the tests' harness, which have imported torch already; those through
torchrun show that it starts them too.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.usefixtures("quick_scripts")
TINY = {
    "host_overhead": ["--units", "2,3", "--ranks", "2", "--pairs", "2"],
    "features": ["--only", "plain,extension,mode", "--units", "2", "--pairs", "2"],
    "collectives": ["--sizes", "1024,4096", "--ranks", "2", "--rounds", "2"],
    "step": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--batch", "2", "--tokens", "8", "--rounds", "2"],
    "snapshots": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--tokens", "8", "--pairs", "2", "--block-s", "0.1"],
    "optim": ["--units", "1", "--layers", "2", "--ranks", "2", "--rounds", "2"]
    + ["--large", "4096"],
    "strategies": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "64"]
    + ["--ranks", "2", "--rounds", "2"],
    "memory": ["--depths", "2", "--width", "64", "--layers", "2", "--steps", "3"],
    "owner": ["--layers", "1", "--width", "32", "--rounds", "2"],
    "waits": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--tokens", "8", "--ranks", "2", "--precisions", "fp32", "--steps", "2"],
    "verify": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--tokens", "8", "--rounds", "2"],
    "trace": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--tokens", "8", "--ranks", "2", "--starts", "1", "--steps", "2"],
}
# What a rank's part of the work is called in the rows, and how many rows the tiny sizes give.
N_ROWS = {
    "host_overhead": 4,
    "features": 3,
    "collectives": 4,
    "step": 2,
    "snapshots": 1,
    "optim": 38,
    "strategies": 6,
    "memory": 2,
    "owner": 4,
    "waits": 3,
    "verify": 2,
    "trace": 4,
}
BY_TORCHRUN = "collectives"
DIFFERENCES = ("host_overhead", "features", "snapshots")

# Gradients flow back through each unit three times too large; gathered values are right only once.
WRONG = '''
"""An implementation that computes something else."""
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

def spoil(module, inputs, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: 3 * gradient)

def fully_shard(module, **options):
    fsdp.fully_shard(module, **options)
    module.register_forward_hook(spoil)
    return module

class Communicator:
    calls = 0
    def all_gather(self, output, input):
        dist.all_gather_into_tensor(output, input)
        self.calls += 1
        if self.calls > 1:
            output[-1] += 1
    def reduce_scatter(self, output, input, divisor=1.0):
        dist.reduce_scatter_tensor(output, input)
    def close(self):
        pass
'''


def run_bench(
    script: str, *arguments: str, path: Path | None = None
) -> subprocess.CompletedProcess:
    environment = dict(os.environ)
    environment.pop("BENCH_ROWS_FILE", None)
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def only_json(folder: Path) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def be_a_bench_rank(rank: int, n_ranks: int, file: str, arguments: list[str], rows: Path) -> None:
    """What torchrun starts for a benchmark, in a process that has imported torch already."""
    dist.destroy_process_group()
    sys.path.insert(0, str(BENCHMARKS))
    measuring = importlib.import_module("measuring")
    steps_per_block = measuring._steps_per_block
    measuring._steps_per_block = lambda *args: min(steps_per_block(*args), 3)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", BENCH_ROWS_FILE=str(rows))
    sys.argv[1:] = arguments
    runpy.run_path(file, run_name="__main__")


@pytest.fixture(scope="module")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """That of the benchmarks, with forked ranks."""
    rows = tmp_path_factory.mktemp("ranks") / "rows"

    def launch_ranks(bench: Any, launch: Any, argv: list[str], limit_s: float) -> Any:
        arguments = [*argv, *launch.argv]
        rows.unlink(missing_ok=True)
        run_ranks(be_a_bench_rank, launch.ranks, bench.file, arguments, rows, apart=True)
        return json.loads(rows.read_text())

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        module = importlib.import_module("measuring")
        patch.setattr(module, "launch_ranks", launch_ranks)
        yield module


@pytest.mark.parametrize("name", [name for name in TINY if name != BY_TORCHRUN])
def test_table_and_json(
    name: str,
    tmp_path: Path,
    measuring: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = f"bench_{name}.py"
    monkeypatch.setattr(sys, "argv", [script, *TINY[name], "--out", str(tmp_path)])
    measuring.main(importlib.import_module(f"bench_{name}").BENCH)
    check_results(name, script, tmp_path, capsys.readouterr().out)


def test_table_and_json_by_torchrun(tmp_path: Path) -> None:
    arguments = ["--quick", "--only", BY_TORCHRUN, *TINY[BY_TORCHRUN], "--out", str(tmp_path)]
    done = run_bench("run.py", *arguments)
    assert done.returncode == 0, done.stderr
    check_results(BY_TORCHRUN, "run.py", tmp_path, done.stdout)


def check_results(name: str, script: str, folder: Path, stdout: str) -> None:
    record = only_json(folder)
    assert record["bench"] == name
    assert record["quick"] == (script == "run.py")
    assert {"python", "torch", "fsdp_c"} <= set(record["versions"])
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["cpu_model"]
    assert script in record["command"] and record["date"]
    if script == "run.py":  # it writes the tables too
        (path,) = folder.glob("collectives_*_quick.md")
        assert "run.py --quick" in path.read_text()
        assert table_lines(path.read_text()) == table_lines(stdout) != []
    assert len(record["rows"]) == N_ROWS[name]
    header = table_lines(stdout)[0]
    others = {"collectives": "gloo", "owner": "full_tensor", "waits": "waited", "verify": "checked"}
    others |= {"snapshots": "torch: save", "trace": "traced"}
    assert others.get(name, "torch") in header
    assert "fsdp_c" in header or name in ("owner", "snapshots", "waits", "verify", "trace")
    for row in record["rows"]:
        if name == "memory":
            assert row["above_empty_mib"] > 0 and row["steps"] == 3
            assert all(one["samples"] >= 1 for one in row["by_rank"])
        elif name == "verify":
            assert row["samples"] == 4 and all(us > 0 for us in row["step_us"].values())
        elif name == "trace":
            assert row["samples"] == 2 and 0 < row["min_us"] <= row["median_us"]
        elif name == "waits":
            assert row["step_us"] > 0 and row["due_us"] >= 0
        else:
            for times in row["times"].values():
                assert times["samples"] >= 2
                assert times["min_us"] <= times["median_us"] <= times["p90_us"]
                if name in DIFFERENCES:  # of which noise makes some negative
                    assert times["base_us"] > 0 and times.get("waited_us", 0) >= 0
                else:
                    assert times["min_us"] > 0


def test_what_a_case_adds_is_told_from_a_drift(
    measuring: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that gets slower by the block; the case's is 5 us above its neighbour's."""
    base, case = measuring.Case(lambda: None), measuring.Case(lambda: None)
    order = []

    def block(one: Any, n_steps: int) -> list[float]:
        order.append(one)
        slower = (len(order) - 1) // 2 * 100.0  # of both blocks of a pair
        return [slower + (5 if one is case else 0)] * n_steps

    monkeypatch.setattr(measuring, "_block", block)
    monkeypatch.setattr(measuring, "_steps_per_block", lambda *_: order.clear() or 3)
    monkeypatch.setattr(measuring, "max_over_ranks", lambda values: values)
    monkeypatch.setattr(measuring, "agreed_max", lambda value: value)
    found = measuring.measure_added(base, {"case": case}, 60, 0.05, most_pairs=4)
    assert order == [base, case, case, base] * 2
    assert found["case"]["median_us"] == found["case"]["p90_us"] == 5
    assert found["case"]["samples"] == 4


def test_wrong_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong_results.py").write_text(WRONG)
    out = tmp_path / "out"
    arguments = [*TINY["step"], "--ranks", "1", "--impl", "torch,wrong_results", "--out", str(out)]
    done = run_bench("bench_step.py", *arguments, path=tmp_path)
    assert done.returncode != 0
    assert "verification failed: wrong_results" in done.stderr, done.stderr
    assert not table_lines(done.stdout) and not out.exists()


@pytest.mark.parametrize("name", ["host_overhead", "collectives"])
def test_wrong_results_stop_a_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_results.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [*TINY[name], "--ranks", "1", "--impl", "torch,wrong_results"]
    file = str(BENCHMARKS / f"bench_{name}.py")
    (outcome,) = run_ranks(be_a_bench_rank, 1, file, arguments, tmp_path / "rows", fresh=True)
    assert outcome.exit_code != 0
    assert "verification failed: wrong_results" in outcome.error + outcome.output
    assert not (tmp_path / "rows").exists()


def test_memory_of_runs_that_differ_is_refused() -> None:
    """Each implementation runs by itself here, so the comparison is one of rows."""

    def check(second_loss: float) -> subprocess.CompletedProcess:
        rows = [
            {"case": case, "units": 2, "ranks": 1, "by_rank": [{"losses": [1.0, loss]}]}
            for case, loss in (("torch", 0.5), ("fsdp_c", second_loss))
        ]
        program = f"import bench_memory; bench_memory.check({rows})".replace("nan", "float('nan')")
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)

    assert check(0.5).returncode == 0
    for wrong in (0.5001, float("nan")):
        assert "verification failed: 2 units, rank 0, step 1" in check(wrong).stderr


def test_missing_implementation_is_one_sentence(tmp_path: Path) -> None:
    done = run_bench("run.py", "--only", "step", "--impl", "no_such_module", "--out", str(tmp_path))
    assert done.returncode != 0
    assert "no module no_such_module" in done.stderr and "Traceback" not in done.stderr
