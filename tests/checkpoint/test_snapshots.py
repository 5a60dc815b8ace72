"""Snapshots in the ranks of the harness: what goes on, to the last bit, after a rank was killed."""

import dataclasses
import functools
import hashlib
import os
import random
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from harness import RankOutcome, cached_mesh, run_ranks
from models import Block, data
from torch import Tensor, nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c._native import _C
from fsdp_c._snapshots import _files, _run

N_STEPS = 6
WIDTH = 6
LARGE = 120_000  # rows, whose shards are copied beside the next step


class Net(nn.Module):
    """Uneven shards, random numbers, running statistics, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.wide = nn.Linear(WIDTH, LARGE)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.stem.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(self.drop(x))
        return self.wide(self.tied(x) * self.frozen.sum()).square().mean()


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def digest(tensors: Any) -> str:
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(local(tensor.detach()).contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def states(optimizer: optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


@dataclasses.dataclass
class Training:
    """What a script has."""

    models: list[nn.Module]
    optimizers: list[optim.Optimizer]
    extra: dict[str, Any]

    def step(self, rank: int, step: int) -> float:
        model, *averages = self.models
        loss = model(data(rank, step, 4, WIDTH)) * random.uniform(0.9, 1.1)
        loss.backward()
        if (
            not any(isinstance(p, DTensor) for p in model.parameters())
            and dist.get_world_size() > 1
        ):
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if "scheduler" in self.extra:
            self.extra["scheduler"].step()
        with torch.no_grad():
            for average in averages:
                for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                    local(mean).lerp_(local(param), 0.1)
        return loss.item()

    def digests(self) -> list[str]:
        tensors = [[*model.parameters(), *model.buffers()] for model in self.models]
        return [
            *map(digest, tensors),
            *(digest(states(optimizer)) for optimizer in self.optimizers),
            digest([torch.get_rng_state()]),
            str(random.random()),
        ]


def units(model: nn.Module, fsdp: Any = fsdp_c, **options: Any) -> nn.Module:
    mesh = cached_mesh((dist.get_world_size(),))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, **options)
    return fsdp.fully_shard(model, mesh=mesh, **options)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def training(kind: str) -> Training:
    model = Net()
    if kind == "plain":
        return Training([model], [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], {})
    if kind == "offload":
        units(model, offload_policy=CPUOffloadPolicy())
    elif kind == "fsdp1":
        model = fsdp_c.FullyShardedDataParallel(model, use_orig_params=True)
    elif kind == "torch":
        units(model, fsdp=torch.distributed.fsdp)
    elif kind == "zero2":
        model = fsdp_c.shard(model, "zero2", units=[Block])
    else:
        units(model)
    if kind == "several":
        wide = [p for p in model.wide.parameters()]
        rest = [p for p in model.parameters() if p.requires_grad and all(p is not w for w in wide)]
        optimizers = [optim.AdamW(rest, lr=1e-2), optim.Adagrad(wide, lr=1e-2)]
        scheduler = optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
        return Training([model, fsdp_c.clone(model)], optimizers, {"scheduler": scheduler})
    return Training([model], [adamw(model)], {})


KINDS = ("plain", "sharded", "torch", "offload", "fsdp1", "zero2", "several")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Life:
    """How a script runs, and when a rank of it kills itself: the last one, unless said."""

    kind: str
    folder: Path | None = None  # None: in memory
    moment: str = ""
    at_step: int = -1
    every: int = 1
    victim: int = -1
    takes: bool = True


def run(
    rank: int, n_ranks: int, life: Life, report: Any = lambda step, loss: None
) -> tuple[int, list[float], list[str]]:
    """The step it went on from, losses since, and digests of all that is left."""
    warnings.filterwarnings("error", message="Snapshots")  # each snapshot counts
    random.seed(rank)
    torch.manual_seed(rank)
    t = training(life.kind)
    torch.manual_seed(rank + 10)
    if not life.takes:
        return 0, [t.step(rank, step) for step in range(N_STEPS)], t.digests()
    snapshots = fsdp_c.Snapshots(
        t.models, t.optimizers, extra=t.extra, folder=life.folder, every=life.every
    )
    start = snapshots.resume()
    losses = []
    is_victim = rank == life.victim % n_ranks
    for step in range(start, N_STEPS):
        dies = is_victim and step == life.at_step
        if dies:
            arrange(life.moment, t)
        losses.append(t.step(rank, step))
        report(step, losses[-1])
        if dies and life.moment == "before take":
            kill()
        if dies and life.moment == "late":
            snapshots._taking.copier = Late(snapshots._taking.copier, life, n_ranks, step)
        if dies and life.moment == "between commits":
            await_commit(life, n_ranks, step + 1)
            kill()
        snapshots.take(step + 1)
        if life.moment == "between commits" and step == life.at_step:
            await_commit(life, n_ranks, step + 1)  # the others' too: the victim comes no further
        if dies and life.moment == "copy":
            kill()
    found = t.digests()
    if is_victim and life.moment == "end":
        kill()
    if life.moment:
        dist.barrier()  # as a save at the end has one
    snapshots.close()
    return start, losses, found


def arrange(moment: str, t: Training) -> None:
    model = t.models[0]
    if moment == "forward":
        model.drop.register_forward_pre_hook(lambda *_: kill())
    elif moment == "backward":
        model.norm.register_full_backward_hook(lambda *_: kill())
    elif moment == "update":
        t.optimizers[-1].register_step_pre_hook(lambda *_: kill())
    elif moment == "updated":
        t.optimizers[0].register_step_post_hook(lambda *_: kill())
    elif moment.startswith("after "):
        timer = threading.Timer(float(moment.removeprefix("after ")), kill)
        timer.daemon = True
        timer.start()


class Late:
    """A copier that has not begun when the next update comes, and is killed then.

    Before, it lets the others run ahead as far as they do.
    """

    def __init__(self, copier: Any, life: Life, n_ranks: int, step: int) -> None:
        self.copier, self.life, self.n_ranks, self.step = copier, life, n_ranks, step

    def start(self, **about: Any) -> None:
        _C.snapshot_clear(about["file"])

    def finish(self) -> None:
        await_commit(self.life, self.n_ranks, self.step + 2, longest_s=0.5)
        kill()


def await_commit(life: Life, n_ranks: int, step: int, longest_s: float = 60) -> None:
    """Until all other ranks have the step whole."""
    end = time.monotonic() + longest_s
    others = set(range(n_ranks)) - {life.victim % n_ranks}
    launcher = _run.launcher()
    while others and time.monotonic() < end:
        files = _files.find(life.folder or _files.MEMORY)
        files = [f for f in files if f.owner is not None and f.owner.launcher == launcher]
        others -= {f.rank for f in files if f.step == step}


def live(rank: int, n_ranks: int, *args: Any) -> Any:
    """As a script does, the process ends with an exception, and others notice."""
    try:
        return run(rank, n_ranks, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def lives(n_ranks: int, *args: Any, **options: Any) -> list[RankOutcome]:
    return run_ranks(live, n_ranks, *args, fresh=True, timeout=60, **options)


@functools.cache
def undisturbed(n_ranks: int, kind: str) -> list[tuple[list[float], list[str]]]:
    """Losses and digests by rank, of a run without snapshots."""
    outcomes = lives(n_ranks, Life(kind, takes=False))
    assert all(o.ok for o in outcomes), [o.error + o.output for o in outcomes]
    return [o.value[1:] for o in outcomes]


# Where the rank has made its update, and the snapshot may be that of the step before.
UPDATED = ("before take", "between commits", "copy", "late", "updated")


def check_goes_on(n_ranks: int, life: Life, env: dict[str, str] | None = None) -> None:
    whole = undisturbed(n_ranks, life.kind)
    died = lives(n_ranks, life, env=env)
    assert died[life.victim].exit_code == -signal.SIGKILL, (died[-1].error, died[-1].output)
    again = lives(n_ranks, dataclasses.replace(life, moment="", at_step=-1), env=env)
    for rank, outcome in enumerate(again):
        assert outcome.ok, f"{outcome.error}\n{outcome.output}"
        start, losses, found = outcome.value
        done = N_STEPS if life.moment == "end" else life.at_step + (life.moment in UPDATED)
        assert done - life.every <= start <= (N_STEPS if "after" in life.moment else done)
        assert losses == whole[rank][0][start:]
        assert found == whole[rank][1]
    assert life.folder is not None and list(life.folder.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on(tmp_path: Path, kind: str) -> None:
    check_goes_on(2, Life(kind, tmp_path, "backward", 3))


def test_goes_on_over_messages(tmp_path: Path) -> None:
    life = Life("sharded", tmp_path, "copy", 3)
    check_goes_on(2, life, env={"FSDP_C_TRANSPORT": "callback"})


@pytest.mark.parametrize(
    ("n_ranks", "moment"),
    [
        (2, "update"),
        (2, "updated"),
        (2, "before take"),
        (2, "copy"),
        (2, "late"),
        (3, "between commits"),
        (3, "end"),
    ],
)
def test_killed_at_any_moment(tmp_path: Path, n_ranks: int, moment: str) -> None:
    check_goes_on(n_ranks, Life("sharded", tmp_path, moment, 2))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random(tmp_path: Path, seed: int) -> None:
    """Behind a step that is whole: the first may be cut off on one rank and whole on another."""
    delay = random.Random(seed).uniform(0, 0.05)
    check_goes_on(2, Life("several", tmp_path, f"after {delay}", 2 + seed % 2, victim=0))


def test_killed_between_snapshots_of_several_steps(tmp_path: Path) -> None:
    check_goes_on(2, Life("sharded", tmp_path, "forward", 5, every=3))
