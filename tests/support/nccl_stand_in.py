"""The stand-in for NCCL (tests/c/nccl) from Python: built once, chosen by FSDP_C_NCCL, watched."""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from fsdp_c._comm import _device, _nccl
from fsdp_c._native import _C

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "build/c-tests"


class Control(ctypes.Structure):
    """`stand_in` of tests/c/nccl_stand_in.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("version", "polls")),
        *((name, ctypes.c_bool) for name in ("hangs_in_init", "dies_in_init", "hangs")),
        *((name, ctypes.c_int) for name in ("error_at", "error", "fail_calls")),
        *((name, ctypes.c_bool) for name in ("ends_work", "blocks", "captures")),
        *((name, ctypes.c_int) for name in ("fail_event_at", "fail_queries")),
        *(
            (f"n_{what}", ctypes.c_int)
            for what in (
                "inits splits collectives groups aborts destroyed live"
                " events records contexts blocked queries"
            ).split()
        ),
        *((name, ctypes.c_int) for name in ("config_bytes", "n_faults")),
        ("fault", ctypes.c_char * 256),
    )


@functools.cache
def built() -> str:
    """The path of the library."""
    command = [sys.executable, "setup.py", "-q", "build_c_tests", "--only-libraries"]
    env = {**os.environ, "FSDP_C_WERROR": "1", "FSDP_C_SANITIZE": ""}
    command += ["--build-dir", FOLDER]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(ROOT / FOLDER / "libnccl_stand_in.so")


def control_of(path: str) -> Control:
    get = ctypes.CDLL(path).fc_stand_in_control
    get.restype = ctypes.POINTER(Control)
    return get().contents


@contextmanager
def watched(path: str) -> Iterator[None]:
    """Groups that are made in here have events of the stand-in's, as on GPUs."""
    events = _nccl._events
    _nccl._events = lambda _: _C.cuda_events(path=path, gpu=0)
    try:
        yield
    finally:
        _nccl._events = events


@contextmanager
def chosen(path: str) -> Iterator[Control]:
    """Models that run their first forward in here go by the schedule of devices, over this NCCL."""
    os.environ["FSDP_C_NCCL"] = path
    _nccl._library = None
    is_there = Path(path).exists()
    control = control_of(path) if is_there else Control()
    control.ends_work = True
    try:
        with watched(path) if is_there else nullcontext(), _device.on_cpu(by_nccl=True):
            yield control
        assert control.fault == b"", control.fault
    finally:
        del os.environ["FSDP_C_NCCL"]
        _nccl._library = None
        control.ends_work = False
