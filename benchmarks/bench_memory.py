"""Peak memory of a rank in training over the model's depth, above the same process without a model.

A unit is two bias-free linear layers of 16 MiB in fp32. What must be held is 1/ranks of
parameters and gradients; the figure is what comes on top of that, and whether it grows with depth.
Memory of two implementations cannot be told apart in one process, so each runs in fresh ones, in
turn, depth by depth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import measuring
import report
from measuring import Bench, Launch, Row

MIB = 1 << 20
# MiB that fsdp_c is built to stay under, by (units, ranks), for units of 32 MiB.
GOALS = {(16, 2): 680}
GOAL_RATIO = 1 / (1 - 0.2854)  # torch's peak over fsdp_c's, at every depth


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depths", type=measuring.int_list, help="units; default 2,4,8,16,32")
    parser.add_argument("--ranks", type=measuring.int_list, default=[2])
    parser.add_argument("--width", type=int, default=2048, help="a layer is width x width")
    parser.add_argument("--layers", type=int, default=2, help="layers of a unit")
    parser.add_argument("--batch", type=int, default=8, help="rows of input per rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--interval-s", type=float, default=0.005, help="between two samples")
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)


def launches(args: argparse.Namespace) -> list[Launch]:
    depths = args.depths or ([2, 8] if args.quick else [2, 4, 8, 16, 32])
    return [
        Launch(ranks, ["--depth", str(depth), "--case", name])
        for ranks in args.ranks
        for depth in depths
        for name in args.impl
    ]


class Sampler:
    """Owns the process that samples this one; `peak` is that since the last call, in MiB."""

    def __init__(self, interval_s: float) -> None:
        script = Path(__file__).with_name("pss_sampler.py")
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(script), str(os.getpid()), str(interval_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def peak(self) -> tuple[float, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["peak"] / 1024, answer["samples"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def sharded_model(api: Any, args: argparse.Namespace, mesh: Any) -> Any:
    """Made on the meta device, so that no rank ever holds the whole model while it is built."""
    import torch

    with torch.device("meta"):
        units = [
            [torch.nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
            for _ in range(args.depth)
        ]
        model = torch.nn.Sequential(*[torch.nn.Sequential(*layers) for layers in units])
    for module in model:
        api.fully_shard(module, mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            torch.manual_seed(1000 * i + mesh.get_local_rank())
            parameter.to_local().normal_(std=parameter.shape[1] ** -0.5)
    return model


def multiply_once(args: argparse.Namespace) -> None:
    """One layer without sharding: what its arithmetic leaves behind belongs to no model.

    That is code read from the libraries and the work space that MKL keeps.
    """
    import torch

    layer = torch.nn.Linear(args.width, args.width, bias=False)
    x = torch.ones(args.batch, args.width, requires_grad=True)
    layer(x).square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=1e-4).step()


def train(model: Any, args: argparse.Namespace, rank: int) -> list[float]:
    import torch

    torch.manual_seed(rank)
    x = torch.randn(args.batch, args.width)
    # Small enough that 256 linear layers do not diverge, large enough to show in the next loss.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def held_by(api: Any, model: Any) -> dict[str, int]:
    """Bytes by purpose; of an implementation that keeps no account, what the script can see."""
    if hasattr(api, "stats"):
        return {name: n_bytes for name, n_bytes in api.stats(model).rank.items() if n_bytes}
    shards = [parameter.to_local() for parameter in model.parameters()]
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    return {"parameters": sum(t.nbytes for t in shards), "gradients": sum(t.nbytes for t in grads)}


def work(args: argparse.Namespace) -> list[Row]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    api = measuring.implementations([args.case])[args.case]
    assert callable(api.fully_shard)  # loads what an import puts off: code is not what is measured
    mesh = init_device_mesh("cpu", (ranks,))
    dist.barrier()
    sampler = Sampler(args.interval_s)
    sampler.peak()
    empty, _ = sampler.peak()
    multiply_once(args)
    sampler.peak()
    warm, _ = sampler.peak()
    model = sharded_model(api, args, mesh)
    plan = getattr(api, "memory_plan", None)
    planned = None if plan is None else plan(model)
    losses = train(model, args, rank)
    peak, samples = sampler.peak()
    dist.barrier()
    rest, _ = sampler.peak()
    sampler.close()
    parameter_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    facts = {
        "rest_mib": rest,
        "empty_mib": empty,
        "warm_mib": warm,
        "peak_mib": peak,
        "samples": samples,
        "losses": losses,
    }
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, facts)
    return [
        {
            "case": args.case,
            "units": args.depth,
            "ranks": ranks,
            "steps": args.steps,
            "planned_peak_mib": planned and planned.rank_peak / MIB,
            "planned_rest_mib": planned and planned.rank_total / MIB,
            "held_mib": {name: n / MIB for name, n in held_by(api, model).items()},
            "rest_above_warm_mib": max(one["rest_mib"] - one["warm_mib"] for one in gathered),
            "peak_above_warm_mib": max(one["peak_mib"] - one["warm_mib"] for one in gathered),
            "needed_mib": 2 * parameter_bytes / ranks / MIB,
            "above_empty_mib": max(one["peak_mib"] - one["empty_mib"] for one in gathered),
            "by_rank": gathered,
        }
    ]


def check(rows: list[Row]) -> None:
    """Runs of different implementations had the same losses, rank by rank and step by step."""
    first: dict[Any, Row] = {}
    for row in rows:
        other = first.setdefault((row["units"], row["ranks"]), row)
        for rank, (mine, theirs) in enumerate(zip(row["by_rank"], other["by_rank"], strict=True)):
            for step, (a, b) in enumerate(zip(mine["losses"], theirs["losses"], strict=True)):
                if not abs(a - b) <= 1e-5 * abs(b):
                    raise measuring.VerificationError(
                        f"verification failed: {row['units']} units, rank {rank}, step {step}: "
                        f"loss {a} with {row['case']}, {b} with {other['case']}"
                    )


def planned_cells(found: dict[str, Row]) -> list[str]:
    planned = [row for row in found.values() if row["planned_peak_mib"] is not None]
    if not planned:
        return ["", "", ""]
    row = planned[-1]
    return [
        report.ratio(row["peak_above_warm_mib"], row["planned_peak_mib"]),
        report.number(row["rest_above_warm_mib"], 0),
        report.ratio(row["rest_above_warm_mib"], row["planned_rest_mib"]),
    ]


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    unit_mib = args.layers * args.width**2 * 4 / MIB
    table = report.Table(
        f"Peak PSS of a rank above the empty process, MiB, units of {unit_mib:g} MiB",
        ["units", "ranks", "shards + gradients", *args.impl]
        + [f"{name} on top" for name in args.impl]
        + ["goal", "ratio", "goal", "over plan", "rest", "over plan", "samples"],
        note="on top: beyond shards and gradients. The larger of the ranks. ratio: first over last "
        "implementation. over plan: over fsdp_c.memory_plan(model), made before the first step, "
        "without activations. rest: after the last step, with gradients. samples: fewest in one "
        "rank's run.",
    )
    by_key: dict[Any, dict[str, Row]] = {}
    for row in rows:
        by_key.setdefault((row["ranks"], row["units"]), {})[row["case"]] = row
    for (ranks, units), found in by_key.items():
        needed = next(iter(found.values()))["needed_mib"]
        peaks = [found[name]["above_empty_mib"] for name in args.impl]
        goal = GOALS.get((units, ranks)) if unit_mib == 32 else None
        fewest = min(one["samples"] for row in found.values() for one in row["by_rank"])
        table.rows.append(
            [str(units), str(ranks), report.number(needed, 0)]
            + [report.number(peak, 0) for peak in peaks]
            + [report.number(peak - needed, 0) for peak in peaks]
            + [f"<= {goal}" if goal else "", report.ratio(peaks[0], peaks[-1])]
            + [f">= {GOAL_RATIO:.2f}" if args.impl[0] == "torch" else ""]
            + planned_cells(found)
            + [str(fewest)]
        )
    return [table, purposes_table(args, rows)]


def purposes_table(args: argparse.Namespace, rows: list[Row]) -> report.Table:
    names = list(dict.fromkeys(name for row in rows for name in row["held_mib"]))
    table = report.Table(
        "What a rank holds after the last step, MiB",
        ["units", "ranks", "of", *names, "no purpose", "in all"],
        note="By purpose as fsdp_c.stats counts, of torch what a script can see. no purpose: the "
        "rest of PSS, of the rank that has most.",
    )
    for row in sorted(rows, key=lambda row: (row["ranks"], row["units"])):
        held, total = row["held_mib"], row["rest_above_warm_mib"]
        table.rows.append(
            [str(row["units"]), str(row["ranks"]), row["case"]]
            + [report.number(held[name], 1) if name in held else "" for name in names]
            + [report.number(total - sum(held.values())), report.number(total)]
        )
    return table


BENCH = Bench("memory", __file__, __doc__ or "", launches, work, tables, arguments, check)

if __name__ == "__main__":
    measuring.main(BENCH)
