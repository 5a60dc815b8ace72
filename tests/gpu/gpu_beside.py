"""Runs the training programs: many in a process, on one rank and on several of one GPU.

`python gpu_beside.py RANK RANKS STORE DEVICE WORLD ROWS SECONDS NAME...` is a rank, with a limit
for each program. One that fails is a row like the others; one that crashes or hangs ends its
processes, and new ones go on after it.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_nccl
import gpu_programs  # noqa: F401  (which fills the list)
import gpu_programs_around  # noqa: F401  (the rest of it)
import gpu_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from gpu_rows import Rows, read
from gpu_sides import PROGRAMS, Program, Side, compare

PART = "training"
PROGRAM_S = 30
PROCESSES_MAX = 4  # of each kind, until all programs have had their turn


@dataclass(frozen=True)
class World:
    n_ranks: int
    ways: frozenset[str]  # who does the collectives of units
    env: dict[str, str]
    by_nccl: bool = False  # what the process group of many ranks does, torch's own collectives too

    @property
    def needs_nccl(self) -> bool:
        return self.by_nccl or "nccl" in self.ways


CALLBACK, NCCL = frozenset({"callback"}), frozenset({"nccl"})
# As users have it who set nothing: over the process group's own collectives.
UNSET = {"FSDP_C_DEVICES": ""}
WORLDS = {
    "1 rank": World(1, frozenset(), {}),
    "2 ranks, gloo": World(2, CALLBACK, {"FSDP_C_TRANSPORT": "callback"}),
    "2 ranks, NCCL": World(2, NCCL, {}),
    "2 ranks, torch's NCCL": World(2, CALLBACK, UNSET, by_nccl=True),
    "3 ranks, torch's NCCL": World(3, CALLBACK, UNSET, by_nccl=True),
    "3 ranks, NCCL": World(3, NCCL, {}, by_nccl=True),
}


# ---- a rank ----


def outcome_of(program: Program, device: torch.device, world: World) -> tuple[str, str]:
    """How a row ends: passed, failed or left out, and why."""
    import fsdp_c

    api = torch_fsdp if program.beside == "torch" else None
    expected, found = Side(program.beside, api, device), Side("fsdp_c", fsdp_c, device)
    try:
        run(program, expected)
    except Exception as error:  # as the other one
        traceback.print_exc()
        return "left out", f"{program.beside}'s own fails: {type(error).__name__}: {error}"
    try:
        run(program, found)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ulps = program.gpu_ulps if device.type == "cuda" else 0
        compare(found, expected, program.tolerance_of(world.n_ranks), ulps)
        check_implementation(found, program, world)
    except Exception as error:  # a row tells it, and the next program is tried
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def run(program: Program, side: Side) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about what programs do on purpose
        program.run(side)


def check_implementation(side: Side, program: Program, world: World) -> None:
    """The stream schedule has run the units that it can, over what it should."""
    import fsdp_c
    from fsdp_c._comm import _device

    for model in side.models:
        for unit in side.units(model):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                if not group.fsdp_params:
                    continue
                assert _device.is_taken(group) == program.on_core, fsdp_c.status()
                ways = {way.kind for way in _device.ways(group).values()}
                assert ways == world.ways or not program.on_core, f"collectives by {ways}"


def agreed(outcome: tuple[str, str], control: Any) -> tuple[str, str]:
    """The worst of all ranks."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=control)
    for result in ("failed", "left out"):
        for rank, (found, why) in enumerate(outcomes):
            if found == result:
                return result, f"rank {rank}: {why}"
    return "passed", ""


def run_rank(
    rank: int,
    n_ranks: int,
    store: str,
    device_type: str,
    world: str,
    file: str,
    limit_s: str,
    *names: str,
) -> None:
    device = gpu_ranks.begin(rank, n_ranks, store, device_type, WORLDS[world].by_nccl or None)
    control = dist.new_group(backend="gloo")
    rows = Rows(Path(file), PART)
    for name in names:
        begun = time.monotonic()
        faulthandler.dump_traceback_later(float(limit_s), exit=True)
        result, why = agreed(outcome_of(PROGRAMS[name], device, WORLDS[world]), control)
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            rows.end(row_of(name, world), result, begun, why)
        if "CUDA error" in why:
            return  # nothing more can be asked of the GPU in here
    dist.destroy_process_group()


# ---- who starts them ----


def row_of(name: str, world: str) -> str:
    return f"{name}, {world}"


def names_for(world: str, device_type: str) -> list[str]:
    n_ranks = WORLDS[world].n_ranks
    crash = n_ranks > 1 and device_type == "cuda" and not WORLDS[world].by_nccl
    return [
        name
        for name, program in PROGRAMS.items()
        if n_ranks in program.ranks and not (crash and program.gathers)
    ]


def run_world(rows: Rows, device_type: str, world: str, names: list[str]) -> None:
    for _ in range(PROCESSES_MAX):
        begun = time.monotonic()
        try:
            start(rows, device_type, world, names)
        except gpu_ranks.RankError as error:
            names = left(rows, world, names)
            rows.end(row_of(names[0] if names else "the end", world), "failed", begun, str(error))
        names = left(rows, world, names)
        if not names:
            return
    rows.end(f"{len(names)} programs, {world}", "failed", begun, "too many before them crashed")


def left(rows: Rows, world: str, names: list[str]) -> list[str]:
    seen = {row.get("check") for row in read(rows.path)}
    return [name for name in names if row_of(name, world) not in seen]


def start(rows: Rows, device_type: str, world: str, names: list[str]) -> None:
    env = gpu_ranks.environment(device_type, WORLDS[world].n_ranks) | WORLDS[world].env
    # Without it sums in matrix products may be split up in one way or another.
    env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    words = [device_type, world, str(rows.path), str(PROGRAM_S), *names]
    gpu_ranks.run(__file__, WORLDS[world].n_ranks, *words, env=env, limit_s=300)


def why_not(world: World) -> str:
    """Why its ranks cannot talk."""
    needed = {True} if world.by_nccl else set()
    needed |= {False} if world.ways == NCCL else set()
    reasons = (gpu_nccl.why_not(world.n_ranks, by_torch) for by_torch in sorted(needed))
    return next(filter(None, reasons), "")


def run_programs(rows: Rows, device_type: str) -> None:
    for world in WORLDS:
        if WORLDS[world].needs_nccl and device_type == "cpu":
            rows.left_out(f"programs, {world}", "there is no GPU")
        elif why := why_not(WORLDS[world]):
            rows.not_run(f"programs, {world}", why)
        else:
            run_world(rows, device_type, world, names_for(world, device_type))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
