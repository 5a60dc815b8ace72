"""The n-th call to the system fails: an error, the model as it was, and the next try works.

Or all ranks end with an error that names one, where a rank fails alone at the end of a phase.
"""

import functools
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from soak import kills, shim, training
from soak.case import Family, Verdict, failed

CALLS = (
    "calloc",
    "mmap",
    "memfd_create",
    "ftruncate",
    "fallocate",
    "open",
    "pidfd_open",
    "pthread_create",
)
WORLDS = (1, 2, 3)
N_STEPS = 2
TRIES = 3
TIMEOUT_S = 25
# A rank that fails alone, when the others are through with the phase, tries again while they go on:
# each has to learn which rank that is, and their process group cannot be used any more.
ENDED = re.compile(r"fails again and again: .*\brank \d+ (is in a collective|failed:)", re.DOTALL)


class Life:
    """A training that tries again what has failed on any rank."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.errors: list[str] = []
        self.training: Any = None

    def tried(self, what: str, body: Callable[[], None], again: Callable[[], None]) -> None:
        for _ in range(TRIES):
            error = ""
            try:
                body()
            except Exception:
                error = traceback.format_exc()
                self.errors.append(error)
                print(error, flush=True)
            if not on_any_rank(bool(error)):
                return
            again()
        raise AssertionError(f"{what} fails again and again: {self.errors[-1:]}")

    def make(self) -> None:
        self.training = training.Training(self.folder)

    def forget(self) -> None:
        """Another rank may have made its own."""
        if self.training is not None:
            self.training.close()
        self.training = None

    def step(self, step: int) -> float:
        model = self.training.model
        before = [local(param).clone() for param in model.parameters()]
        loss: list[float] = []

        def undo() -> None:
            loss.clear()
            model.reset_iter_state()
            self.training.optimizer.zero_grad()
            now = [local(param) for param in model.parameters()]
            assert all(map(torch.equal, before, now)), "parameters have changed"

        self.tried(
            f"step {step}", lambda: loss.append(self.training.gradients(self.rank, step)), undo
        )
        return loss[0]


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def on_any_rank(is_true: bool) -> bool:
    flag = torch.tensor([float(is_true)])
    if dist.get_world_size() > 1:
        dist.all_reduce(flag)
    return bool(flag.item())


def live(
    rank: int, n_ranks: int, victim: int, call: str, nth: int, folder: Path
) -> tuple[list[float], list[str], dict[str, int]]:
    """Losses, errors, and how often each call was made."""
    shim.plan("fail", call, nth) if rank == victim else shim.clear()
    life = Life(rank, folder)
    life.tried("set-up", life.make, life.forget)
    losses = []
    for step in range(N_STEPS):
        losses.append(life.step(step))
        try:
            life.training.update(step)
            has_failed = False
        except Exception:
            life.errors.append(traceback.format_exc())
            has_failed = True
        if on_any_rank(has_failed):
            return [], life.errors, shim.counts()  # half an update is nothing to go on from
    counts = shim.counts()
    life.training.close()
    return losses, life.errors, counts


@functools.cache
def undisturbed(n_ranks: int) -> list[tuple[list[float], list[str], dict[str, int]]]:
    with tempfile.TemporaryDirectory() as folder:
        return harness.run_ranks(live, n_ranks, -1, "", 0, Path(folder), apart=True)


def calls() -> Iterator[str]:
    """Every call of every rank."""
    for n_ranks in WORLDS:
        for victim, (_, errors, counts) in enumerate(undisturbed(n_ranks)):
            assert not errors, errors
            for call in CALLS:
                for nth in range(1, counts.get(call, 0) + 1):
                    yield f"{n_ranks}/{victim}/{call}/{nth}"


def cases(seed: int) -> Iterator[str]:
    keys = list(calls())
    random.Random(seed).shuffle(keys)
    yield from keys


@functools.cache
def whole() -> str:
    return f"{sum(1 for _ in calls())} calls"


def run(key: str) -> Verdict:
    n_ranks, victim, call, nth = key.split("/")
    with tempfile.TemporaryDirectory() as folder:
        plan = int(victim), call, int(nth), Path(folder)
        try:
            outcomes = harness.run_ranks(live, int(n_ranks), *plan, fresh=True, timeout=TIMEOUT_S)
        except harness.RankFailure as error:
            return failed(f"a rank hung: {error}")
    texts = "\n".join(f"--- rank {o.rank}: {o.exit_code} {o.error}\n{o.output}" for o in outcomes)
    if all(ENDED.search(outcome.error) for outcome in outcomes):
        return Verdict(facts={"errors": 1, "errors that end the run": 1})
    if not all(outcome.ok for outcome in outcomes):
        return failed(texts)
    has_failed = any(outcome.value[1] for outcome in outcomes)
    for outcome, (expected, _, _) in zip(outcomes, undisturbed(int(n_ranks)), strict=True):
        losses, errors, _ = outcome.value
        if losses and losses != expected:
            return failed(f"rank {outcome.rank}: {losses}, not {expected}: {errors}\n{texts}")
    if not has_failed and not all(outcome.value[0] for outcome in outcomes):
        return failed(f"a rank stopped without an error\n{texts}")
    return Verdict(facts={"errors": int(has_failed)})


FAMILY = Family(
    "calls",
    "the n-th allocation, mapping, descriptor or thread fails: the next try works",
    cases,
    run,
    kills.prepared,
    whole=whole,
)
