"""What the self-check of the first steps costs (FSDP_C_VERIFY): a checked step beside others.

The GPT of `bench_step.py`, in fp32 and with bf16 parameters. Each round makes a model that is
checked in all of its steps and one that is not, and runs steps of them in turn.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from dataclasses import asdict
from typing import Any

import bench_step
import measuring
import report
import torch
import torch.distributed as dist
from bench_waits import timed
from measuring import Bench, Launch, Row

CHECKED = {"not checked": "0", "checked": "1000000"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, default=[2])
    parser.add_argument("--precisions", type=measuring.name_list, default=["fp32", "bf16"])
    for name, value in asdict(bench_step.Config()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, help="blocks of steps of each model")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks]


def work(args: argparse.Namespace) -> list[Row]:
    import fsdp_c

    config = bench_step.config_of(args)
    rounds = args.rounds or (2 if args.quick else 5)
    rows: list[Row] = []
    for precision in args.precisions:
        torch.manual_seed(100 + dist.get_rank())
        batch = torch.randint(config.vocabulary, (2, config.batch, config.tokens)).unbind()
        steps: dict[str, Any] = {}
        for name, asked in CHECKED.items():
            os.environ["FSDP_C_VERIFY"] = asked  # read at the first forward
            model = bench_step.sharded_model(fsdp_c, config, None, precision)
            optimizer = bench_step.adamw(model.parameters())
            steps[name] = functools.partial(bench_step.training_step, model, optimizer, batch)
            timed(steps[name], 1)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                dist.barrier()
                times[name] += timed(step, 3)[1:]
        medians = measuring.mean_over_ranks([statistics.median(t) for t in times.values()])
        rows.append(
            {
                "precision": precision,
                "ranks": dist.get_world_size(),
                "step_us": {n: 1e6 * t for n, t in zip(times, medians, strict=True)},
                "samples": 2 * rounds,
            }
        )
    return rows


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    table = report.Table(
        "A step of fsdp_c, mean over ranks", ["precision", "ranks", *CHECKED, "ratio", "samples"]
    )
    for row in rows:
        plain, checked = row["step_us"].values()
        table.rows.append(
            [row["precision"], str(row["ranks"]), report.duration(plain), report.duration(checked)]
            + [report.ratio(checked, plain), str(row["samples"])]
        )
    return [table]


BENCH = Bench("verify", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
