"""What second copies of snapshots (`copies=2`) cost a step over two hosts, and what they save.

The model and step of `bench_step.py`: the same ranks step without snapshots, with one after every
step, and with one whose second copy travels to the next host, in pairs of blocks. Then the memory
of a host is lost, and `resume` fetches it from the other one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_snapshots
import bench_step
import measuring
import report
import torch
import torch.distributed as dist
from bench_snapshots import MEMORY, MIB, Killed, Taking, timed
from measuring import Bench, Case, Launch, Row

HOSTS = (1, 1)


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(sum(HOSTS), hosts=HOSTS)]


@contextlib.contextmanager
def folders() -> Iterator[dict[int, Path]]:
    """Of each number of copies, in the memory of this host; the same name on all."""
    names = [f"bench-copies-{os.getpid()}"]
    dist.broadcast_object_list(names, 0)
    found = {copies: MEMORY / f"{names[0]}-{copies}" for copies in (1, 2)}
    try:
        for folder in found.values():
            folder.mkdir(exist_ok=True)
        yield found
    finally:
        for folder in found.values():
            shutil.rmtree(folder, ignore_errors=True)


def measured(args: argparse.Namespace, step: Any, kept: dict[int, Any], optimizer: Any) -> Row:
    """Times of each, and in `take` and before the optimizer."""
    takings = {copies: Taking(step, snapshots) for copies, snapshots in kept.items()}
    # With something before each step, a block's figure is the median of its steps.
    base = Case(step, before=lambda: None)
    cases = {f"copies={n}": Case(taking, before=lambda: None) for n, taking in takings.items()}
    budget, pairs = 15 if args.quick else 90, args.pairs or 10_000
    with contextlib.ExitStack() as hooks:
        for taking in takings.values():
            hooks.enter_context(taking.timed_waits(optimizer))
        times = measuring.measure_added(base, cases, budget, args.block_s, pairs)
    row: Row = {"times": times}
    for copies, taking in takings.items():
        row[f"held up, copies={copies}"] = taking.held_up()
        for number in range(2):  # the first is whole on both hosts once the second is taken
            kept[copies].take(taking.n_steps + 1 + number)
            kept[copies].finish()
    return row


def work(args: argparse.Namespace) -> list[Row]:
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp_c

    config, ranks = bench_step.config_of(args), dist.get_world_size()
    torch.manual_seed(100 + dist.get_rank())
    shape = (2, config.batch, config.tokens)
    batch = torch.randint(config.vocabulary, shape).unbind()
    mesh = init_device_mesh("cpu", (ranks,))
    model = bench_step.sharded_model(fsdp_c, config, mesh, "fp32")
    optimizer = bench_step.adamw(model.parameters())
    step = functools.partial(bench_step.training_step, model, optimizer, batch)
    with folders() as places:

        def snapshots(copies: int) -> Any:
            return fsdp_c.Snapshots(model, optimizer, folder=places[copies], copies=copies)

        with contextlib.suppress(Killed), contextlib.ExitStack() as both:
            kept = {copies: both.enter_context(snapshots(copies)) for copies in places}
            for one in kept.values():
                one.resume()
            row = measured(args, step, kept, optimizer)
            raise Killed
        wanted, n_bytes = bench_snapshots.bytes_of(model, optimizer)
        wanted = [tensor.clone() for tensor in wanted]
        if dist.get_rank() == 1:
            shutil.rmtree(places[2])
            places[2].mkdir()
        dist.barrier()
        step()
        for copies, key in ((1, "resume_us"), (2, "lost_us")):
            again = snapshots(copies)
            row[key] = measuring.mean_over_ranks([timed(again.resume)])[0]
            found = bench_snapshots.bytes_of(model, optimizer)[0]
            measuring.same(f"what copies={copies} brings back", found, wanted)
            again.close()
        dist.barrier()
    facts = {"ranks": ranks, "bytes": n_bytes, "config": asdict(config)}
    return [{**facts, **row}]


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    config = bench_step.config_of(args)
    table = report.Table(
        f"Training step of the GPT of bench_step.py, batch {config.batch} x {config.tokens} tokens "
        "per rank, on two hosts of one rank, with a snapshot after every step",
        ["copies", "MiB a rank", "without", "added", "with / without", "p10", "p90"]
        + ["in take()", "waited by step()", "resume()", "pairs"],
        note="fp32, AdamW, fsdp_c. Hosts are network and process spaces of one machine: what one "
        "sends takes its processors' time, too. MiB: shards and state of a snapshot. resume(): "
        "with copies=1 from memory of the own host; with copies=2 after one host has lost its "
        "memory, from the other's.",
    )
    for row in rows:
        for copies, key in ((1, "resume_us"), (2, "lost_us")):
            times = row["times"][f"copies={copies}"]
            base = times["base_us"]
            ratios = [(base + times[key]) / base for key in ("median_us", "p10_us", "p90_us")]
            held_up = row[f"held up, copies={copies}"]
            table.rows.append(
                [str(copies), report.number(row["bytes"] / MIB)]
                + [report.duration(base), report.duration(times["median_us"])]
                + [report.number(ratio, 3) for ratio in ratios]
                + list(map(report.duration, [*held_up, row[key]]))
                + [str(times["samples"])]
            )
    return [table]


def arguments(parser: argparse.ArgumentParser) -> None:
    bench_snapshots.arguments(parser)


BENCH = Bench("copies", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
