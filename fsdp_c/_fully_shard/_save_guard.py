"""torch.save of shards to a file that no other rank's stand beside: a warning.

A pickle asks a DTensor for its parts, and who asks is seen then. Files stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_c import _env
from fsdp_c._fully_shard import _unmanaged_params

_reduce_ex: Any = DTensor.__reduce_ex__
_SERIALIZATION = torch.serialization.__file__
# Whose code knows what each rank saves.
_KNOWS = ("torch.distributed.checkpoint", "fsdp_c.")
_warned: set[tuple[str, int]] = set()  # lines of users' files


def install() -> None:
    DTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives torch's class back as it was, until the next fully_shard."""
    if DTensor.__dict__.get("__reduce_ex__") is _reduce:
        del DTensor.__reduce_ex__


def _reduce(self: Any, protocol: Any) -> Any:
    save = _save_around(sys._getframe(1))
    if save is not None and save.f_back is not None:
        _look(self, save.f_locals.get("f"), save.f_back)
    return _reduce_ex(self, protocol)


def _save_around(frame: FrameType | None) -> FrameType | None:
    """The call of torch.save that pickles; None if something else does."""
    while frame is not None and frame.f_code.co_filename == _SERIALIZATION:
        if frame.f_code.co_name == "save":
            return frame
        frame = frame.f_back
    return None


def _is_shard(tensor: DTensor) -> bool:
    """Whether a unit's rank holds a part of it."""
    mesh = tensor.device_mesh
    is_cut = any(p.is_shard() and mesh.size(dim) > 1 for dim, p in enumerate(tensor.placements))
    return is_cut and mesh in _unmanaged_params.meshes()


def _look(tensor: DTensor, file: Any, caller: FrameType) -> None:
    path = getattr(file, "name", file)  # of an open file
    if not isinstance(path, str | os.PathLike) or _env.is_strict():
        return
    line = caller.f_code.co_filename, caller.f_lineno
    rank = dist.get_rank()
    if line in _warned or _names_rank(os.fspath(path), rank) or not _is_shard(tensor):
        return
    if caller.f_globals.get("__name__", "").startswith(_KNOWS):
        return
    _warned.add(line)
    warnings.warn_explicit(
        f"torch.save writes sharded parameters to '{os.fspath(path)}', which gets the part of rank"
        f" {rank} alone: no model can be loaded from it. Save on all ranks with"
        " fsdp_c.save_shards() or torch.distributed.checkpoint, or call get_model_state_dict(model,"
        " options=StateDictOptions(full_state_dict=True)) on all ranks and save what it returns on"
        " one of them. Files that each rank writes for itself have its number in their names",
        UserWarning,
        *line,
    )


def _names_rank(path: str, rank: int) -> bool:
    """Whether a number in the file's name, or its folder's whole name, is the rank."""
    folder, name = os.path.split(path)
    is_folder = re.fullmatch(rf"[a-z]*[-_]?0*{rank}", os.path.basename(folder))
    return is_folder is not None or rank in map(int, re.findall(r"\d+", name))
