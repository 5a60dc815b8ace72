"""Ranks of one GPU as processes of a script: it is called with RANK RANKS STORE and more words."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 120
# Two ranks share the multiprocessors: few blocks each. NVLink's multicast does not know of them.
TWO_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def start(script: str, n_ranks: int, *words: str, env: dict[str, str]) -> bool:
    """Whether all ranks passed within the time."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(n_ranks), str(Path(folder, "s")), *words],
                cwd=ROOT,
                env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
            )
            for rank in range(n_ranks)
        ]
        try:
            return all([rank.wait(LIMIT_S) == 0 for rank in ranks])
        except subprocess.TimeoutExpired:
            print(f"  not done within {LIMIT_S} s")
            return False
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
