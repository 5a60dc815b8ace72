"""Runs seeds and reports what they found; for tests and for the command line."""

import argparse
import collections
import os
import time
from dataclasses import dataclass, field

import harness

from differential import apart, execute, shrink, where
from differential.execute import Failure
from differential.program import WORLDS
from differential.ways import TRANSPORTS

CHUNK = 20
SEED_TIMEOUT_S = 6


@dataclass
class Result:
    n_lines: int = 0
    failures: dict[int, Failure] = field(default_factory=dict)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    roads: collections.Counter[str] = field(default_factory=collections.Counter)
    features: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def add(self, other: "Result") -> None:
        self.n_lines += other.n_lines
        self.failures.update(other.failures)
        self.ends.update(other.ends)
        self.roads.update(other.roads)
        self.features.update(other.features)


def run(
    seeds: list[int], world: int, fault: str = "", chunk: int = CHUNK, kind: str = ""
) -> Result:
    """Run seeds on ranks that stay alive; new ones after a seed whose ranks raised apart."""
    result = Result()
    left = list(seeds)
    while left and not (fault and result.failures):
        n_done = run_some(left[:chunk], world, fault, result, kind)
        left = left[n_done:]
    return result


def run_some(seeds: list[int], world: int, fault: str, result: Result, kind: str) -> int:
    """Run seeds up to the first whose ranks raised; gives how many."""
    try:
        reports = where.run_ranks(
            execute.run_seeds, world, seeds, fault, kind, timeout=20 + SEED_TIMEOUT_S * len(seeds)
        )
    except harness.RankFailure as error:
        line = shrink.last_line(str(error))
        seed = int(line.split()[1].strip(",")) if line.startswith("seed ") else seeds[0]
        result.failures[seed] = Failure(seed, "hangs", line, str(error)[-4000:])
        return seeds.index(seed) + 1
    n_done = min(report.n_programs for report in reports)
    result.n_lines += reports[0].n_lines
    result.ends.update(reports[0].ends)
    result.roads.update(reports[0].roads)
    result.features.update(reports[0].features)
    failures = [failure for report in reports for failure in report.failures]
    for failure in failures:
        result.failures.setdefault(failure.seed, failure)
    if any(failure.kind != "differs" for failure in failures):
        assert harness.Pool.in_use is not None
        harness.Pool.in_use.kill()
    return n_done


def by_world(seeds: range) -> dict[int, list[int]]:
    """Which seeds run on how many ranks."""
    found: dict[int, list[int]] = {}
    for seed in seeds:
        found.setdefault(WORLDS[seed % len(WORLDS)], []).append(seed)
    return found


def show(seed: int, world: int, failure: Failure) -> None:
    print(f"seed {seed} on {world} ranks {failure.kind} at {failure.line}")
    print("    " + failure.text[:500].replace("\n", "\n    "), flush=True)


def parse_seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def parse_hosts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def run_apart(seeds: range, world: int) -> int:
    wrong: list[str] = []
    for transport in TRANSPORTS:
        found, ends = apart.run(list(seeds), world, transport)
        print(f"{len(seeds)} seeds over {transport}: {ends}", *found, sep="\n", flush=True)
        wrong += found
    harness.stop()
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential",
        description="Runs random programs under torch's fully_shard and fsdp_c's and compares.",
    )
    parser.add_argument("--seeds", type=parse_seeds, default=range(100), help="N or FIRST:LAST")
    parser.add_argument("--ranks", type=int, help="ranks of all seeds; default: 1 to 4, by seed")
    parser.add_argument("--fault", default="", help="a mistake to plant; see faults.py")
    parser.add_argument("--device", action="store_true", help="the devices' schedule, on the CPU")
    parser.add_argument("--apart", action="store_true", help="ranks that differ; see apart.py")
    parser.add_argument("--hosts", type=parse_hosts, help="ranks of each: 2,2; see tests/hosts")
    parser.add_argument("--features", action="store_true", help="rare features; see features.py")
    parser.add_argument("--show", type=int, default=1, help="how many failures to make small")
    options = parser.parse_args(arguments)
    if options.device:
        os.environ["FSDP_C_DEVICES"] = "cpu"  # the ranks have it from here
    if options.hosts:
        where.choose(options.hosts)
        options.ranks = sum(options.hosts)
    if options.apart:
        return run_apart(options.seeds, options.ranks or 2)
    start = time.monotonic()
    kind = "features" if options.features else ""
    if options.features and not options.ranks:
        worlds = {2: list(options.seeds[::2]), 4: list(options.seeds[1::2])}
    else:
        worlds = {options.ranks: list(options.seeds)} if options.ranks else by_world(options.seeds)
    total = Result()
    for world, seeds in sorted(worlds.items()):
        for first in range(0, len(seeds), CHUNK):
            chunk = seeds[first : first + CHUNK]
            result = run(chunk, world, options.fault, kind=kind)
            total.add(result)
            print(
                f"{world} ranks, seeds {chunk[0]} to {chunk[-1]}: {len(result.failures)} failures,"
                f" {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for seed, failure in result.failures.items():
                show(seed, world, failure)
                if options.show > 0:
                    options.show -= 1
                    print(shrink.explain(seed, world, options.fault, kind), flush=True)
    seconds = time.monotonic() - start
    print(
        f"{len(options.seeds)} seeds, {total.n_lines} lines, {len(total.failures)} failures,"
        f" {sum(total.ends.values())} ended early, {seconds:.0f} s"
    )
    for reason, count in total.ends.most_common():
        print(f"{count:4} ended with {reason}")
    for road, count in total.roads.most_common():
        print(f"{count:4} ran on {road}")
    for (name, road), count in sorted(total.features.items()):
        print(f"{count:4} with {name} ran on {road}")
    harness.stop()
    return 1 if total.failures else 0
