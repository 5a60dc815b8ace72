"""Tries mutants in a copy of the tree, and says which of them no test has noticed.

Only the programs that run the changed line are tried, the usual killers of its file and the quick
ones first; one that fails or hangs ends it. What survives is shown, unless equivalent.txt says why
it changes nothing. What was killed is kept, so that a run that was stopped goes on; what survived
is tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutate.mutants import Mutant, mutants_of
from mutate.trial import ROOT, Coverage, Tree, Worker

FOLDER = ROOT / "build/mutate"
RESULTS = FOLDER / "results.json"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
DEFAULT = ("csrc/engine", "csrc/comm", "csrc/kernels", "csrc/optim", "csrc/transport")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(DEFAULT), help="sources or folders")
    parser.add_argument("--sample", type=int, help="so many of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="without the sanitizers")
    parser.add_argument("--again", action="store_true", help="also what earlier runs have killed")
    parser.add_argument("--programs", type=lambda names: names.split(","), help="only these: a,b")
    args = parser.parse_args()
    mutants = chosen(args.paths, args.sample, args.seed)
    excused = equivalents()
    known = {} if args.again or not RESULTS.exists() else json.loads(RESULTS.read_text())
    due = [
        m for m in mutants if m.key not in excused and not known.get(m.key, "").startswith("killed")
    ]
    print(f"{len(mutants)} mutants, {len(mutants) - len(due)} of them known", flush=True)
    if due:
        kinds = ("plain",) if args.quick else ("plain", "sanitized")
        try_all(due, args.workers, kinds, args.programs, known)
    survivors = [m for m in mutants if known.get(m.key, "").startswith("survived")]
    survivors = [m for m in survivors if m.key not in excused]
    for mutant in survivors:
        print(f"{mutant.file}:{mutant.number} in {mutant.function}: {known[mutant.key]}")
        print(f"  - {mutant.before.strip()}\n  + {mutant.after.strip()}")
    n_killed = sum(known.get(m.key, "").startswith("killed") for m in mutants)
    n_excused = sum(m.key in excused for m in mutants)
    print(f"{n_killed} killed, {len(survivors)} survived, {n_excused} equivalent")
    return 1 if survivors else 0


def try_all(
    due: list[Mutant],
    n_workers: int,
    kinds: tuple[str, ...],
    programs: list[str] | None,
    known: dict[str, str],
) -> None:
    tree = Tree(FOLDER / "tree", kinds, programs)
    coverage = Coverage(tree, FOLDER / "coverage.json")
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for index in range(n_workers):
        free.put(Worker(tree, coverage, FOLDER / f"worker{index}"))
    stopped = threading.Event()

    def fate_of(mutant: Mutant) -> str:
        if stopped.is_set():
            return ""
        worker = free.get()
        try:
            return worker.fate_of(mutant, kinds)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(n_workers) as pool:
        work = {pool.submit(fate_of, mutant): mutant for mutant in due}
        try:
            for index, item in enumerate(as_completed(work), 1):
                mutant = work[item]
                known[mutant.key] = fate = item.result()
                print(f"{index}/{len(due)} {mutant.file}:{mutant.number} {fate}", flush=True)
                text = json.dumps(known, indent=1)
                RESULTS.with_suffix(".new").write_text(text)
                RESULTS.with_suffix(".new").replace(RESULTS)
        finally:
            stopped.set()


def chosen(paths: list[str], n: int | None, seed: int) -> list[Mutant]:
    files: list[Path] = []
    for path in map(Path, paths):
        below = sorted(p for p in (ROOT / path).rglob("*") if p.suffix in (".c", ".h"))
        files += below if (ROOT / path).is_dir() else [ROOT / path]
    mutants = [
        mutant
        for file in files
        for mutant in mutants_of(str(file.relative_to(ROOT)), file.read_text())
    ]
    if n is None or n >= len(mutants):
        return mutants
    drawn = random.Random(seed).sample(range(len(mutants)), n)
    return [mutants[index] for index in sorted(drawn)]


def equivalents() -> set[str]:
    """Keys of mutants that change nothing; each stands below a line that says why."""
    lines = EQUIVALENT.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}
