"""Builds and runs the programs in tests/c, one case each; FSDP_C_SANITIZE picks a sanitizer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "tests" / "c").glob("test_*.c"))
SANITIZER = os.environ.get("FSDP_C_SANITIZE", "")
SKIPPED = 77
WATCHDOG_S = 600  # some take three minutes without optimization, beside other work
OPTIONS = {
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    target = Path("build", "-".join(["c-tests", *filter(None, SANITIZER.split(","))]))
    command = [sys.executable, "setup.py", "-q", "build_c_tests", "--build-dir", str(target)]
    env = {**os.environ, "FSDP_C_WERROR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / target


def run(program: Path) -> tuple[int, str]:
    """Exit status and output; all processes of a program that hangs are killed."""
    process = subprocess.Popen(
        [program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **OPTIONS},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=WATCHDOG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -signal.SIGKILL, f"{output}\nkilled: still running after {WATCHDOG_S} s"
    return process.returncode, output


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(folder: Path, name: str):
    status, output = run(folder / name)
    if status == SKIPPED:
        pytest.skip(output.strip().splitlines()[-1] if output.strip() else "no reason given")
    assert status == 0, output


def test_there_are_programs():
    assert PROGRAMS
