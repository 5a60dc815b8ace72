"""Runs a program on both sides, line by line, and compares what each line leaves; on a rank."""

import ast
import collections
import contextlib
import dataclasses
import gc
import math
import re
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from parity import Tolerance, compare, local
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c
from differential import faults, feature_nets, features, generate, nets, on_device
from differential.program import Program

WITHOUT_GRADIENTS = re.compile("no_grad|inference_mode")


@dataclass
class Failure:
    """Where the sides differ, or one of them raised."""

    seed: int
    kind: str  # "differs", "only torch raises", "only fsdp_c raises", "exceptions differ", "hangs"
    line: str
    text: str


@dataclass
class Report:
    """What a rank found in some programs."""

    failures: list[Failure]
    n_programs: int = 0
    n_lines: int = 0
    # Programs that ended early because both sides raised the same, by exception.
    ends: list[str] = field(default_factory=list)
    # What ran fsdp_c's model of each program at its end.
    roads: list[str] = field(default_factory=list)
    # Each feature of each program, with what ran it.
    features: list[tuple[str, str]] = field(default_factory=list)


class Counting(TorchDispatchMode):
    """Counts collectives by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back with plain tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Side:
    """One implementation and the names of its program."""

    def __init__(self, fsdp: Any, rank: int, program: Program) -> None:
        self.is_installed = program.installed and fsdp is not torch_fsdp
        self.fsdp = fsdp
        self.names: dict[str, Any] = {
            **nets.NAMES,
            **(feature_nets.FEATURE_NAMES if program.features else {}),
            "fsdp": torch_fsdp if self.is_installed else fsdp,
            "rank": rank,
            "world": program.world,
        }
        self.counting = Counting() if program.counted else None
        self.registers_shards = on_device.registers_shards(program)
        self.largest = 0.0  # of all gradients so far

    def run(self, code: types.CodeType, number: int) -> Exception | None:
        # torch.manual_seed would format a stack for each device.
        torch.default_generator.manual_seed(number + 1)
        try:
            with self.counting or contextlib.nullcontext(), self.installed(code):
                exec(code, self.names)
        except Exception as error:
            return error
        return None

    @contextlib.contextmanager
    def installed(self, code: types.CodeType) -> Iterator[None]:
        """Only while something is sharded: it looks through all modules."""
        if not self.is_installed or {"fully_shard", "replicate"}.isdisjoint(code.co_names):
            yield
            return
        self.fsdp.install()
        try:
            yield
        finally:
            self.fsdp.uninstall()

    def see(self, new: list[str], is_optimizer: bool) -> dict[str, Any]:
        """All that a user sees after a line that gave values to the `new` names.

        An optimizer's state is looked at after lines that name it.
        """
        seen = {name: self.names[name] for name in new if name in self.names}
        if is_optimizer and "optimizer" in self.names:
            seen["state"] = list(self.names["optimizer"].state.values())
        # After a planned failure torch's next backward begins with what the failed one has left of
        # its order of gathers.
        if self.counting is not None and "where" not in self.names:
            seen["collectives"] = dict(sorted(self.counting.counts.items()))
        for prefix in ("", "second_"):
            if f"{prefix}model" in self.names:
                shards = self.names.get(f"{prefix}shards", {})
                model = see_model(self.names[f"{prefix}model"], shards)
                if self.registers_shards:
                    del model["registered"], model["registered gradient"]
                seen[f"{prefix}model"] = model
        return seen


def see_model(model: nn.Module, shards: dict[str, nn.Parameter]) -> dict[str, Any]:
    # What is a shard as well is seen once.
    registered = {
        name: "shard" if p is shards.get(name) else p for name, p in model.named_parameters()
    }
    return {
        "registered": registered,
        "registered gradient": [p.grad for p in registered.values() if not isinstance(p, str)],
        "buffer": dict(model.named_buffers()),
        "shard": shards,
        "gradient": {name: p.grad for name, p in shards.items()},
    }


def assigned(tree: ast.AST) -> list[str]:
    """The names that a line gives values to."""
    names = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def largest_gradient(side: Side) -> float:
    """Of this rank's parts; 0 if there is none, or no number."""
    shards = [*side.names.get("shards", {}).values(), *side.names.get("second_shards", {}).values()]
    grads = [local(p.grad) for p in shards if p.grad is not None]
    largest = max((grad.abs().max().item() for grad in grads if grad.numel()), default=0.0)
    return largest if math.isfinite(largest) else 0.0


def tolerance_of(program: Program, theirs: Side) -> Tolerance:
    """Gradients that cancel are small, and may be off by what their addends were rounded by: about
    what the largest gradient of the model is rounded by, here or before on any rank. Two addends
    have one order."""
    if not program.rounds and program.world <= 2:
        return program.tolerance
    theirs.largest = max(theirs.largest, largest_gradient(theirs))
    rounding = program.tolerance.scaled if program.rounds else torch.finfo(torch.float32).eps
    return dataclasses.replace(program.tolerance, absolute=rounding * theirs.largest)


def forgive_gathers(ours: dict[str, int], theirs: dict[str, int]) -> None:
    """Forwards without gradients are in torch's order of prefetches, which gathers for nothing."""
    for name, n in theirs.items():
        if "allgather" in name and ours.get(name, 0) < n:
            ours[name] = n


def align(ours: Side, theirs: Side) -> None:
    """Go on from torch's shards and gradients where bits differ within the tolerance."""
    for group in ("shards", "second_shards"):
        for name, other in theirs.names.get(group, {}).items():
            mine = ours.names[group][name]
            for to, source in ((mine, other), (mine.grad, other.grad)):
                if source is not None and not torch.equal(local(to), local(source)):
                    with torch.no_grad():
                        local(to).copy_(local(source))


def judge(ours: Exception | None, theirs: Exception | None) -> str:
    """What is wrong with what the sides raised, if anything."""
    if (ours is None) == (theirs is None):
        if ours is None or isinstance(ours, type(theirs)):
            return ""
        return "exceptions differ"
    return "only torch raises" if ours is None else "only fsdp_c raises"


def is_torchs_own(error: Exception | None) -> bool:
    """A defect of torch: a prefetch from a replicated unit whose context is not set up yet."""
    return isinstance(error, AttributeError) and "all_gather_copy_in_stream" in str(error)


def is_lost_by_torch(error: Exception | None) -> bool:
    """DTensors have cut a gradient over ranks with other data each; torch takes its parts."""
    return isinstance(error, RuntimeError) and "on this rank and the parameter" in str(error)


def describe(error: Exception | None) -> str:
    if error is None:
        return "nothing was raised"
    text = "".join(traceback.format_exception(error)[-6:]).rstrip()
    return f"{type(error).__name__}: {str(error)[:300]}\n{text}"


def run_program(rank: int, program: Program, report: Report, fault: str = "") -> None:
    """Adds to the report; all ranks stop after the same block."""
    theirs = Side(torch_fsdp, rank, program)
    ours = Side(harness.implementation(), rank, program)
    ours.names["elsewhere"], theirs.names["elsewhere"] = theirs.names, ours.names
    number = 0
    for block in (program.setup, *program.blocks):
        failure, ends = None, ""
        for line in block:
            print(f"seed {program.seed}, line {number}: {line}", flush=True)
            found, ends = run_line(theirs, ours, line, number, program, fault)
            failure = failure or found
            number += 1
            if ends or (found is not None and found.kind != "differs"):
                break
        report.n_lines = report.n_lines + len(block)
        if failure is not None:
            report.failures.append(failure)
        elif ends:
            report.ends.append(ends)
        is_over, theirs.largest = exchange(
            failure is not None or bool(ends), theirs.largest, program.world
        )
        if is_over:
            break
    road = road_of(ours.names["model"]) if "model" in ours.names else "no model"
    report.roads.append(road)
    report.features += [(name, road.partition(":")[0]) for name in program.features]


def road_of(model: nn.Module) -> str:
    """What runs the units of a model, as `explain` says it; of the first one."""
    try:
        return fsdp_c.explain(model).units[0].road
    except ValueError:
        return "no units"  # or none with parameters


def exchange(is_over: bool, largest: float, world: int) -> tuple[bool, float]:
    """Whether a rank stops, and the largest gradient of all ranks. Between blocks, because each
    exchange costs about as much as a line."""
    seen = torch.tensor([float(is_over), largest])
    if world > 1:
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen[0].item()), seen[1].item()


def run_line(
    theirs: Side, ours: Side, line: str, number: int, program: Program, fault: str
) -> tuple[Failure | None, str]:
    """The failure of a line, and the name of the exception that ends the program."""
    tree = ast.parse(line)
    code = compile(tree, f"<line {number}>", "exec")
    error = theirs.run(code, number)
    with faults.planted(fault, ours, line):
        our_error = ours.run(code, number)
    kind = judge(our_error, error)
    if kind == "only torch raises" and is_torchs_own(error):
        return None, f"torch's own {describe(error)[:150]}"
    may_lose = kind == "only fsdp_c raises" and "dp_mesh_dims" in program.features
    if may_lose and is_lost_by_torch(our_error):
        return None, f"lost by torch: {describe(our_error)[:150]}"
    if kind:
        text = f"torch: {describe(error)}\nfsdp_c: {describe(our_error)}"
        return Failure(program.seed, kind, line, text), ""
    if error is not None and not is_expected(line, error):
        # What a pass leaves that failed half-way is each side's own affair.
        return None, f"{type(error).__name__} at {line.splitlines()[0][:60]}: {str(error)[:90]}"
    try:
        new, is_optimizer = assigned(tree), "optimizer" in line
        seen, expected = ours.see(new, is_optimizer), theirs.see(new, is_optimizer)
        has_run_without = any(
            WITHOUT_GRADIENTS.search(each) for each in program.lines[: number + 1]
        )
        if "collectives" in seen and has_run_without:
            forgive_gathers(seen["collectives"], expected["collectives"])
        compare(seen, expected, tolerance_of(program, theirs), "")
    except AssertionError as difference:
        return Failure(program.seed, "differs", line, str(difference)), ""
    if program.tolerance.realign:
        align(ours, theirs)
    return None, ""


def is_expected(line: str, error: Exception) -> bool:
    """Whether the program goes on: a call that is refused before it does anything."""
    from differential.generate import REFUSED

    return line in REFUSED


# By the kind of programs that the command line asks for.
MAKERS = {"": generate.make_program, "features": features.make_program}


def run_seeds(rank: int, n_ranks: int, seeds: list[int], fault: str = "", kind: str = "") -> Report:
    """The body of the ranks."""
    programs = [MAKERS[kind](seed, n_ranks) for seed in seeds]
    return run_programs(rank, n_ranks, programs, fault)


def run_programs(rank: int, n_ranks: int, programs: list[Program], fault: str = "") -> Report:
    report = Report([])
    with faults.installed(fault):
        for index, program in enumerate(programs):
            run_program(rank, program, report, fault)
            if index % 8 == 7:
                gc.collect()
            report.n_programs += 1
            # Ranks that raised apart have no common state to go on from.
            if report.failures and (fault or report.failures[-1].kind != "differs"):
                break
    return report
