"""Starts ranks with torchrun, measures cases in turn and checks that they compute the same.

A benchmark file describes itself as a `Bench` and calls `main`. Started by a user it launches
itself once per `Launch` under torchrun; started by torchrun it is a rank, and rank 0 hands its rows
back through a file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report

# This source tree is what is measured where it is built, and an installed fsdp_c elsewhere.
TREE = Path(__file__).resolve().parent.parent
sys.path.insert(0 if any(TREE.glob("fsdp_c/_C*.so")) else len(sys.path), str(TREE))

# A rank finds the file for its rows here; its presence is what makes a process a rank.
ROWS_VARIABLE = "BENCH_ROWS_FILE"
HOSTS_VARIABLE = "BENCH_HOSTS"
SUPPORT = TREE / "tests" / "support"
Row = dict[str, Any]
FSDP2 = "torch.distributed.fsdp"


class VerificationError(AssertionError):
    """Two implementations do not compute the same, so their times must not be compared."""


@dataclass
class Launch:
    """One torchrun: so many ranks, with these arguments beside the user's own.

    With `hosts`, how many ranks each has, no torchrun: ranks of the tests' hosts.
    """

    ranks: int
    argv: list[str] = field(default_factory=list)
    hosts: tuple[int, ...] = ()

    def is_this(self) -> bool:
        """In a rank: whether it was launched by this."""
        return os.environ[HOSTS_VARIABLE] == str(self.hosts)


@dataclass
class Bench:
    name: str
    file: str
    summary: str
    launches: Callable[[argparse.Namespace], list[Launch]]
    work: Callable[[argparse.Namespace], list[Row]]
    tables: Callable[[argparse.Namespace, list[Row]], list[report.Table]]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    check: Callable[[list[Row]], None] = lambda rows: None


# --- command line and launching ---------------------------------------------------------------


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def name_list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser_of(bench: Bench) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=bench.summary)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument(
        "--impl",
        type=name_list,
        default=["torch", "fsdp_c"],
        help="what to compare: torch, or the name of a module with the same functions",
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=600, help="longest time for one launch")
    bench.arguments(parser)
    return parser


def main(bench: Bench) -> None:
    args = parser_of(bench).parse_args()
    if ROWS_VARIABLE in os.environ:
        be_a_rank(bench, args)
        return
    try:
        run(bench, args, sys.argv[1:])
    except (VerificationError, RuntimeError) as error:
        raise SystemExit(f"{bench.name}: {error}") from None


def run(bench: Bench, args: argparse.Namespace, argv: list[str]) -> tuple[Row, list[report.Table]]:
    """All launches of one benchmark; prints its tables, writes its JSON and returns both."""
    require_implementations(args.impl)
    rows: list[Row] = []
    for launch in bench.launches(args):
        extra = " ".join(launch.argv)
        say(f"{bench.name}: {ranks_text(launch.ranks)} {extra}".rstrip())
        rows += launch_ranks(bench, launch, argv, args.limit_s)
    bench.check(rows)
    facts = report.record(bench.name, args, rows)
    tables = bench.tables(args, rows)
    print(report.heading(facts) + "\n")
    for table in tables:
        print(table.render(), flush=True)
    path = report.result_path(args.out, bench.name, args.quick, ".json")
    report.write_json(path, facts)
    say(f"{bench.name}: wrote {path}")
    return facts, tables


def ranks_text(n_ranks: int) -> str:
    return f"{n_ranks} rank{'s' * (n_ranks > 1)}"


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


def launch_hosts(bench: Bench, launch: Launch, argv: list[str], limit_s: float) -> list[Row]:
    sys.path.append(str(SUPPORT))
    import hosts

    if hosts.why_not():
        raise RuntimeError(f"this user cannot have hosts: {hosts.why_not()}")
    name = Path(bench.file).stem
    outcomes = hosts.run_hosts(
        work_on_host, launch.hosts, name, argv, launch.hosts, timeout=limit_s, fresh=True
    )
    for outcome in outcomes:
        if not outcome.ok:
            raise RuntimeError(f"rank {outcome.rank}: {outcome.error or outcome.output}")
    return outcomes[0].value


def work_on_host(
    rank: int, n_ranks: int, name: str, argv: list[str], hosts: tuple[int, ...]
) -> list[Row]:
    bench = importlib.import_module(name).BENCH
    os.environ[HOSTS_VARIABLE] = str(hosts)
    return bench.work(parser_of(bench).parse_args(argv))


def launch_ranks(bench: Bench, launch: Launch, argv: list[str], limit_s: float) -> list[Row]:
    if launch.hosts:
        return launch_hosts(bench, launch, argv, limit_s)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows_file = Path(folder) / "rows.json"
        # One thread a rank, as torchrun itself sets it for several ranks; a fresh standalone store
        # per launch, so that benchmarks that follow each other cannot meet.
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment[ROWS_VARIABLE] = str(rows_file)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(launch.ranks), "--local_addr", "127.0.0.1"]
        command += [bench.file, *argv, *launch.argv]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{ranks_text(launch.ranks)} took more than {limit_s:g} s") from None
        finally:
            _end(process)
        if code != 0:
            raise RuntimeError(f"{ranks_text(launch.ranks)} ended with exit code {code}, see above")
        return json.loads(rows_file.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun's ranks lead sessions of their own: only torchrun itself can end them all."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def require_implementations(names: list[str]) -> None:
    """One clear sentence here instead of a traceback from each rank."""
    for name in names:
        # The name alone: torch takes seconds to import, and only ranks need it.
        if importlib.util.find_spec(name) is None:
            raise RuntimeError(f"there is no module {name}; build it, or choose with --impl")


def _module_name(name: str) -> str:
    return FSDP2 if name == "torch" else name


# --- inside a rank ----------------------------------------------------------------------------


def be_a_rank(bench: Bench, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rows = bench.work(args)
    except (VerificationError, ImportError) as error:
        raise SystemExit(str(error)) from None  # torchrun ends the other ranks
    if dist.get_rank() == 0:
        Path(os.environ[ROWS_VARIABLE]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def implementations(names: list[str]) -> dict[str, Any]:
    """Name to module; each has the functions of torch.distributed.fsdp."""
    return {name: importlib.import_module(_module_name(name)) for name in names}


@contextlib.contextmanager
def verifying(what: str) -> Iterator[None]:
    """Turns a failed comparison inside into an error that says what was compared, and where."""
    import torch.distributed as dist

    try:
        yield
    except AssertionError as error:
        where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise VerificationError(f"verification failed: {what} on {where}: {error}") from error


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(what: str, got: Any, want: Any, **tolerance: float) -> None:
    """Compares two (lists of) tensors, on this rank's part where they are sharded."""
    import torch

    with verifying(what):
        if isinstance(want, (list, tuple)):
            if any((a is None) != (b is None) for a, b in zip(got, want, strict=True)):
                raise AssertionError("one side is None")
            got = [local(tensor) for tensor in got if tensor is not None]
            want = [local(tensor) for tensor in want if tensor is not None]
        else:
            got, want = local(got), local(want)
        torch.testing.assert_close(got, want, **tolerance)


@dataclass
class Case:
    """Something to time: `step` is timed, `before` is not and runs ahead of each step."""

    step: Callable[[], Any]
    before: Callable[[], None] | None = None


def measure(
    cases: dict[str, Case],
    rounds: int,
    block_s: float = 0.1,
    budget_s: float = math.inf,
    most_steps: int = 200,
    least_steps: int = 1,
) -> dict[str, Row]:
    """Times the cases in turn, round after round, and returns statistics in microseconds.

    A round runs one block of every case, beginning with another case each time; a block is as many
    steps as take `block_s`, `most_steps` at most, and `least_steps` at least unless one takes ten
    times as long. Ranks meet before a block, and a block of several steps begins with one that is
    not counted, so that neither the ranks' skew nor the other case's cache is charged. A sample is
    a step, or a block's mean step where nothing runs between steps,
    averaged over ranks. After `budget_s` no new round begins, but two are always measured: one
    sample has no spread.
    """
    steps = {
        name: _steps_per_block(case, block_s, least_steps, most_steps)
        for name, case in cases.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    started = time.perf_counter()
    for index in range(rounds):
        if index > 1 and agreed_max(time.perf_counter() - started) > budget_s:
            break
        for name in order[index % len(order) :] + order[: index % len(order)]:
            samples[name] += _block(cases[name], steps[name])
    return {name: statistics_of(mean_over_ranks(values)) for name, values in samples.items()}


def measure_added(
    base: Case, cases: dict[str, Case], budget_s: float, block_s: float, most_pairs: int = 10_000
) -> dict[str, Row]:
    """Times what each case adds to `base`, in microseconds, from pairs of neighbouring blocks.

    A machine that slows down for a second slows both blocks of a pair, so that their difference
    drifts less than either. A block's figure is its median step on the slowest rank: ranks that
    meet in a step wait for that one, and the base's do not. Cases take turns, who has used the
    least of `budget_s` next; of a pair now the base's block comes first and now the case's.
    Returns statistics of the differences by case, with `base_us`, the median of the base's blocks
    beside it.
    """
    steps = {name: _steps_per_block(case, block_s, 3, 200) for name, case in cases.items()}
    base_steps = _steps_per_block(base, block_s, 3, 200)
    used = dict.fromkeys(cases, 0.0)
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    while open_cases := [
        name
        for name in cases
        if len(blocks[name]) < min(2, most_pairs)
        or (used[name] < budget_s and len(blocks[name]) < most_pairs)
    ]:
        name = min(open_cases, key=lambda name: used[name])
        started = time.perf_counter()
        pair = [(base, base_steps), (cases[name], steps[name])]
        turn = -1 if len(blocks[name]) % 2 else 1
        medians = [statistics.median(_block(*block)) for block in pair[::turn]][::turn]
        blocks[name].append((medians[0], medians[1]))
        used[name] += agreed_max(time.perf_counter() - started)
    results = {}
    for name, pairs in blocks.items():
        in_base = max_over_ranks([pair[0] for pair in pairs])
        in_case = max_over_ranks([pair[1] for pair in pairs])
        results[name] = statistics_of([b - a for a, b in zip(in_base, in_case, strict=True)])
        results[name]["base_us"] = statistics.median(in_base)
    return results


def _steps_per_block(case: Case, block_s: float, least_steps: int, most_steps: int) -> int:
    seconds = agreed_max(_block(case, 1)[0] * 1e-6)
    if seconds < block_s:  # the first step pays for set-up; what follows is the better guess
        seconds = agreed_max(min(_block(case, 3)) * 1e-6)
    least = least_steps if seconds < 10 * block_s else 1
    return max(least, min(most_steps, round(block_s / max(seconds, 1e-9))))


def _block(case: Case, n_steps: int) -> list[float]:
    import torch.distributed as dist

    dist.barrier()
    clock = time.perf_counter_ns
    if n_steps > 1:
        _run_step(case)
    if case.before is None:
        start = clock()
        for _ in range(n_steps):
            case.step()
        return [(clock() - start) / n_steps / 1e3]
    values = []
    for _ in range(n_steps):
        case.before()
        start = clock()
        case.step()
        values.append((clock() - start) / 1e3)
    return values


def _run_step(case: Case) -> None:
    if case.before is not None:
        case.before()
    case.step()


def agreed_max(value: float) -> float:
    """The largest of the ranks' values, so that all of them decide alike."""
    return max_over_ranks([value])[0]


def max_over_ranks(values: list[float]) -> list[float]:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def mean_over_ranks(values: list[float]) -> list[float]:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared)
    return (shared / dist.get_world_size()).tolist()


def statistics_of(samples_us: list[float]) -> Row:
    ordered = sorted(samples_us)
    return {
        "median_us": statistics.median(ordered),
        "min_us": ordered[0],
        "p10_us": ordered[math.ceil(0.1 * len(ordered)) - 1],
        "p90_us": ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)],
        "samples": len(ordered),
    }
