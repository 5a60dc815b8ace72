"""Benchmarks at tiny sizes: each gives a table and a JSON record, and wrong results stop each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TINY = {
    "host_overhead": ["--units", "2,3", "--ranks", "2", "--rounds", "2"],
    "collectives": ["--sizes", "1024,4096", "--ranks", "2", "--rounds", "2"],
    "step": ["--layers", "1", "--width", "32", "--heads", "2", "--vocabulary", "50"]
    + ["--batch", "2", "--tokens", "8", "--rounds", "2"],
    "memory": ["--depths", "2", "--width", "64", "--layers", "2", "--steps", "3"],
}
# What a rank's part of the work is called in the rows, and how many rows the tiny sizes give.
N_ROWS = {"host_overhead": 4, "collectives": 4, "step": 2, "memory": 2}

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


@pytest.mark.parametrize("name", TINY)
def test_table_and_json(name: str, tmp_path: Path) -> None:
    done = run_bench(f"bench_{name}.py", *TINY[name], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = only_json(tmp_path)
    assert record["bench"] == name
    assert {"python", "torch", "fsdp_c"} <= set(record["versions"])
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["cpu_model"]
    assert f"bench_{name}.py" in record["command"] and record["date"]
    assert len(record["rows"]) == N_ROWS[name]
    header = table_lines(done.stdout)[0]
    assert "fsdp_c" in header and ("gloo" if name == "collectives" else "torch") in header
    for row in record["rows"]:
        if name == "memory":
            assert row["above_empty_mib"] > 0 and row["steps"] == 3
            assert all(one["samples"] >= 1 for one in row["by_rank"])
        else:
            for times in row["times"].values():
                assert times["samples"] >= 2
                assert 0 < times["min_us"] <= times["median_us"] <= times["p90_us"]


@pytest.mark.parametrize("name", ["host_overhead", "collectives", "step"])
def test_wrong_results_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "wrong_results.py").write_text(WRONG)
    out = tmp_path / "out"
    arguments = [*TINY[name], "--ranks", "1", "--impl", "torch,wrong_results", "--out", str(out)]
    done = run_bench(f"bench_{name}.py", *arguments, path=tmp_path)
    assert done.returncode != 0
    assert "verification failed: wrong_results" in done.stderr, done.stderr
    assert not table_lines(done.stdout) and not out.exists()


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


def test_run_writes_the_tables_too(tmp_path: Path) -> None:
    arguments = ["--quick", "--only", "collectives", "--impl", "torch", "--out", str(tmp_path)]
    done = run_bench("run.py", *arguments, "--sizes", "1024", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("collectives_*_quick.md")
    written = path.read_text()
    assert "run.py --quick" in written
    assert table_lines(written) == table_lines(done.stdout) != []
    assert only_json(tmp_path)["quick"] is True


def test_missing_implementation_is_one_sentence(tmp_path: Path) -> None:
    done = run_bench("run.py", "--only", "step", "--impl", "no_such_module", "--out", str(tmp_path))
    assert done.returncode != 0
    assert "no module no_such_module" in done.stderr and "Traceback" not in done.stderr
