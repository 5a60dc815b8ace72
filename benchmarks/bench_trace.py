"""What a trace costs while it is kept (FSDP_C_TRACE): steps with it and without, in turn.

Whether a process keeps one is settled as its first model is set up: ranks are started anew, with it
and without it in turn, and a figure is taken over all starts of a kind. Two models: 100 x
Linear(16, 16), each a unit, forward and backward, where nothing else counts; and the step of
`bench_step.py` in fp32.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import bench_host_overhead
import bench_step
import measuring
import report
import torch
import torch.distributed as dist
from bench_waits import timed
from measuring import Bench, Launch, Row
from torch.distributed.device_mesh import init_device_mesh

MODELS = ("units", "gpt")
N_UNITS = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, default=[1, 2])
    parser.add_argument("--models", type=measuring.name_list, default=list(MODELS))
    for name, value in asdict(bench_step.Config()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--starts", type=int, help="of each kind")
    parser.add_argument("--steps", type=int, help="counted, of each model and start")
    parser.add_argument("--traced", type=int, default=0, help=argparse.SUPPRESS)


def launches(args: argparse.Namespace) -> list[Launch]:
    starts = args.starts or (2 if args.quick else 6)
    return [
        Launch(ranks, ["--traced", str(traced)])
        for ranks in args.ranks
        for start in range(starts)
        for traced in ((0, 1), (1, 0))[start % 2]  # neither is always the later one
    ]


def step_of(kind: str, args: argparse.Namespace) -> Callable[[], Any]:
    import fsdp_c

    torch.manual_seed(100 + dist.get_rank())
    if kind == "units":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = bench_host_overhead.sharded_net(fsdp_c, N_UNITS, mesh)
        x = torch.randn(4, bench_host_overhead.WIDTH, requires_grad=True)
        return lambda: model(x).sum().backward()
    config = bench_step.config_of(args)
    batch = torch.randint(config.vocabulary, (2, config.batch, config.tokens)).unbind()
    gpt = bench_step.sharded_model(fsdp_c, config, None, "fp32")
    optimizer = bench_step.adamw(gpt.parameters())
    return functools.partial(bench_step.training_step, gpt, optimizer, batch)


def check_traced(is_wanted: bool) -> None:
    from fsdp_c._window import _processes

    seen = _processes.Seen()
    seen.look()
    n_events = len(list(seen.pages[os.getpid()].events()))
    seen.close()
    if (n_events > 0) != is_wanted:
        raise measuring.VerificationError(f"verification failed: {n_events} events are kept")


def work(args: argparse.Namespace) -> list[Row]:
    os.environ["FSDP_C_TRACE"] = str(args.traced)
    rows: list[Row] = []
    for kind in args.models:
        step = step_of(kind, args)
        n_steps = args.steps or {"units": 1000, "gpt": 20}[kind] // (4 if args.quick else 1)
        timed(step, min(n_steps, 20))
        check_traced(args.traced == 1)
        dist.barrier()
        times = timed(step, n_steps)
        median, least = measuring.mean_over_ranks([statistics.median(times), min(times)])
        ranks = dist.get_world_size()
        rows.append(
            {"model": kind, "ranks": ranks, "traced": args.traced}
            | {"median_us": 1e6 * median, "min_us": 1e6 * least, "samples": n_steps}
        )
    return rows


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    table = report.Table(
        "A step of fsdp_c, mean over ranks, without and with a trace",
        ["model", "ranks", "median", "traced", "ratio", "fastest", "traced", "ratio", "starts"],
        note="median: of the starts' median steps; fastest: of the starts' fastest steps, the"
        " fastest. The second shows less of what else the machine does.",
    )
    for kind in args.models:
        for ranks in args.ranks:
            mine = [row for row in rows if (row["model"], row["ranks"]) == (kind, ranks)]
            off, on = ([row for row in mine if row["traced"] == traced] for traced in (0, 1))
            medians = [statistics.median(row["median_us"] for row in some) for some in (off, on)]
            least = [min(row["min_us"] for row in some) for some in (off, on)]
            table.rows.append(
                [kind, str(ranks), *map(report.duration, medians), report.ratio(*medians[::-1], 3)]
                + [*map(report.duration, least), report.ratio(*least[::-1], 3), str(len(on))]
            )
    return [table]


BENCH = Bench("trace", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
