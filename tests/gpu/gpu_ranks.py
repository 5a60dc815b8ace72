"""Ranks of one GPU as processes of a script: it is called with RANK RANKS STORE and more words."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 120
# Two ranks share the multiprocessors: few blocks each. NVLink's multicast does not know of them.
TWO_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def with_package(env: dict[str, str]) -> dict[str, str]:
    """A process of this environment imports the source tree's fsdp_c."""
    return {**env, "PYTHONPATH": str(ROOT)}


class RankError(Exception):
    """A rank failed or took too long."""


def run(script: str, n_ranks: int, *words: str, env: dict[str, str]) -> None:
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
            _wait(ranks)
        except RankError as error:
            texts = [note.read_text() for note in notes]
            print(*filter(None, texts), sep="\n", flush=True)
            last = [line for text in texts for line in text.splitlines()[-1:]]
            raise RankError("; ".join([str(error), *last])) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen]) -> None:
    """Until all have ended; the first one that fails ends it, since others may wait for it."""
    end = time.monotonic() + LIMIT_S
    while True:
        states = [process.poll() for process in ranks]
        for rank, status in enumerate(states):
            if status not in (None, 0):
                raise RankError(f"rank {rank} of {len(ranks)} ended with status {status}")
        if None not in states:
            return
        if time.monotonic() > end:
            raise RankError(f"not done within {LIMIT_S} s")
        time.sleep(0.05)
