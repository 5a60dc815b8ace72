"""Checkpoints of a sharded training run: complete or absent, and the last two kept."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEPT = 2


def finished(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def rng_key(rank: int) -> str:
    """Each rank keeps its own state of the random number generator."""
    return f"rng.{rank}"


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict
) -> Path:
    """Writes what a run needs to go on after `step` steps; every rank calls this together.

    The files are written under another name and renamed when all ranks are done, so that a run
    that is killed while it saves leaves the checkpoint before this one.
    """
    done, partial = folder / f"step-{step:07d}", folder / f"partial-{step:07d}"
    if dist.get_rank() == 0:
        for leftover in folder.glob("partial-*"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": json.dumps({"step": step, "config": config}),
        rng_key(dist.get_rank()): torch.get_rng_state(),
    }
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        if done.exists():
            shutil.rmtree(done)
        partial.rename(done)
        for old in finished(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return done


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict,
    must_match: Sequence[str],
) -> dict[str, Any]:
    """Brings the run back to where `save` left it and returns the saved step and config."""
    saved = {"progress": ""}
    dcp.load(saved, checkpoint_id=path)
    progress = json.loads(saved["progress"])
    for name in must_match:
        if progress["config"][name] != config[name]:
            raise ValueError(
                f"{path} was written with --{name} {progress['config'][name]}, not {config[name]}"
            )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    key = rng_key(dist.get_rank())
    # A run on more ranks than before has new ranks, which keep the state that they seeded.
    if key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata:
        state[key] = torch.get_rng_state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if key in state:
        torch.set_rng_state(state[key])
    return progress
