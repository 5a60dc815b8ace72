"""Runs that are killed at random moments under torchrun end with the bits of one that was not."""

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from soak.case import Family, Verdict, failed

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "scripts/killed.py"
TIMEOUT_S = 240
MOMENTS = ("forward", "backward", "update", "updated", "before take", "copy", "between commits")
N_DEATHS = 3


def cases(seed: int) -> Iterator[str]:
    drawn = random.Random(seed)
    while True:
        n_ranks = drawn.choice((2, 3, 4))
        deaths = []
        for step in sorted(drawn.sample(range(5), N_DEATHS)):  # earlier ones are not made again
            moment = drawn.choice([*MOMENTS, f"after {drawn.uniform(0, 0.05):.4f}"])
            deaths.append(f"{drawn.randrange(n_ranks)}:{moment}:{step}")
        yield f"{n_ranks}/{','.join(deaths)}"


@functools.cache
def undisturbed(n_ranks: int) -> list[tuple[list[float], list[str]]]:
    import test_snapshots

    return test_snapshots.undisturbed(n_ranks, "sharded")


def run(key: str) -> Verdict:
    n_ranks, _, deaths = key.partition("/")
    whole = undisturbed(int(n_ranks))
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, *deaths.split(",")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--monitor-interval", "0.1"]
        # gloo fails some starts; those take a life without being one that was planned.
        command += ["--nproc-per-node", n_ranks, "--max-restarts", str(N_DEATHS + 2)]
        try:
            done = subprocess.run(
                [*command, str(SCRIPT), *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1",
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return failed(f"did not end: {(late.stdout or b'')[-3000:]!r}")
        if done.returncode:
            return failed(done.stdout)
        for rank, (losses, found) in enumerate(whole):
            if json.loads(Path(folder, f"{rank}.json").read_text()) != found:
                return failed(f"rank {rank} ends with other bits\n{done.stdout}")
            rows = [json.loads(line) for line in Path(folder, f"{rank}.jsonl").open()]
            if any(loss != losses[step] for _, step, loss in rows):
                return failed(f"rank {rank} has had other losses: {rows}")
            lives = {life for life, _, _ in rows}
    return Verdict(facts={"most lives": len(lives)})


FAMILY = Family(
    "restarts",
    "killed at random under torchrun, runs with snapshots end with the bits of an undisturbed one",
    cases,
    run,
)
