"""Parts of gpu-check: kernels beside torch; compute-sanitizer over them and over a training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_beside
import gpu_ranks
import torch
from gpu_cases import CASES
from gpu_kernels import LIBRARY, ROOT, Kernels, build_helper
from gpu_rows import Rows


def open_kernels(device_type: str) -> Kernels:
    helper = build_helper(ROOT / "build" / "gpu-check")
    return Kernels(helper, LIBRARY if device_type == "cuda" else None)


def run(rows: Rows, device_type: str) -> None:
    if device_type == "cuda" and not LIBRARY.exists():
        rows.left_out("kernels", "they were not built, since nvcc was not found")
        return
    run_cases(open_kernels(device_type), rows)


def run_cases(kernels: Kernels, rows: Rows) -> None:
    def finish(case) -> None:
        case(kernels)
        if kernels.device.type == "cuda":
            torch.cuda.synchronize()

    for case in CASES:
        rows.check(case.__name__, lambda case=case: finish(case))


def run_sanitizer(rows: Rows, device_type: str) -> None:
    """The cases and a short training, where the tool is installed."""
    name = "compute-sanitizer"
    tool = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if tool is None or device_type == "cpu":
        rows.left_out(name, "it is not installed" if tool is None else "there is no GPU")
        return
    here = [tool, "--error-exitcode", "9", sys.executable]
    env = {**os.environ, **gpu_ranks.with_package(gpu_ranks.environment("cuda", 1))}

    def run(script: list[str]) -> None:
        done = subprocess.run([*here, *script], cwd=ROOT, env=env, timeout=200)
        assert done.returncode == 0, f"status {done.returncode}; 9 stands for errors, shown above"

    with tempfile.TemporaryDirectory() as folder:
        words = ["0", "1", f"{folder}/store", "cuda", "1 rank", str(rows.path), "180"]
        training = [gpu_beside.__file__, *words, "float32", "parameters in bfloat16"]
        rows.check("kernels", lambda: run([__file__]))
        rows.check("training", lambda: run(training))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        run_cases(open_kernels("cuda"), Rows(Path(scratch, "rows"), "sanitizer"))
