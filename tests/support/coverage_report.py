"""`make coverage`: lines and functions of fsdp_c and csrc that no chosen test runs.

Works in a copy of the tree, build/coverage, so that no object of it meets the normal build. Fails
and names the modules of fsdp_c, and the files of csrc/libtorch and csrc/bind, of which no test
calls a function.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build/coverage"
REPORT = TREE / "build/report.txt"
# Ranks are forked, and some of them end by os._exit.
SETTINGS = """[run]
source = fsdp_c
parallel = true
sigterm = true
data_file = {tree}/build/python/data
patch = subprocess, fork, _exit
"""
# Imported under a torch that is older than the one of development.
FOR_OTHER_TORCH = {"fsdp_c/_compat/_torch_pre_2_13.py"}
Lines = dict[int, int]  # how often each ran
Functions = dict[str, tuple[int, int]]  # first line, and how often it ran


def run(*command: str, **env: str) -> int:
    return subprocess.run(command, cwd=TREE, env={**os.environ, **env}).returncode


def copy_tree() -> None:
    """Files that did not change keep their times, and so their objects."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    there = [path for path in TREE.rglob("*") if path.is_file()]
    for path in there:
        name = str(path.relative_to(TREE))
        if not name.startswith("build/") and path.suffix != ".so" and name not in names:
            path.unlink()
    for name in names:
        source, target = ROOT / name, TREE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.stat().st_mtime_ns != source.stat().st_mtime_ns:
            shutil.copy2(source, target)


def run_tests(arguments: list[str]) -> int:
    """Builds with counters, then runs pytest with them and with coverage."""
    for counters in TREE.glob("build/objects/**/*.gcda"):
        counters.unlink()
    shutil.rmtree(TREE / "build/python", ignore_errors=True)
    (TREE / "build/python").mkdir(parents=True)
    settings = TREE / "build/coveragerc"
    settings.write_text(SETTINGS.format(tree=TREE))
    flags = "--coverage -fprofile-update=atomic"
    tools = {"CC": f"gcc {flags}", "CXX": f"g++ {flags}", "FSDP_C_DEBUG": "1", "FSDP_C_CUDA": "0"}
    tools["PYTHONPATH"] = str(TREE)
    if run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", **tools):
        raise SystemExit("the build with counters failed")
    command = ["-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", *arguments]
    status = run(sys.executable, *command, **tools)
    run(sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}")
    return status


def python_lines() -> dict[str, Lines]:
    target = TREE / "build/python.json"
    command = ["-m", "coverage", "json", "-q", f"--rcfile={TREE}/build/coveragerc", "-o"]
    run(sys.executable, *command, str(target))
    files = json.loads(target.read_text())["files"]
    return {
        name: {**dict.fromkeys(one["missing_lines"], 0), **dict.fromkeys(one["executed_lines"], 1)}
        for name, one in files.items()
    }


def python_functions(name: str, lines: Lines) -> Functions:
    """Functions of more than a docstring."""
    found: Functions = {}
    for node in ast.walk(ast.parse((TREE / name).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            span = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
            inside = [lines[line] for line in span if line in lines]
            if inside:
                found[f"{node.name}:{node.lineno}"] = (node.lineno, max(inside))
    return found


def c_counts() -> tuple[dict[str, Lines], dict[str, Functions]]:
    """What gcov says of each source of ours, in whichever objects it is."""
    lines: dict[str, Lines] = defaultdict(dict)
    functions: dict[str, Functions] = defaultdict(dict)
    for notes in TREE.glob("build/objects/**/*.gcno"):
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        done = subprocess.run(command, cwd=TREE, capture_output=True, check=True)
        for one in json.loads(done.stdout)["files"]:
            name = one["file"]
            if not name.startswith("csrc/"):
                continue
            for line in one["lines"]:
                number = line["line_number"]
                lines[name][number] = lines[name].get(number, 0) + line["count"]
            for function in one["functions"]:
                key, start = function["demangled_name"].partition("(")[0], function["start_line"]
                before = functions[name].get(key, (start, 0))[1]
                functions[name][key] = (start, before + function["execution_count"])
    return lines, functions


def ranges(numbers: list[int]) -> str:
    """1 2 3 7 as 1-3 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def report(lines: dict[str, Lines], functions: dict[str, Functions]) -> list[str]:
    """Writes the report; gives the files of which nothing was called."""
    texts, unmet, totals = [], [], {"fsdp_c": [0, 0], "csrc": [0, 0]}
    for name in sorted(lines):
        missed = sorted(line for line, count in lines[name].items() if not count)
        idle = sorted((at, key) for key, (at, count) in functions[name].items() if not count)
        total = totals[name.partition("/")[0]]
        total[0] += len(missed)
        total[1] += len(lines[name])
        texts.append(f"{name}: {len(missed)} of {len(lines[name])} lines never run")
        texts += [f"    lines {ranges(missed)}"] if missed else []
        texts += [f"    never called: {key} (line {at})" for at, key in idle]
        is_held = name.endswith((".py", ".cpp")) and name not in FOR_OTHER_TORCH
        is_met = any(count for _, count in functions[name].values())
        has_run = any(lines[name].values()) or not lines[name]
        if is_held and not (is_met if functions[name] else has_run):
            unmet.append(name)
    for folder, (missed, total) in totals.items():
        texts.append(f"{folder}: {missed} of {total} lines never run")
    REPORT.write_text("\n".join(texts) + "\n")
    print("\n".join(texts[-2:]), f"\nby file: {REPORT.relative_to(ROOT)}")
    return unmet


def main() -> None:
    copy_tree()
    status = run_tests(sys.argv[1:])
    lines, functions = c_counts()
    for name, found in python_lines().items():
        lines[name], functions[name] = found, python_functions(name, found)
    unmet = report(lines, functions)
    if unmet:
        raise SystemExit("no chosen test calls anything in:\n  " + "\n  ".join(unmet))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
