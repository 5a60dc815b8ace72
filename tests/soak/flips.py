"""Bits of what ranks tell each other change while they train: an error or a result, never a crash.

Words and texts in shared memory have no sums of their own. So a changed bit may also go unnoticed
and change a result; how often that was is counted.
"""

import contextlib
import datetime
import functools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from soak import build, shim, training
from soak.case import Family, Verdict, failed

WORLDS = (2, 3)
N_STEPS = 6
WAIT_S = 4  # a word that was changed may never come: waits end by this
TIMEOUT_S = 60
RATES = (20, 100, 500)  # one bit in so many events
CRASHES = ("AddressSanitizer", "Fatal Python error", "SIGSEGV", "SIGABRT")


def live(rank: int, n_ranks: int, seed: int, rate: int, folder: Path | None) -> list[float]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=WAIT_S))
    shim.clear()
    try:
        run = training.Training(folder, DeviceMesh.from_group(group, "cpu"))
        losses = [run.step(rank, 0)]
        if rate:
            shim.plan("flip", str(seed * n_ranks + rank + 1), rate)
        losses += [run.step(rank, step) for step in range(1, N_STEPS)]
    except BaseException as error:
        training.end_as_a_script(error, "")
    return losses


def with_address() -> dict[str, str]:
    return build.preloaded()


@functools.cache
def undisturbed(n_ranks: int) -> list[list[float]]:
    return harness.run_ranks(live, n_ranks, 0, 0, None, apart=True, env=with_address())


def cases(seed: int) -> Iterator[str]:
    drawn = random.Random(seed)
    while True:
        for n_ranks in WORLDS:
            yield f"{n_ranks}/{drawn.choice(RATES)}/{drawn.randrange(1 << 30)}"


def run(key: str) -> Verdict:
    n_ranks, rate, seed = map(int, key.split("/"))
    with tempfile.TemporaryDirectory() as name:
        try:
            outcomes = harness.run_ranks(
                live, n_ranks, seed, rate, Path(name), fresh=True, timeout=TIMEOUT_S,
                env=with_address(),
            )  # fmt: skip
        except harness.RankFailure as error:
            return failed(f"a rank hung: {error}")
    texts = "\n".join(f"--- rank {o.rank}: {o.exit_code}\n{o.output}" for o in outcomes)
    for outcome in outcomes:
        if outcome.exit_code not in (0, 1) or any(word in outcome.output for word in CRASHES):
            return failed(texts)
    has_error = any(outcome.exit_code == 1 for outcome in outcomes)
    results = [outcome.value for outcome in outcomes]
    is_wrong = not has_error and results != undisturbed(n_ranks)
    return Verdict(facts={"errors": int(has_error), "results that differ": int(is_wrong)})


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    with build.imported_from(build.build(build.ADDRESS)):
        yield


FAMILY = Family(
    "flips",
    "changed bits of shared words end in an error or a result: no crash, no read out of bounds",
    cases,
    run,
    prepared,
)
