"""What a snapshot after every step costs the step, and what saving and loading cost beside it.

The model and step of `bench_step.py`: the same ranks step without snapshots and with one after
every step, in pairs of blocks. torch's distributed checkpoint saves the same to the same memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_step
import measuring
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring import Bench, Case, Launch, Row
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

GOAL = 1.03  # of the step without snapshots
MEMORY = Path("/dev/shm")
MIB = 1 << 20


class Killed(Exception):
    """Leaves the files of snapshots as a killed process does."""


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks]


def timed(body: Callable[[], Any]) -> float:
    """Microseconds; all ranks begin together."""
    dist.barrier()
    started = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - started) / 1e3


def shared_folder() -> Path:
    """The same on all ranks, in memory."""
    names = [
        tempfile.mkdtemp(prefix="bench-snapshots-", dir=MEMORY) if dist.get_rank() == 0 else ""
    ]
    dist.broadcast_object_list(names, 0)
    return Path(names[0])


def processor_times(
    bodies: Sequence[Callable[[], Any]], n_rounds: int, n_steps: int
) -> list[float]:
    """Microseconds of processors that a step of each takes, all threads together: medians.

    Other programs of the machine make a step longer, and these hardly.
    """
    found: list[list[float]] = [[] for _ in bodies]
    for _ in range(n_rounds):
        for body, times in zip(bodies, found, strict=True):
            body()
            started = time.process_time_ns()
            for _ in range(n_steps):
                body()
            times.append((time.process_time_ns() - started) / n_steps / 1e3)
    return measuring.mean_over_ranks(list(map(statistics.median, found)))


class Taking:
    """A step and the snapshot after it; counts steps, and the time that `take` and waits took."""

    def __init__(self, step: Callable[[], Any], snapshots: Any) -> None:
        self.step, self.snapshots = step, snapshots
        self.n_steps = 0
        self.take_us: list[float] = []
        self.wait_us: list[float] = []

    @contextlib.contextmanager
    def timed_waits(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        handle = optimizer.register_step_pre_hook(self.wait)
        # Before that of snapshots, so that it is timed here.
        optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
        yield
        handle.remove()

    def held_up(self) -> list[float]:
        """Microseconds in `take` and before the optimizer: medians."""
        waits = [us for us in self.wait_us if us > 5]  # the others had nothing to wait for
        medians = [statistics.median(self.take_us), statistics.median(waits or [0])]
        return measuring.mean_over_ranks(medians)

    def wait(self, *_: Any) -> None:
        """What the optimizer's step waits for the copy."""
        started = time.perf_counter_ns()
        self.snapshots.finish()
        self.wait_us.append((time.perf_counter_ns() - started) / 1e3)

    def __call__(self) -> None:
        self.step()
        self.n_steps += 1
        started = time.perf_counter_ns()
        self.snapshots.take(self.n_steps)
        self.take_us.append((time.perf_counter_ns() - started) / 1e3)


def dcp_times(model: Any, optimizer: Any, folder: Path, n_times: int) -> Row:
    saves, loads = [], []

    def save() -> None:
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)

    def load() -> None:
        state, optimizer_state = get_state_dict(model, optimizer)
        found = {"model": state, "optimizer": optimizer_state}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    for _ in range(n_times):
        saves.append(timed(save))
        loads.append(timed(load))
    medians = [statistics.median(saves), statistics.median(loads)]
    return dict(zip(("save_us", "load_us"), measuring.mean_over_ranks(medians), strict=True))


def bytes_of(model: Any, optimizer: Any) -> tuple[list[torch.Tensor], int]:
    tensors = [measuring.local(param.detach()) for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [measuring.local(value) for value in state.values()]
    return tensors, sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def work(args: argparse.Namespace) -> list[Row]:
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp_c

    config, ranks = bench_step.config_of(args), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(100 + dist.get_rank())
    shape = (2, config.batch, config.tokens)
    batch = torch.randint(config.vocabulary, shape).unbind()
    model = bench_step.sharded_model(fsdp_c, config, mesh, "fp32")
    optimizer = bench_step.adamw(model.parameters())
    step = functools.partial(bench_step.training_step, model, optimizer, batch)
    folder = shared_folder()
    with contextlib.suppress(Killed), fsdp_c.Snapshots(model, optimizer, folder=folder) as snaps:
        snaps.resume()
        taking = Taking(step, snaps)
        # With something before each step, a block's figure is the median of its steps.
        base, case = (Case(body, before=lambda: None) for body in (step, taking))
        budget = 15 if args.quick else 90
        pairs = args.pairs or 10_000
        with taking.timed_waits(optimizer):
            times = measuring.measure_added(base, {"snapshots": case}, budget, args.block_s, pairs)
        cpu_us = processor_times([step, taking], 2 if args.quick else 5, 3 if args.quick else 8)
        snaps.take(taking.n_steps + 1)
        raise Killed
    wanted, n_bytes = bytes_of(model, optimizer)
    wanted = [tensor.clone() for tensor in wanted]
    step()
    again = fsdp_c.Snapshots(model, optimizer, folder=folder)
    resume_us = timed(again.resume)
    measuring.same("what a snapshot brings back", bytes_of(model, optimizer)[0], wanted)
    again.close()
    found = [*taking.held_up(), *measuring.mean_over_ranks([resume_us])]
    row = dict(zip(("take_us", "wait_us", "resume_us"), found, strict=True))
    row |= {"cpu_without_us": cpu_us[0], "cpu_with_us": cpu_us[1]}
    row |= dcp_times(model, optimizer, folder / "dcp", 2 if args.quick else 5)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    numel = sum(parameter.numel() for parameter in model.parameters())
    facts = {"ranks": ranks, "numel": numel, "bytes": n_bytes, "config": asdict(config)}
    return [{**facts, **row, "times": times}]


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    config = bench_step.config_of(args)
    table = report.Table(
        f"Training step of a GPT with {rows[0]['numel'] / 1e6:.1f}M parameters, "
        f"batch {config.batch} x {config.tokens} tokens per rank, with a snapshot after every step",
        ["ranks", "MiB a rank", "without", "added", "with / without", "goal", "p10", "p90"]
        + [
            "of processors",
            "in take()",
            "waited by step()",
            "resume()",
            "torch: save",
            "load",
            "pairs",
        ],
        note="fp32, AdamW, fsdp_c. MiB: shards and state of a snapshot; two are kept. Added: the "
        "median over pairs of blocks, without and with; p10, p90: of with / without over pairs. Of "
        "processors: with / without in processors' time, which other programs hardly change. In "
        "take(), waited by step(): medians of what the program itself is held up; what else the "
        "copy costs is the processor's and the memory's time. torch: distributed checkpoint into "
        "memory.",
    )
    for row in rows:
        times = row["times"]["snapshots"]
        base = times["base_us"]
        ratios = [(base + times[key]) / base for key in ("median_us", "p10_us", "p90_us")]
        durations = [row[key] for key in ("take_us", "wait_us", "resume_us", "save_us", "load_us")]
        table.rows.append(
            [str(row["ranks"]), report.number(row["bytes"] / MIB)]
            + [report.duration(base), report.duration(times["median_us"])]
            + [report.number(ratios[0], 3), f"<= {GOAL}"]
            + [report.number(ratio, 3) for ratio in ratios[1:]]
            + [report.ratio(row["cpu_with_us"], row["cpu_without_us"], 3)]
            + list(map(report.duration, durations))
            + [str(times["samples"])]
        )
    return [table]


def arguments(parser: argparse.ArgumentParser) -> None:
    bench_step.arguments(parser)
    parser.add_argument("--block-s", type=float, default=2.0, help="seconds of a block")
    parser.add_argument("--pairs", type=int, help="pairs of blocks; as many as there is time for")


BENCH = Bench("snapshots", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
