"""Tries mutants in a copy of the tree, and says which of them no test has noticed.

Programs that are named like the source, or include its header, run first; one that fails, hangs or
does not compile ends it. What survives is shown, unless equivalent.txt says why it changes nothing.
Results are kept, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mutate.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build/mutate/tree"
RESULTS = ROOT / "build/mutate/results.json"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
COPIED = ("csrc", "tests/c", "setup.py", "pyproject.toml", "fsdp_c/_built.py")
DEFAULT = ("csrc/engine", "csrc/comm", "csrc/kernels", "csrc/optim", "csrc/transport")
PROGRAMS = TREE / "build/c-tests"
LIMIT_S = 60.0  # of a program that takes a few seconds; more if it is slower as it is


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(DEFAULT), help="sources or folders")
    parser.add_argument("--sample", type=int, help="so many of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--programs",
        default="test_*",
        help="those that may notice: test_schedule*,test_nccl",
    )
    parser.add_argument("--again", action="store_true", help="also what earlier runs have tried")
    args = parser.parse_args()
    mutants = chosen(args.paths, args.sample, args.seed)
    excused = equivalents()
    known = {} if args.again or not RESULTS.exists() else json.loads(RESULTS.read_text())
    due = [m for m in mutants if m.key not in excused and m.key not in known]
    print(f"{len(mutants)} mutants, {len(mutants) - len(due)} of them known", flush=True)
    if due:
        trial = Trial(args.programs.split(","))
        for index, mutant in enumerate(due, 1):
            known[mutant.key] = fate = trial.fate_of(mutant)
            print(f"{index}/{len(due)} {mutant.file}:{mutant.number} {fate}", flush=True)
            RESULTS.write_text(json.dumps(known, indent=1))
    survivors = [m for m in mutants if known.get(m.key) == "survived"]
    for mutant in survivors:
        print(f"{mutant.file}:{mutant.number}")
        print(f"  - {mutant.before.strip()}\n  + {mutant.after.strip()}")
    n_killed = sum(known.get(m.key, "").startswith("killed") for m in mutants)
    n_excused = sum(m.key in excused for m in mutants)
    print(f"{n_killed} killed, {len(survivors)} survived, {n_excused} equivalent")
    return 1 if survivors else 0


def chosen(paths: list[str], n: int | None, seed: int) -> list[Mutant]:
    files = []
    for path in map(Path, paths):
        files += sorted((ROOT / path).rglob("*.c")) if (ROOT / path).is_dir() else [ROOT / path]
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


class Trial:
    """A copy of the tree in which one source is wrong at a time."""

    def __init__(self, patterns: list[str]) -> None:
        TREE.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, TREE / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        if problem := self.build():
            raise SystemExit(f"the tree does not build as it is:\n{problem}")
        self.seconds: dict[str, float] = {}
        found = {path for pattern in patterns for path in PROGRAMS.glob(pattern)}
        for program in sorted(path for path in found if not path.suffix):
            began = time.monotonic()
            if not passes(program, 600):
                raise SystemExit(f"{program.name} fails as it is")
            self.seconds[program.name] = time.monotonic() - began

    def build(self) -> str:
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_c_tests"],
            cwd=TREE,
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr if done.returncode else ""

    def order(self, file: str) -> list[str]:
        """Those that are likely to notice first, then the quick ones."""
        stem = Path(file).stem
        header = f'"{Path(file).relative_to("csrc").with_suffix(".h")}"'

        def rank(name: str) -> tuple[int, float]:
            is_named = stem in name or name.removeprefix("test_").split("_")[0] in stem
            includes = header in (TREE / "tests/c" / f"{name}.c").read_text()
            return -2 * is_named - includes, self.seconds[name]

        return sorted(self.seconds, key=rank)

    def fate_of(self, mutant: Mutant) -> str:
        source = TREE / mutant.file
        text = source.read_text()
        lines = text.splitlines()
        assert lines[mutant.number - 1] == mutant.before
        lines[mutant.number - 1] = mutant.after
        source.write_text("\n".join(lines) + "\n")
        try:
            if self.build():
                return "killed by the compiler"
            for name in self.order(mutant.file):
                if not passes(PROGRAMS / name, max(LIMIT_S, 5 * self.seconds[name])):
                    return f"killed by {name}"
            return "survived"
        finally:
            source.write_text(text)


def passes(program: Path, limit_s: float) -> bool:
    process = subprocess.Popen(
        [program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(timeout=limit_s) in (0, 77)  # 77: left out
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
