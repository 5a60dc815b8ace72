"""What is said at the end of a script that failed in a collective since another rank had left.

gloo knows of a connection that was closed, not whose it was, nor that all ranks had to call.
"""

from __future__ import annotations

import atexit
import sys
import time
import traceback

import torch.distributed as dist

from fsdp_c._comm import _peer_location
from fsdp_c._native import _C

_GRACE_S = 2.0  # who destroys its process group has some of its script left


def tell() -> None:
    """Below the traceback."""
    error, at = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if at is None or not isinstance(error, RuntimeError):
        return
    inside, is_save = _peer_location.called([frame for frame, _ in traceback.walk_tb(at)][::-1])
    is_of_group = isinstance(error, dist.DistError) or "/gloo/" in str(error)
    ended = _find_end(_GRACE_S if is_of_group else 0.0) if inside else None
    if ended is None or not (is_of_group or ended in str(error)):
        return
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    advice = "; is it saving alone? Only writing a file of full parameters is for one rank"
    print(
        f"[fsdp_c] {rank} failed in {inside}, a collective: all ranks of its process group must"
        f" call it, and {ended}{advice if is_save else ''}",
        file=sys.stderr,
    )


def _find_end(grace_s: float) -> str | None:
    deadline = time.monotonic() + grace_s
    while (ended := _C.find_end()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return ended


atexit.register(tell)
