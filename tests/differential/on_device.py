"""Where the devices' schedule differs from torch as docs/compatibility.md says: no program judges
it by that."""

import os
import re

from torch import Tensor

from differential.program import Program

SLICES = re.compile(r"reshard_after_forward=\d")


def is_used() -> bool:
    return bool(os.environ.get("FSDP_C_DEVICES"))


def size_of(output: Tensor) -> int:
    """What is noted of sums: a device adds up a unit whole, torch what has gradients."""
    return 0 if is_used() else output.numel()


def registers_shards(program: Program) -> bool:
    """After a forward that leaves slices, which torch registers."""
    return is_used() and any(SLICES.search(line) for line in program.lines)


def gradients_come_late(program: Program) -> bool:
    """Those of offloaded units: the last backward, or its finalization, waits for the copies."""
    return is_used() and program.has("CPUOffloadPolicy")


def gathers_anew(program: Program) -> bool:
    """What was unsharded before the first forward, or before one that a dispatch mode begins to see
    or no longer sees: features draw these, and count."""
    has_run = program.has("data(rank", "tokens(rank")
    return is_used() and (not has_run or program.has("AllGather("))
