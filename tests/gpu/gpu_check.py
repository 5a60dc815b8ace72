"""`make gpu-check`: GPU kernels beside torch, under compute-sanitizer; NCCL; training; their speed.

Needs nvcc, gcc and torch; NCCL and training also a build of the extension. Without a GPU it builds
and loads everything, says so and fails. `--emulate` runs the kernels' cases over their bodies on
the host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import build_script  # noqa: E402
import gpu_nccl  # noqa: E402
import gpu_train  # noqa: E402
from gpu_cases import CASES  # noqa: E402
from gpu_kernels import LIBRARY, ROOT, Kernels, build_helper  # noqa: E402


def build_library() -> None:
    """As the extension's build does it."""
    script = build_script.load()
    os.environ["FSDP_C_CUDA"] = "1"
    nvcc = script.Nvcc.wanted()
    with script.build_lock():
        built = script.build_cuda(nvcc, script.Toolchain())
        script.replace(LIBRARY, built.shared_object.read_bytes())


def run_cases(kernels: Kernels) -> int:
    failed = 0
    for case in CASES:
        try:
            case(kernels)
            if kernels.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # every case is told about; the exit status counts them
            failed += 1
            print(f"  FAILED {case.__name__}: {type(error).__name__}: {error}")
        else:
            print(f"  passed {case.__name__}")
    return failed


def run_sanitizer() -> int:
    """The cases once more under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: skipped")
        return 0
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--cases"]
    return subprocess.run(command, cwd=ROOT).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="on the host, without a GPU")
    parser.add_argument("--cases", action="store_true", help="no sanitizer, no figures")
    options = parser.parse_args(arguments)
    helper = build_helper(ROOT / "build" / "gpu-check")
    if options.emulate:
        print("the kernels' bodies on the host, beside torch on the CPU:")
        return run_cases(Kernels(helper, None)) != 0
    build_library()
    kernels = Kernels(helper, LIBRARY)
    if not torch.cuda.is_available():
        print(
            "gpu-check: the kernels were built and loaded, but torch"
            f" {torch.__version__} sees no GPU here: nothing was checked",
            file=sys.stderr,
        )
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}:")
    failed = run_cases(kernels)
    if failed == 0 and not options.cases:
        failed = run_sanitizer()
    if not options.cases:
        failed += gpu_nccl.check()
        failed += gpu_train.check()
    if failed == 0 and not options.cases:
        bench = [sys.executable, "benchmarks/bench_cuda_kernels.py"]
        failed = subprocess.run(bench, cwd=ROOT).returncode
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
