"""`make gpu-check` as far as it goes without a GPU: its cases, with the kernels on the host."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "gpu"))

import gpu_check  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_train  # noqa: E402
from gpu_cases import CASES, line  # noqa: E402
from gpu_kernels import KernelError, Kernels, Side, build_helper  # noqa: E402


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


def test_failures_are_counted(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, capsys):
    def broken(kernels: Kernels) -> None:
        raise AssertionError("other bits")

    monkeypatch.setattr(gpu_check, "CASES", [broken])
    assert gpu_check.run_cases(kernels) == 1
    assert "FAILED broken: AssertionError: other bits" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told(
    helper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    loaded = Kernels(helper, None)
    built: list[str] = []
    monkeypatch.setattr(gpu_check, "build_helper", lambda folder: helper)
    monkeypatch.setattr(gpu_check, "Kernels", lambda helper, library: loaded)
    monkeypatch.setattr(gpu_check, "build_library", lambda: built.append("library"))
    assert gpu_check.main([]) == 2
    assert built == ["library"]
    assert "sees no GPU here: nothing was checked" in capsys.readouterr().err


def test_benchmark_runs(helper: Path, capsys: pytest.CaptureFixture[str]):
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench_cuda_kernels.py"))
    bench["main"](["--emulate"], helper)
    out = capsys.readouterr().out
    assert out.count("AdamW, float32") == 2 and out.count("unpack, bfloat16, dim 1") == 2


def test_training_runs_over_host_memory():
    """One case of those that a GPU is given, started as there."""
    env = {"FSDP_C_DEVICES": "cpu", "FSDP_C_QUIET": "1"}
    assert gpu_ranks.start(gpu_train.__file__, 1, "cpu", "bf16", env=env)
