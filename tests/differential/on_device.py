"""Where the devices' schedule differs from torch as docs/compatibility.md says: no program judges
it by that."""

import os
import re

from differential.program import Program

# Layers that run without some of their parameters, or whose parameters are frozen.
LACKING = re.compile(r"unused|frozen|requires_grad_\(")
RUN = re.compile(r"\bmodel\(.*\(rank")
SLICES = re.compile(r"reshard_after_forward=\d")


def is_used() -> bool:
    return bool(os.environ.get("FSDP_C_DEVICES"))


def sums_whole_units(program: Program) -> bool:
    """A device adds up a unit whole, torch what has gradients; which is less here."""
    return is_used() and any(LACKING.search(line) for line in program.lines)


def registers_shards(program: Program) -> bool:
    """After a forward that leaves slices, which torch registers."""
    return is_used() and any(SLICES.search(line) for line in program.lines)


def gradients_come_late(program: Program) -> bool:
    """Those of offloaded units: the last backward, or its finalization, waits for the copies."""
    return is_used() and program.has("CPUOffloadPolicy")


def gathers_anew(program: Program) -> bool:
    """What was unsharded before the first forward, before one that a dispatch mode begins to see or
    no longer sees (features draw these, and count), or before one that trains what was frozen."""
    has_run = any(RUN.search(line) for line in program.lines)
    has_changed = program.has("AllGather(") or program.has("requires_grad_(")
    return is_used() and (not has_run or has_changed)
