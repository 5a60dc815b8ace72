"""Ranks of one GPU as processes of a script: it is called with RANK RANKS STORE and more words."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 120  # for processes, unless they are given another
# Ranks share the multiprocessors: few blocks each. NVLink's multicast does not know of them.
MANY_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def with_package(env: dict[str, str]) -> dict[str, str]:
    """A process of this environment imports the source tree's fsdp_c."""
    return {**env, "PYTHONPATH": str(ROOT)}


class RankError(Exception):
    """A rank failed or took too long."""


def environment(device_type: str, n_ranks: int) -> dict[str, str]:
    """In which the stream schedule runs units on the device."""
    env = {"FSDP_C_DEVICES": device_type, "FSDP_C_QUIET": "1", "OMP_NUM_THREADS": "1"}
    return env | (MANY_RANKS if n_ranks > 1 else {})


def begin(
    rank: int, n_ranks: int, store: str, device_type: str, by_nccl: bool | None = None
) -> torch.device:
    """A rank's process group, over NCCL if `by_nccl`, or of one rank; gives its device."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    is_nccl = device_type == "cuda" and (n_ranks == 1 if by_nccl is None else by_nccl)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_nccl else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n_ranks,
    )
    return device


def run(
    script: str, n_ranks: int, *words: str, env: dict[str, str], limit_s: float = LIMIT_S
) -> None:
    """RankError unless all ranks end well within the time, with the last line that one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder, f"stderr{rank}") for rank in range(n_ranks)]
        ranks = []
        for rank in range(n_ranks):
            command = [sys.executable, script, str(rank), str(n_ranks), str(Path(folder, "s"))]
            with notes[rank].open("w") as stderr:
                ranks.append(
                    subprocess.Popen(
                        [*command, *words],
                        cwd=ROOT,
                        env={**os.environ, **with_package(env)},
                        stderr=stderr,
                    )
                )
        try:
            _wait(ranks, limit_s)
        except RankError as error:
            texts = [note.read_text() for note in notes]
            print(*filter(None, texts), sep="\n", flush=True)
            last = [line for text in texts for line in text.splitlines()[-1:]]
            raise RankError("; ".join([str(error), *last])) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen], limit_s: float) -> None:
    """Until all have ended; the first one that fails ends it, since others may wait for it."""
    end = time.monotonic() + limit_s
    while True:
        states = [process.poll() for process in ranks]
        for rank, status in enumerate(states):
            if status not in (None, 0):
                raise RankError(f"rank {rank} of {len(ranks)} ended with status {status}")
        if None not in states:
            return
        if time.monotonic() > end:
            raise RankError(f"not done within {limit_s:g} s")
        time.sleep(0.05)
