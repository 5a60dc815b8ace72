"""`make gpu-check` as far as it goes without a GPU: its cases, with the kernels on the host."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_scripts")
sys.path.append(str(ROOT / "tests" / "gpu"))

import gpu_check  # noqa: E402
import gpu_kernels_check  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_train  # noqa: E402
from gpu_cases import CASES, line  # noqa: E402
from gpu_kernels import KernelError, Kernels, Side, build_helper  # noqa: E402
from gpu_rows import Rows, read  # noqa: E402


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_helper(tmp_path_factory.mktemp("gpu-check"))


@pytest.fixture(scope="module")
def kernels(helper: Path) -> Kernels:
    return Kernels(helper, None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(kernels: Kernels, case: Callable[[Kernels], None]):
    case(kernels)


def test_refusals_are_told(kernels: Kernels):
    plan = kernels.plan()
    with pytest.raises(KernelError, match="no GPU kernel casts I32 to F32"):
        plan.add(line(4), Side(0, torch.float32), Side(1, torch.int32))
    plan.add(line(4), Side(0, torch.int32), Side(1, torch.int32))
    memory = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(KernelError, match="invalid argument"):
        plan.seal().finish([memory, memory], 1, False)


def test_failures_are_told(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def broken(kernels: Kernels) -> None:
        raise AssertionError("other bits")

    monkeypatch.setattr(gpu_kernels_check, "CASES", [broken])
    rows = Rows(tmp_path / "rows", "kernels")
    gpu_kernels_check.run_cases(kernels, rows)
    assert "FAILED broken: AssertionError: other bits" in capsys.readouterr().out
    assert [row["result"] for row in read(rows.path)] == ["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told(capsys: pytest.CaptureFixture[str]):
    assert gpu_check.main([]) == 2
    assert "sees no GPU here, nothing was checked" in capsys.readouterr().err


def script_of(tmp_path: Path, bodies: dict[str, str]) -> Path:
    """gpu-check's own, with parts of these bodies."""
    parts = ", ".join(f'Part("{name}", "", "parts", "{name}", 6)' for name in bodies)
    source = Path(gpu_check.__file__).read_text()
    begin = source.index("PARTS = [")
    end = source.index("\n]\n", begin)
    source = f"{source[:begin]}PARTS = [{parts}{source[end:]}"
    root = "Path(__file__).resolve().parent.parent.parent"
    assert root in source
    script = tmp_path / "check.py"
    script.write_text(source.replace(root, f"Path({str(ROOT)!r})"))
    functions = (f"def {name}(rows, device):\n    {body}\n" for name, body in bodies.items())
    (tmp_path / "parts.py").write_text("import os, time\n" + "".join(functions))
    return script


def test_parts_go_on_after_one_that_dies(tmp_path: Path):
    """What was found before is kept, and all of it is in the files."""
    bodies = {
        "raises": "raise ValueError(1)",
        "crashes": "rows.check('first', int); os.abort()",
        "hangs": "rows.figure('speeds', gb_s=1.5); time.sleep(60)",
        "skipped": "os.abort()",
        "good": "rows.check('last', int)",
    }
    command = [sys.executable, str(script_of(tmp_path, bodies)), "--device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--skip", "skipped"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "gpu")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    found = [(row["part"], row["check"], row["result"]) for row in rows if "check" in row]
    assert found == [
        ("raises", "the part itself", "failed"),
        ("crashes", "first", "passed"),
        ("crashes", "the part itself", "failed"),
        ("hangs", "the part itself", "failed"),
        ("good", "last", "passed"),
    ]
    tables = path.with_suffix(".md").read_text()
    assert "not done within 6 s" in tables and "### speeds" in tables
    assert "2 checks passed, 3 failed" in done.stdout


def test_every_part_is_there(helper: Path, tmp_path: Path):
    for part in gpu_check.PARTS:
        assert callable(getattr(importlib.import_module(part.module), part.run))
    bench = importlib.import_module("bench_cuda_kernels")
    rows = Rows(tmp_path / "rows", "copies")
    bench.measure(Kernels(helper, None), rows, [1 << 14], [4, 16])
    names = [row["kernel"] for row in read(rows.path)]
    assert names.count("AdamW, float32") == names.count("unpack, bfloat16, dim 1") == 2


def test_figures_run_over_host_memory(tmp_path: Path):
    """One of those that a GPU is given, started as there."""
    gpu_train.start("cpu", "GPT", str(tmp_path / "rows"))
    assert [row["side"] for row in read(tmp_path / "rows")] == ["bare", "torch", "fsdp_c"]


def test_a_rank_that_fails_is_told():
    with pytest.raises(gpu_ranks.RankError, match="rank 0 of 1 ended with status 1.*KeyError"):
        gpu_train.start("cpu", "no such case")
