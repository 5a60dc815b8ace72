"""All-gather and reduce-scatter between the ranks of a host: gloo, fsdp_c.Communicator, and memcpy.

The size is that of the whole: the all-gather's output, the reduce-scatter's input. memcpy copies as
many bytes once, on all ranks at the same time, and says what the memory itself allows.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import measuring
import report
from measuring import Bench, Case, Launch, Row

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB << shift for shift in range(0, 20, 2)]  # 1 KiB to 256 MiB
QUICK_SIZES = [KIB, 64 * KIB, MIB, 16 * MIB]
# What fsdp_c is built to stay under, as a multiple of memcpy, by (operation, bytes, ranks).
GOALS = {("all_gather", 16 * MIB, 2): 1.3, ("reduce_scatter", 16 * MIB, 2): 3.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=measuring.int_list, help="bytes, multiples of 64")
    parser.add_argument("--ranks", type=measuring.int_list, help="default 2,4")
    parser.add_argument("--rounds", type=int, help="most rounds of each case")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks or ([2] if args.quick else [2, 4])]


def communicators(names: list[str]) -> dict[str, Any]:
    """torch stands for its own functions over gloo; a module brings its Communicator."""
    apis = measuring.implementations([name for name in names if name != "torch"])
    return {name: api.Communicator() for name, api in apis.items()}


def cases_of(operation: str, comms: dict[str, Any], source: Any, numel: int) -> dict[str, Any]:
    """Name to (case, output) of every implementation, each with an output of its own."""
    import torch
    import torch.distributed as dist

    # torch 2.13 gave these functions new names; the old ones warn on every call.
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }
    new, old = names[operation]
    functions = {"torch": getattr(dist, new if hasattr(dist, new) else old)}
    functions |= {name: getattr(comm, operation) for name, comm in comms.items()}
    cases = {}
    for name, function in functions.items():
        output = torch.full((numel,), -1.0)
        cases[name] = (Case(functools.partial(function, output, source)), output)
    return cases


def copy_case(n_bytes: int) -> Case:
    import torch

    source, target = torch.ones(n_bytes, dtype=torch.uint8), torch.zeros(n_bytes, dtype=torch.uint8)
    to, start = target.data_ptr(), source.data_ptr()
    # The tensors stay alive through the default arguments.
    return Case(lambda keep=(source, target): ctypes.memmove(to, start, n_bytes))


def rank_values(numel: int, rank: int) -> Any:
    """Small integers that depend on rank and place, so that sums of them are exact."""
    import torch

    return (torch.arange(numel, dtype=torch.float32) + 7 * rank).remainder_(251)


@dataclass
class Problem:
    """One operation at one size: `source` goes in, `wanted` must come out."""

    operation: str
    source: Any
    wanted: Any
    # What one more in every element of every rank's source adds to every element of the result.
    per_increment: int


def problems(numel: int, rank: int, ranks: int) -> Iterator[Problem]:
    import torch

    part = numel // ranks
    mine = slice(rank * part, (rank + 1) * part)
    whole = rank_values(numel, rank)
    gathered, summed = torch.empty(numel), torch.zeros(part)
    for peer in range(ranks):
        values = rank_values(numel, peer)
        theirs = slice(peer * part, (peer + 1) * part)
        gathered[theirs] = values[theirs]
        summed += values[mine]
    yield Problem("all_gather", whole[mine].clone(), gathered, 1)
    yield Problem("reduce_scatter", whole, summed, ranks)


def verify(cases: dict[str, Any], problem: Problem, when: str) -> None:
    size = report.size_text(4 * max(problem.source.numel(), problem.wanted.numel()))
    for name, (case, output) in cases.items():
        output.fill_(-1)
        case.step()
        what = f"{name}, {problem.operation} of {size} {when}"
        measuring.same(what, output, problem.wanted, rtol=0, atol=0)


def measure_size(args: argparse.Namespace, comms: dict[str, Any], n_bytes: int) -> Iterator[Row]:
    """Verifies before timing, and after it with other values, in case a later call does less."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    rounds = args.rounds or (8 if args.quick else 12)
    for problem in problems(n_bytes // 4, rank, ranks):
        cases = cases_of(problem.operation, comms, problem.source, problem.wanted.numel())
        cases = {name: cases[name] for name in args.impl}
        verify(cases, problem, "before timing")
        timed = {name: case for name, (case, _) in cases.items()} | {"memcpy": copy_case(n_bytes)}
        times = measuring.measure(
            timed, rounds, block_s=0.01, budget_s=1.5 if args.quick else 5, most_steps=100
        )
        problem.source += 1
        problem.wanted += problem.per_increment
        verify(cases, problem, "after timing")
        facts = {"operation": problem.operation, "bytes": n_bytes, "ranks": ranks}
        yield {**facts, "times": times}


def work(args: argparse.Namespace) -> list[Row]:
    comms = communicators(args.impl)
    rows: list[Row] = []
    for n_bytes in args.sizes or (QUICK_SIZES if args.quick else SIZES):
        rows += measure_size(args, comms, n_bytes)
    for comm in comms.values():
        comm.close()
    return rows


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    shown = ["gloo" if name == "torch" else name for name in args.impl]
    found = []
    for operation, title in (("all_gather", "All-gather"), ("reduce_scatter", "Reduce-scatter")):
        table = report.Table(
            f"{title}, fp32, median of a call",
            ["size", "ranks", "memcpy", *shown]
            + [f"{name} / memcpy" for name in shown]
            + ["goal", f"{shown[0]} / {shown[-1]}", "min", "p90"],
            note="min, p90: of the last implementation.",
        )
        for row in (row for row in rows if row["operation"] == operation):
            times = {name: row["times"][name]["median_us"] for name in row["times"]}
            last = row["times"][args.impl[-1]]
            goal = GOALS.get((operation, row["bytes"], row["ranks"]))
            table.rows.append(
                [report.size_text(row["bytes"]), str(row["ranks"])]
                + [report.duration(times[name]) for name in ("memcpy", *args.impl)]
                + [report.ratio(times[name], times["memcpy"]) for name in args.impl]
                + [f"<= {goal}" if goal else ""]
                + [report.ratio(times[args.impl[0]], times[args.impl[-1]])]
                + [report.duration(last["min_us"]), report.duration(last["p90_us"])]
            )
        found.append(table)
    return found


BENCH = Bench("collectives", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
