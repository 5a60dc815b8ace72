"""Makes a failing program small, and prints it as a script that a reader can run."""

import ast
import contextlib
from collections.abc import Callable, Iterator

import harness

from differential import execute, where
from differential.execute import Failure
from differential.program import Program

CASE_TIMEOUT_S = 20


def fails(program: Program, fault: str = "") -> Failure | None:
    """Run one program; ranks that hang or die are a failure too."""
    try:
        reports = where.run_ranks(
            execute.run_programs, program.world, [program], fault, timeout=CASE_TIMEOUT_S
        )
    except harness.RankFailure as error:
        return Failure(program.seed, "hangs", last_line(str(error)), str(error)[-4000:])
    found = [failure for report in reports for failure in report.failures]
    return found[0] if found else None


def last_line(text: str) -> str:
    """The last line of a program that the ranks' output names."""
    named = [line for line in text.splitlines() if line.startswith("seed ")]
    return named[-1] if named else "no line"


def shrink(
    program: Program, failure: Failure, test: Callable[[Program], Failure | None], n_tries: int = 60
) -> tuple[Program, Failure]:
    """Drop blocks, units and their arguments as long as the program fails in the same way."""
    progress = True
    while progress and n_tries > 0:
        progress = False
        for candidate in smaller(program):
            n_tries -= 1
            found = test(candidate)
            if found is not None and found.kind == failure.kind:
                program, failure, progress = candidate, found, True
                break
            if n_tries <= 0:
                break
    return program, failure


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are smaller by one step, largest steps first."""
    blocks = program.blocks
    for index in reversed(range(len(blocks))):
        yield program.with_parts(program.setup, blocks[:index] + blocks[index + 1 :])
    for index, line in enumerate(program.setup):
        before, after = program.setup[:index], program.setup[index + 1 :]
        if "shard_placement" in line or "fully_shard(model," not in line:
            is_optional = line.startswith(("fsdp.fully_shard(", "model.double", "model = __"))
            if is_optional and "fully_shard(model)" not in line:
                yield program.with_parts(before + after, blocks)
        for shorter in without_keywords(line):
            yield program.with_parts([*before, shorter, *after], blocks)


def without_keywords(line: str) -> Iterator[str]:
    """The line without one of the keyword arguments of its outermost call."""
    with contextlib.suppress(SyntaxError):
        call = ast.parse(line).body[0]
        value = getattr(call, "value", None)
        if isinstance(value, ast.Call):
            for keyword in list(value.keywords):
                position = value.keywords.index(keyword)
                value.keywords.remove(keyword)
                yield ast.unparse(call)
                value.keywords.insert(position, keyword)


def script(program: Program, failure: Failure) -> str:
    """The program as a script; `SIDE` chooses the implementation."""
    body = "\n".join(program.lines)
    if program.counted:
        counting = "from differential.execute import Counting\ncounting = Counting().__enter__()\n"
        body = counting + body + "\nprint(rank, counting.counts)"
    if program.installed:
        body = (
            "if fsdp.__name__ == 'fsdp_c':\n    fsdp.install()\n"
            f"    fsdp = importlib.import_module('torch.distributed.fsdp')\n{body}"
        )
    return f'''"""Seed {program.seed}: {failure.kind} at `{failure.line.splitlines()[0]}`.

In the source tree: SIDE=torch.distributed.fsdp torchrun --nproc_per_node {program.world} FILE,
then with SIDE=fsdp_c.
"""
import importlib, os, sys
sys.path[:0] = ["tests/support", "tests", "."]
import torch.distributed as dist
from differential.feature_nets import FEATURE_NAMES
from differential.nets import NAMES
globals().update(NAMES, **FEATURE_NAMES)
fsdp = importlib.import_module(os.environ.get("SIDE", "fsdp_c"))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
elsewhere = globals()
torch.manual_seed(1)

{body}
for name, parameter in model.named_parameters():
    print(rank, name, parameter, parameter.grad)
dist.destroy_process_group()
'''


def explain(seed: int, world: int, fault: str = "", kind: str = "") -> str:
    """Run a seed alone; its failure, what differs, and a script that shows it, or nothing."""
    program = execute.MAKERS[kind](seed, world)
    option = f" --{kind}" if kind else ""
    failure = fails(program, fault)
    if failure is None:
        return ""
    program, failure = shrink(program, failure, lambda smaller: fails(smaller, fault))
    return (
        f"seed {seed} on {world} ranks {failure.kind}:\n{failure.text}\n"
        f"--- again: python -m tests.differential --seeds {seed} --ranks {world}{option}\n"
        f"--- or as a script:\n{script(program, failure)}"
    )
