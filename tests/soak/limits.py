"""Machines that lack something: memory, descriptors, room, cores; peers that stop or are slow."""

import contextlib
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness

from soak import training
from soak.case import LEFT_OUT, Family, Verdict, failed

STOPPED_S = 4.0
N_SLOW = 200
TIMEOUT_S = 240
ROOT = Path(__file__).resolve().parents[2]


def plain(rank: int, n_ranks: int, n_steps: int = training.N_STEPS) -> list[float]:
    return training.train(rank, None, n_steps)


@functools.cache
def undisturbed(n_ranks: int, n_steps: int = training.N_STEPS) -> list[list[float]]:
    return harness.run_ranks(plain, n_ranks, n_steps, apart=True, timeout=TIMEOUT_S)


def same(results: list[list[float]], n_steps: int = training.N_STEPS) -> Verdict:
    expected = undisturbed(len(results), n_steps)
    return Verdict() if results == expected else failed(f"{results}, not {expected}")


# ---- a peer that stands still ----


def stopping(rank: int, n_ranks: int) -> list[float]:
    run = training.Training(None)
    losses = []
    for step in range(training.N_STEPS):
        if rank == n_ranks - 1 and step == 2:
            stop_for_a_while()
        losses.append(run.step(rank, step))
    return losses


def stop_for_a_while() -> None:
    """By SIGSTOP, until a process that is started for it says go on."""
    code = "import os, signal, sys, time; time.sleep(float(sys.argv[2]));"
    code += "os.kill(int(sys.argv[1]), signal.SIGCONT)"
    helper = subprocess.Popen([sys.executable, "-c", code, str(os.getpid()), str(STOPPED_S)])
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


def stopped(n_ranks: int) -> Verdict:
    return same(harness.run_ranks(stopping, n_ranks, apart=True, timeout=TIMEOUT_S))


# ---- slow ranks, many ranks ----


def slow(rank: int, n_ranks: int, seed: int, n_steps: int) -> list[float]:
    run, drawn = training.Training(None), random.Random(seed * n_ranks + rank)
    losses = []
    for step in range(n_steps):
        time.sleep(drawn.random() ** 8 * 0.2)  # mostly nothing, now and then long
        losses.append(run.step(rank, step))
    return losses


def delayed(n_ranks: int, seed: int) -> Verdict:
    found = harness.run_ranks(slow, n_ranks, seed, N_SLOW, apart=True, timeout=TIMEOUT_S)
    return same(found, N_SLOW)


def crowded(n_ranks: int) -> Verdict:
    return same(harness.run_ranks(plain, n_ranks, apart=True, timeout=TIMEOUT_S))


# ---- descriptors ----


def few_descriptors(rank: int, n_ranks: int, n_left: int) -> tuple[str, list[float]]:
    """What the first try says with so many descriptors left on rank 0, and the second with more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    run = training.Training(None)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + n_left, hard))
    said = ""
    try:
        first = run.model(training.torch.ones(2, training.WIDTH))
        del first
    except Exception as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run.model.reset_iter_state()
    return said, training.train(rank, None)


def descriptors(n_ranks: int, n_left: int) -> Verdict:
    outcomes = harness.run_ranks(few_descriptors, n_ranks, n_left, apart=True, timeout=TIMEOUT_S)
    said = [text for text, _ in outcomes]
    if len({bool(text) for text in said}) != 1:
        return failed(f"only some ranks have an error: {said}")
    if said[0] and "rank 0" not in " ".join(said):
        return failed(f"nobody names rank 0: {said}")
    verdict = same([losses for _, losses in outcomes])
    return Verdict(verdict.fate, verdict.text, facts={"errors": int(bool(said[0]))})


# ---- memory ----

SMALL = """
import datetime, os, sys
sys.path[:0] = sys.argv[1].split(":")
import torch, torch.distributed as dist
from torch import nn
import fsdp_c
def main(rank):
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=20))
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    fsdp_c.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
    snapshots = fsdp_c.Snapshots(model, optimizer)
    snapshots.resume()
    snapshots.take(3)
    print("SAYS rank", rank, "trains", flush=True)
    snapshots.close()
if os.fork() == 0:
    main(1); sys.stdout.flush(); os._exit(0)
main(0)
sys.exit(os.wait()[1] != 0)
"""


def small_machine(before: list[str], fits: Callable[[str, int], str]) -> Verdict:
    """The same two ranks in a space of their own; `fits` judges output and exit status."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = ":".join(path for path in sys.path if path)
    command = [*before, sys.executable, "-c", SMALL, paths, str(store.port)]
    try:
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, cwd=ROOT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return failed(f"did not end: {(late.stdout or b'')[-3000:]!r}")
    problem = fits(done.stdout, done.returncode)
    return failed(f"{problem}\n{done.stdout}") if problem else Verdict()


def may_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def full_dev_shm() -> Verdict:
    """Shared memory of the ranks is not there; snapshots are, and go without."""
    if not may_unshare():
        return Verdict(LEFT_OUT, "this user may make no mounts")

    def fits(output: str, status: int) -> str:
        if status or output.count("trains") != 2:
            return "the run ended"
        return "" if "none are taken" in output or "took none" in output else "nobody was told"

    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    return small_machine(["unshare", "-m", "sh", "-c", mount, "sh"], fits)


MEMORY = Path("/sys/fs/cgroup/memory")


def memory_group() -> Verdict:
    """Too little memory: the kernel kills a rank, and the other one says so; no hang."""
    folder = MEMORY / f"fsdp_c_soak_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(420 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return Verdict(LEFT_OUT, f"no memory cgroup here: {error.strerror}")

    def fits(output: str, status: int) -> str:
        return "" if status or output.count("trains") == 2 else "it says that all went well"

    try:
        into = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        return small_machine(["sh", "-c", into, "sh"], fits)
    finally:
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            folder.rmdir()


CASES: dict[str, Callable[..., Verdict]] = {
    "stopped": stopped,
    "crowded": crowded,
    "descriptors": descriptors,
    "full dev shm": full_dev_shm,
    "memory group": memory_group,
    "delayed": delayed,
}


def cases(seed: int) -> Iterator[str]:
    yield from ("stopped/2", "stopped/3", "full dev shm", "memory group", "crowded/16")
    yield from (f"descriptors/{n}/{left}" for left in range(12) for n in (2, 3))
    yield from (f"delayed/{n}/{seed * 1000 + number}" for number in range(1000) for n in (2, 3, 4))


def run(key: str) -> Verdict:
    name, *numbers = key.split("/")
    arguments: list[Any] = list(map(int, numbers))
    try:
        return CASES[name](*arguments)
    except harness.RankFailure as error:
        return failed(str(error))


FAMILY = Family(
    "limits",
    "stopped and slow peers, 16 ranks, few descriptors, a full /dev/shm, little memory",
    cases,
    run,
)
