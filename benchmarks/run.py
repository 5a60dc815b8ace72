"""Runs every benchmark in turn and writes one table file and one JSON file for each."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import bench_collectives
import bench_estimate
import bench_features
import bench_host_overhead
import bench_memory
import bench_optim
import bench_owner
import bench_snapshots
import bench_step
import bench_strategies
import bench_trace
import bench_verify
import bench_waits
import measuring
import report

BENCHES = [
    bench.BENCH
    for bench in (
        bench_host_overhead,
        bench_features,
        bench_collectives,
        bench_step,
        bench_snapshots,
        bench_waits,
        bench_optim,
        bench_owner,
        bench_memory,
        bench_estimate,
        bench_strategies,
        bench_verify,
        bench_trace,
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--impl", default="torch,fsdp_c", help="what to compare")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--only", type=measuring.name_list, help="names of benchmarks")
    args, further = parser.parse_known_args()
    names = [bench.name for bench in BENCHES]
    unknown = set(args.only or []) - set(names)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {names}")
    if further and len(args.only or []) != 1:
        parser.error(f"{' '.join(further)}: arguments of a benchmark need --only with its name")
    argv = [*further, "--impl", args.impl, "--out", str(args.out)] + ["--quick"] * args.quick
    failed = []
    for bench in BENCHES:
        if args.only and bench.name not in args.only:
            continue
        started = time.monotonic()
        try:
            run_one(bench, argv)
        except (measuring.VerificationError, RuntimeError) as error:
            failed.append(bench.name)
            measuring.say(f"{bench.name}: {error}")
        measuring.say(f"{bench.name}: {time.monotonic() - started:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run_one(bench: measuring.Bench, argv: list[str]) -> None:
    options = measuring.parser_of(bench).parse_args(argv)
    facts, tables = measuring.run(bench, options, argv)
    path = report.result_path(options.out, bench.name, options.quick, ".md")
    parts = [f"`{facts['command']}`", report.heading(facts), *[table.render() for table in tables]]
    path.write_text("\n\n".join(parts))


if __name__ == "__main__":
    main()
