"""Every strategy on one GPT beside DistributedDataParallel: bytes, memory and time of a step.

Bytes and memory are what the core counted and holds, not what arithmetic says they should be;
theory stands beside them. Bytes received are those of the collectives over any transport; what
was really copied is less, since ranks of a host share memory. Losses of all have to be equal.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import bench_step
import measuring
import report
import torch
import torch.distributed as dist
from measuring import Bench, Case, Launch, Row
from torch import nn

MIB = 1 << 20
# Of the model beside the arguments; what needs no comparison is as bench_step has it.
FIXED = {"batch": 2, "tokens": 64}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, help="default 2,4; quick: 2")
    parser.add_argument("--rounds", type=int, help="most rounds of each case")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks or ([2] if args.quick else [2, 4])]


def model_of(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    given = {name: getattr(args, name) for name in ("vocabulary", "width", "layers", "heads")}
    return bench_step.GPT(bench_step.Config(**given, **FIXED))


def sizes_of(strategy: Any, ranks: int) -> tuple[int, int]:
    """Replicas and shards; hybrid ones shard over pairs."""
    if not strategy.is_sharded:
        return ranks, 1
    return (ranks // 2, 2) if strategy.is_hybrid else (1, ranks)


def strategy_row(api: Any, strategy: Any, args: argparse.Namespace, batch: Any) -> Row:
    """The model of one strategy, what a step of it moves and holds, and its losses."""
    ranks = dist.get_world_size()
    replicas, shards = sizes_of(strategy, ranks)
    model = model_of(args)
    n_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
    mesh = (replicas, shards) if strategy.is_hybrid else None
    api.shard(model, strategy.name, units=bench_step.Block, mesh=mesh)
    optimizer = bench_step.adamw(model.parameters())
    train = functools.partial(bench_step.training_step, model, optimizer, batch)
    losses = [float(train().detach())]
    before = api.stats(model).traffic_total
    losses += [float(train().detach())]
    held = api.stats(model, optimizer)
    moved = held.traffic_total - before
    return {
        "model": model,
        "train": train,
        "losses": losses,
        "figures": {
            "strategy": strategy.name,
            "ranks": ranks,
            "replicas": replicas,
            "model_bytes": n_bytes,
            "received": moved.payload,
            "theory": strategy.volume(shards, replicas) * n_bytes,
            "copied": moved.copied,
            "held": held.rank,
        },
    }


def work(args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(100 + dist.get_rank())
    tokens, targets = torch.randint(args.vocabulary, (2, 2, FIXED["tokens"])).unbind()
    batch = (tokens, targets)
    last = args.impl[-1]
    api = measuring.implementations([last])[last]
    replicas = nn.parallel.DistributedDataParallel(model_of(args))
    optimizer = bench_step.adamw(replicas.parameters())
    train = functools.partial(bench_step.training_step, replicas, optimizer, batch)
    wanted = [float(train().detach()) for _ in range(2)]
    rows = []
    for strategy in api.STRATEGIES.values():
        row = strategy_row(api, strategy, args, batch)
        measuring.same(
            f"{last}, {strategy.name}, losses",
            torch.tensor(row["losses"]),
            torch.tensor(wanted),
            rtol=1e-5,
            atol=0,
        )
        cases = {"torch": Case(train), last: Case(row["train"])}
        times = measuring.measure(
            cases, args.rounds or 8, block_s=0.2, budget_s=2 if args.quick else 4
        )
        rows.append({**row["figures"], "times": times})
    return rows


def check(rows: list[Row]) -> None:
    for row in rows:
        if abs(row["received"] - row["theory"]) > 0.01 * row["theory"]:
            raise measuring.VerificationError(
                f"verification failed: {row['strategy']} on {row['ranks']} ranks received"
                f" {row['received']} bytes, theory says {row['theory']:.0f}"
            )


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    last = args.impl[-1]
    n_bytes = rows[0]["model_bytes"]
    table = report.Table(
        f"A GPT of {n_bytes / MIB:.1f} MiB, fp32, AdamW; bytes of rank 0 over those of the model",
        ["strategy", "ranks", "received", "theory", "copied", "parameters", "gradients"]
        + ["optimizer", "reduce slots", "torch DDP step", f"{last} step", "ratio"],
        note="received: payload of a step's all-gathers, reduce-scatters and all-reduces, as the"
        " core counts it, (n-1)/n of the unit for each of the first two and twice that for the"
        " third. theory: 2 x (n-1)/n for DDP, ZeRO-1 and ZeRO-2, 3 x for ZeRO-3; hybrid ones shard"
        " over pairs. copied: bytes that the rank wrote to move them. The rest: what it holds"
        " between two steps. ratio: DDP's median step over that of the strategy.",
    )
    for row in rows:
        held = row["held"]
        ours, theirs = row["times"][last]["median_us"], row["times"]["torch"]["median_us"]
        names = ("parameters", "gradients", "optimizer", "reduce slots")
        table.rows.append(
            [row["strategy"], str(row["ranks"])]
            + [f"{row[name] / n_bytes:.3f}" for name in ("received", "theory", "copied")]
            + [f"{held[name] / n_bytes:.2f}" for name in names]
            + [report.duration(theirs), report.duration(ours), report.ratio(theirs, ours)]
        )
    return [table]


BENCH = Bench("strategies", __file__, __doc__ or "", launches, work, tables, arguments, check)

if __name__ == "__main__":
    measuring.main(BENCH)
