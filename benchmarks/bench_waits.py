"""How much of a training step ranks wait for each other, and in what: what overlap could hide.

Three models of the sizes of `bench_step.py`: `even`; `uneven`, where the last rank does half as
much again in every block; `in turn`, where rank i mod n is the slow one in block i. `due` is what
ranks would wait if communication cost nothing and they met once per step: the mean over ranks of
the slowest rank's plain step minus their own.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from dataclasses import asdict
from typing import Any

import bench_step
import measuring
import report
import torch
import torch.distributed as dist
from measuring import Bench, Launch, Row

KINDS = ("forward gather", "end of forward", "backward gather", "reduction", "end of backward")
MODELS = ("even", "uneven", "in turn")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, default=[2, 4])
    parser.add_argument("--precisions", type=measuring.name_list, default=["fp32", "bf16"])
    parser.add_argument("--models", type=measuring.name_list, default=list(MODELS))
    for name, value in asdict(bench_step.Config()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, help="counted, of each model")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks]


def slow_blocks(kind: str, layers: int) -> list[int]:
    """Of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "in turn":
        return [index for index in range(layers) if index % ranks == rank]
    return list(range(layers)) if kind == "uneven" and rank == ranks - 1 else []


def slow_down(model: bench_step.GPT, kind: str) -> None:
    """After fully_shard: the same units everywhere, called once more on this rank."""
    for index in slow_blocks(kind, len(model.blocks)):
        block = model.blocks[index]
        inner = type(block).forward

        def forward(x: torch.Tensor, block: Any = block, inner: Any = inner) -> torch.Tensor:
            return inner(block, x) + 0 * inner(block, x[: x.shape[0] // 2]).sum()

        block.forward = forward


def timed(step: Any, n_steps: int) -> list[float]:
    seconds = []
    for _ in range(n_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def work(args: argparse.Namespace) -> list[Row]:
    import fsdp_c

    config = bench_step.config_of(args)
    n_steps = args.steps or (5 if args.quick else 20)
    rows: list[Row] = []
    for precision in args.precisions:
        torch.manual_seed(100 + dist.get_rank())
        batch = torch.randint(config.vocabulary, (2, config.batch, config.tokens)).unbind()
        for kind in args.models:
            plain = bench_step.plain_model(config)
            slow_down(plain, kind)
            plain = plain.bfloat16() if precision == "bf16" else plain
            floor = bench_step.floor_step(plain, batch)
            model = bench_step.sharded_model(fsdp_c, config, None, precision)
            slow_down(model, kind)
            optimizer = bench_step.adamw(model.parameters())
            step = functools.partial(bench_step.training_step, model, optimizer, batch)
            timed(step, 2)
            timed(floor, 1)
            dist.barrier()
            own = statistics.median(timed(floor, n_steps))
            dist.barrier()
            fsdp_c.stats(model, reset=True)
            times = timed(step, n_steps)
            waits = fsdp_c.stats(model).waits
            rows.append(
                {
                    "model": kind,
                    "precision": precision,
                    "ranks": dist.get_world_size(),
                    "due_us": 1e6 * (measuring.agreed_max(own) - own),
                    "step_us": 1e6 * statistics.median(times),
                    "count": sum(wait.count for wait in waits.waits) / n_steps,
                    "by_kind": {
                        name: 1e6 / n_steps * sum(w.seconds for w in waits.waits if w.kind == name)
                        for name in KINDS
                    },
                }
            )
            del model, optimizer, step, plain, floor
    return [averaged(row) for row in rows]


def averaged(row: Row) -> Row:
    """The mean over ranks of each number."""
    numbers = [row["due_us"], row["step_us"], row["count"], *row["by_kind"].values()]
    due, step, count, *by_kind = measuring.mean_over_ranks(numbers)
    means = dict(zip(KINDS, by_kind, strict=True))
    return {**row, "due_us": due, "step_us": step, "count": count, "by_kind": means}


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    table = report.Table(
        "Waits of a training step, mean over ranks",
        ["model", "precision", "ranks", "step", "waits", "waited", "due", "waited / step", *KINDS],
        note="waits: their number. due: what uneven work alone costs, see above. The other columns"
        " sum up to waited. With more ranks than cores a wait also is another rank's turn to run.",
    )
    for row in rows:
        waited = sum(row["by_kind"].values())
        table.rows.append(
            [row["model"], row["precision"], str(row["ranks"]), report.duration(row["step_us"])]
            + [f"{row['count']:.1f}", report.duration(waited), report.duration(row["due_us"])]
            + [report.ratio(waited, row["step_us"], 3)]
            + [report.duration(row["by_kind"][kind]) for kind in KINDS]
        )
    return [table]


BENCH = Bench("waits", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
