"""Opens this process's page, once: from then on `python -m fsdp_c top` sees it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch.distributed as dist

from fsdp_c import _env
from fsdp_c._native import _C


def show_process() -> None:
    """Local. Later calls change nothing; a child made by fork has a page of its own."""
    has_ranks = dist.is_available() and dist.is_initialized()
    traces = _env.TRACE.get()
    try:
        _C.open_window(
            run=name_of_run(),
            rank=dist.get_rank() if has_ranks else 0,
            world=dist.get_world_size() if has_ranks else 1,
            start_ticks=int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
            traces=traces,
        )
    except (OSError, MemoryError) as error:  # a run goes on unseen
        warnings.warn(f"`python -m fsdp_c top` will not see this process: {error}", stacklevel=2)


def name_of_run() -> str:
    """What ranks of one run have alike, and others of this host have not; for people, too."""
    name = _env.run_id()
    return f"{os.getppid()}" if name in ("", "none") else name
