"""Runs the families of the campaign one after the other, each for its share of the time."""

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from soak import families as all_families
from soak.case import FAILED, Family, Verdict, command_of, failed
from soak.record import Record, lines_of, write

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build/soak/state.json"
RESULTS = ROOT / "benchmarks/results"
LINE_S = 30.0  # between two lines of progress where nobody looks at a terminal


class Progress:
    """One line for people, on stderr."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.said_at = 0.0

    def say(self, family: str, n: int, n_failed: int, seconds: float, share: float) -> None:
        now = time.monotonic()
        if not self.is_terminal and now - self.said_at < LINE_S:
            return
        self.said_at = now
        filled = min(int(share * 20), 20)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}]"
        text = f"{bar} {family}: {n} done, {n_failed} failed, {seconds:.0f} s"
        print(
            f"\r{text:70}" if self.is_terminal else text,
            end="" if self.is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        if self.is_terminal:
            print(file=sys.stderr)


def run_one(family: Family, key: str) -> Verdict:
    try:
        return family.run(key)
    except Exception:
        return failed(f"the campaign itself failed\n{traceback.format_exc()}")


def run_family(
    family: Family, record: Record, seeds: Sequence[int], count: int | None, seconds: float
) -> None:
    """Cases that are not in the record, until so many are or the time is over."""
    progress, start = Progress(), time.monotonic()
    done = record.verdicts[family.name]
    with family.prepared():
        keys: Iterator[str] = itertools.chain(*(family.cases(seed) for seed in seeds))
        for key in keys:
            spent = time.monotonic() - start
            if spent >= seconds or (count is not None and len(done) >= count):
                break
            if key in done:
                continue
            record.whole[family.name] = family.whole()
            began = time.monotonic()
            verdict = run_one(family, key)
            record.add(family.name, key, verdict, time.monotonic() - began)
            if verdict.fate == FAILED:
                print(
                    f"\nFAILED {family.name}/{key}\n  reproduce: "
                    f"{verdict.command or command_of(family.name, key)}\n  "
                    + verdict.text[-1500:].replace("\n", "\n  "),
                    file=sys.stderr,
                    flush=True,
                )
            n_failed = sum(v.fate == FAILED for v in done.values())
            share = len(done) / count if count else min(spent / seconds, 1.0)
            progress.say(family.name, len(done), n_failed, time.monotonic() - start, share)
    progress.end()


def run_case(families: Sequence[Family], text: str) -> int:
    """One case by its name, as a report gives it."""
    name, _, key = text.partition("/")
    family = next(family for family in families if family.name == name)
    with family.prepared():
        verdict = run_one(family, key)
    print(f"{text}: {verdict.fate} {verdict.facts or ''}\n{verdict.text}")
    return int(verdict.fate == FAILED)


def seeds_of(text: str) -> list[int]:
    first, _, last = text.partition(":")
    return list(range(int(first), int(last) if last else int(first) + 1))


def parsed(arguments: Sequence[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--only", help=f"some of {','.join(names)}")
    parser.add_argument(
        "--seed",
        "--seeds",
        dest="seeds",
        type=seeds_of,
        default=[0],
        help="N or FIRST:LAST; draws the cases and their order",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all families together")
    parser.add_argument("--count", type=int, help="at most so many cases of each family")
    parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
    parser.add_argument("--case", help="run one case, as a report names it, and show what it gives")
    parser.add_argument("--state", type=Path, default=STATE, help="where --resume looks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else names
    if unknown := set(options.only) - set(names):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    return options


def main(
    arguments: Sequence[str] | None = None, families: Sequence[Family] = all_families.ALL
) -> int:
    options = parsed(arguments, [family.name for family in families])
    if options.case:
        return run_case(families, options.case)
    chosen = [family for family in families if family.name in options.only]
    record = Record(options.state, goes_on=options.resume)
    end = time.monotonic() + 60 * options.minutes
    for index, family in enumerate(chosen):
        share = (end - time.monotonic()) / (len(chosen) - index)
        run_family(family, record, options.seeds, options.count, share)
    about = {"seeds": f"{options.seeds[0]}:{options.seeds[-1] + 1}", "minutes": options.minutes}
    known = [family for family in families if record.verdicts[family.name]]
    path = write(record, known, about, options.results)
    print("\n".join(lines_of([record.row(family) for family in known])))
    for family, key, verdict in record.failures():
        print(f"FAILED {family}/{key}: {verdict.command or command_of(family, key)}")
    print(f"report: {path}")
    return int(bool(record.failures()))
