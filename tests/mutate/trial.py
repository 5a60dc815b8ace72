"""Builds the core with one mistake at a time, and runs the programs that come by it.

A mistake costs the objects that run what it changes and the links of the programs that run: no more
is built. Which programs come by a line is counted once, by gcov.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutate.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("csrc", "tests/c", "setup.py", "pyproject.toml", "fsdp_c/_built.py")
LIMIT_S = 15.0  # of a program that takes a few seconds; more if it is slower as it is
# How the objects of a kind differ from what setup.py says: a mutant is compiled in half the time
# where it is not optimized for speed. What no program notices is tried once more with the
# sanitizers: they see what reads or writes one element too far.
FLAGS = {
    "plain": ["-O1"],
    "sanitized": ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "cover": ["--coverage", "-O1"],
}
GCOV_EXIT = """
#include <sys/syscall.h>
#include <unistd.h>
void __gcov_dump(void);
void _exit(int status)
{
    __gcov_dump();
    syscall(SYS_exit_group, status);
    __builtin_unreachable();
}
"""


@dataclass(frozen=True)
class Build:
    """What setup.py says of the core, of its programs and of how they are built."""

    core: tuple[str, ...]
    programs: tuple[str, ...]  # sources
    commands: dict[str, list[str]]  # of a source, without `-c`, itself and `-o`
    linker: list[str]
    libraries: list[str]

    @classmethod
    def described(cls, tree: Path, only: Container[str] | None) -> Build:
        there = os.getcwd()
        os.chdir(tree)
        try:
            setup = runpy.run_path("setup.py", run_name="setup")
            tools = setup["Toolchain"](is_test=True)
            core = setup["sources"](setup["C_SOURCES"], ".c")
            core += setup["sources"](setup["C_SIM_SOURCES"], ".c")
            programs = setup["sources"](setup["C_TEST_SOURCES"], ".c")
            programs = [p for p in programs if only is None or stem_of(p) in only]
        finally:
            os.chdir(there)
        commands = {source: tools.c_command(source) for source in core}
        commands |= {source: [*tools.c_command(source), "-Itests/c"] for source in programs}
        linker = [*tools.cc, *tools.mode_flags()]
        return cls(tuple(core), tuple(programs), commands, linker, setup["LINK_FLAGS"])


class Tree:
    """A copy of the sources, with the objects of all of them as they are."""

    def __init__(
        self, folder: Path, kinds: Iterable[str], only: Container[str] | None = None
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self.build = Build.described(folder, only)
        self.kept = folder / "build/mutated.json"  # what objects were made from
        self.made: dict[str, str] = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        self.included = self.included_files()
        core = [self.digest_of(source) for source in self.build.core]
        self.core_digest = hashlib.sha256("".join(core).encode()).hexdigest()
        stand_ins = [path.read_bytes() for path in sorted((folder / "tests/c/nccl").iterdir())]
        digest = hashlib.sha256(self.core_digest.encode() + b"".join(stand_ins)).hexdigest()
        if self.is_stale("libraries", digest):
            done = self.run([sys.executable, "setup.py", "-q", "build_c_tests", "--only-libraries"])
            if done.returncode != 0:
                raise SystemExit(f"the tree does not build as it is:\n{done.stderr}")
        for kind in kinds:
            self.compile_all(kind)
        self.sanitizes: dict[str, bool] = {}
        self.sanitizing = threading.Lock()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)

    def object(self, kind: str, source: str) -> str:
        return f"build/{kind}/{source}.o"

    def is_stale(self, name: str, digest: str) -> bool:
        """Whether it has to be made; notes that it is."""
        if self.made.get(name) == digest:
            return False
        self.made[name] = digest
        return True

    def digest_of(self, source: str) -> str:
        digest = hashlib.sha256(" ".join(self.build.commands[source]).encode())
        for name in self.included[source]:
            digest.update(name.encode() + (self.folder / name).read_bytes())
        return digest.hexdigest()

    def compile_all(self, kind: str) -> None:
        def compile_one(source: str) -> None:
            target = self.folder / self.object(kind, source)
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [*self.build.commands[source], *FLAGS[kind], "-c", source]
            done = self.run([*command, "-o", str(target)])
            if done.returncode != 0:
                raise SystemExit(f"{source} does not compile as it is:\n{done.stderr}")

        due = [
            source
            for source in self.build.commands
            if self.is_stale(self.object(kind, source), self.digest_of(source))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, due))
        self.kept.write_text(json.dumps(self.made))

    def included_files(self) -> dict[str, list[str]]:
        """Of each source: itself and what of ours it includes."""
        found: dict[str, list[str]] = {}
        for source, command in self.build.commands.items():
            text = self.run([*command, "-MM", source]).stdout
            names = text.replace("\\\n", " ").split()[1:]
            found[source] = sorted({os.path.normpath(name) for name in names})
        return found

    def users(self, file: str) -> list[str]:
        """Sources that have to be compiled anew where a file changes."""
        return [source for source, names in self.included.items() if file in names]


class Coverage:
    """The programs that run each line, how long each of them takes, and the sources whose objects
    run a header's."""

    def __init__(self, tree: Tree, kept: Path) -> None:
        self.counted: dict[str, dict[str, Any]] = {}
        if kept.exists():
            self.counted = json.loads(kept.read_text())
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, list[str]]] = {}
        self.sources: dict[str, set[str]] = {}
        self.kills: Counter[tuple[str, str]] = Counter()  # of a file's mutants, by a program
        due = {}
        for source in tree.build.programs:
            name, digest = stem_of(source), tree.core_digest + tree.digest_of(source)
            if self.counted.get(name, {}).get("of") != digest:
                due[name] = digest
        if due:
            print(f"counting which lines {len(due)} programs run", flush=True)
            tree.compile_all("cover")
        for name, digest in due.items():
            self.counted[name] = {"of": digest, **self.count(tree, name)}
            kept.write_text(json.dumps(self.counted))
        for name in map(stem_of, tree.build.programs):
            counted = self.counted[name]
            self.seconds[name] = counted["seconds"]
            for file, sources in counted.get("sources", {}).items():
                self.sources.setdefault(file, set()).update(sources)
            for file, numbers in counted["lines"].items():
                for number in numbers:
                    self.lines.setdefault(file, {}).setdefault(number, []).append(name)

    @staticmethod
    def count(tree: Tree, name: str) -> dict[str, Any]:
        at_exit = tree.folder / "build/cover/at_exit.c"
        at_exit.write_text(GCOV_EXIT)
        core = [tree.object("cover", source) for source in tree.build.core]
        program = tree.folder / "build/c-tests" / name
        objects = [tree.object("cover", f"tests/c/{name}.c"), *core, str(at_exit)]
        command = [*tree.build.linker, "--coverage", "-o", str(program), *objects]
        done = tree.run([*command, *tree.build.libraries])
        if done.returncode != 0:
            raise SystemExit(f"{name} does not link as it is:\n{done.stderr}")
        data = tree.folder / "build/counts"
        shutil.rmtree(data, ignore_errors=True)
        began = time.monotonic()
        if not passes(program, 600, {"GCOV_PREFIX": str(data)}):
            raise SystemExit(f"{name} fails as it is")
        seconds = time.monotonic() - began
        # That of GCOV_EXIT lies elsewhere.
        counts = [path for path in data.rglob("*.gcda") if "/build/cover/" in str(path)]
        for path in counts:  # objects may come from another folder
            notes = str(path).rpartition("/build/cover/")[2].replace(".gcda", ".gcno")
            shutil.copy2(tree.folder / "build/cover" / notes, path.with_suffix(".gcno"))
        lines: dict[str, list[str]] = {}
        sources: dict[str, list[str]] = {}
        output = tree.run(["gcov", "--json-format", "--stdout", *map(str, counts)]).stdout
        for counted in map(json.loads, output.splitlines()):
            source = counted["data_file"].rpartition("/build/cover/")[2].removesuffix(".gcda")
            for file in counted["files"]:
                path = os.path.normpath(file["file"])
                run = [str(line["line_number"]) for line in file["lines"] if line["count"]]
                if run:
                    lines.setdefault(path, []).extend(run)
                    sources.setdefault(path, []).append(source)
        print(f"  {name}: {seconds:.1f} s", flush=True)
        return {
            "seconds": seconds,
            "lines": {file: sorted(set(n)) for file, n in lines.items()},
            "sources": sources,
        }

    def programs(self, mutant: Mutant) -> list[str]:
        """First those that have killed most of the file's mutants, then the quick ones. Lines
        without code, such as half an expression, count as the closest line before them that has
        some."""
        of_file = self.lines.get(mutant.file, {})
        numbers = [int(n) for n in of_file]
        if str(mutant.number) in of_file:
            names = of_file[str(mutant.number)]
        else:
            before = [n for n in numbers if mutant.number - 6 <= n < mutant.number]
            names = of_file[str(max(before))] if before else []
        if not names and self.is_inlined(mutant):  # such calls may leave no line of their own
            names = sorted({name for some in of_file.values() for name in some})
        return sorted(names, key=lambda name: (-self.kills[mutant.file, name], self.seconds[name]))

    @staticmethod
    def is_inlined(mutant: Mutant) -> bool:
        declared = rf"^(?:INLINE|FC_BOTH|static inline)\b[^;{{]*\b{mutant.function}\("
        return re.search(declared, (ROOT / mutant.file).read_text(), re.MULTILINE) is not None


class Worker:
    """A folder in which one mutant at a time is built and tried."""

    def __init__(self, tree: Tree, coverage: Coverage, folder: Path) -> None:
        self.tree, self.coverage, self.folder = tree, coverage, folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for library in (tree.folder / "build/c-tests").glob("*.so"):
            (folder / library.name).symlink_to(library)

    def fate_of(self, mutant: Mutant, kinds: tuple[str, ...]) -> str:
        names = self.coverage.programs(mutant)
        lines = (self.tree.folder / mutant.file).read_text().splitlines()
        assert lines[mutant.number - 1] == mutant.before
        lines[mutant.number - 1] = mutant.after
        shutil.rmtree(self.folder / "changed", ignore_errors=True)
        changed = self.folder / "changed" / mutant.file
        changed.parent.mkdir(parents=True)
        changed.write_text("\n".join(lines) + "\n")
        for kind in kinds:
            replaced = self.compiled(kind, mutant.file)
            if replaced is None:
                return "killed by the compiler"
            for name in names:
                if kind == "sanitized" and not self.sanitizes(name):
                    continue
                if not self.passes(kind, name, replaced):
                    self.coverage.kills[mutant.file, name] += 1
                    return f"killed by {name}" + (f", {kind}" if kind != "plain" else "")
        return f"survived {len(names)} programs" if names else "survived: no program runs it"

    def sanitizes(self, name: str) -> bool:
        """Whether a program passes with the sanitizers as it is."""
        with self.tree.sanitizing:
            known = self.tree.sanitizes
            if name not in known:
                known[name] = self.passes("sanitized", name, {})
            return known[name]

    def compiled(self, kind: str, file: str) -> dict[str, str] | None:
        """The objects that differ, by source."""
        tree, build = self.tree, self.tree.build
        replaced: dict[str, str] = {}
        users = tree.users(file)
        met = [source for source in users if source in self.coverage.sources.get(file, ())]
        for source in met or users:
            target = str(self.folder / f"{len(replaced)}.o")
            command = [*build.commands[source], *FLAGS[kind], "-w"]
            where = command.index("-Icsrc")
            command[where:where] = [f"-I{self.folder}/changed/csrc"]
            path = str(self.folder / "changed" / file) if source == file else source
            if tree.run([*command, "-c", path, "-o", target]).returncode != 0:
                return None
            replaced[source] = target
        return replaced

    def passes(self, kind: str, name: str, replaced: dict[str, str]) -> bool:
        tree, build = self.tree, self.tree.build
        program = self.folder / name
        sources = [f"tests/c/{name}.c", *build.core]
        objects = [replaced.get(source) or tree.object(kind, source) for source in sources]
        command = [*build.linker, *FLAGS[kind], "-o", str(program), *objects, *build.libraries]
        done = tree.run(command)
        if done.returncode != 0:
            raise SystemExit(f"{name} does not link:\n{done.stderr}")
        limit_s = max(LIMIT_S, 5 * self.coverage.seconds[name])
        has_passed = passes(program, limit_s if kind == "plain" else 4 * limit_s)
        program.unlink()
        return has_passed


def stem_of(source: str) -> str:
    return Path(source).stem


def files_below(path: Path) -> Iterable[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def passes(program: Path, limit_s: float, env: dict[str, str] | None = None) -> bool:
    """A program that has said what is wrong is not waited for."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [program],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        deadline = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline:
                try:
                    return process.wait(timeout=0.2) in (0, 77)  # 77: left out
                except subprocess.TimeoutExpired:
                    if b": not true: " in os.pread(said.fileno(), 1 << 16, 0):
                        break
            return False
        finally:  # ranks too that a failing program has left behind
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
