"""Checkpoints of full tensors, read straight into shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_c._checkpoint import _safetensors
from fsdp_c._comm import _dtensor_chunks
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns

_INDEX = ".index.json"  # of checkpoints in several files
_SHOWN = 8  # names in an error


class IncompatibleKeys(NamedTuple):
    """What `load_full` and `load_shards` return: names only the model has, and only the source.

    Examples:
        >>> keys = fsdp_c.load_full(model, {}, strict=False)
        >>> print(keys.missing_keys, keys.unexpected_keys)
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass
class Stored:
    """A full tensor in the pieces that a checkpoint has of it, each got when it is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[_dtensor_chunks.Box, Callable[[], torch.Tensor]]]

    @classmethod
    def of(cls, full: torch.Tensor | _safetensors.Entry) -> Stored:
        box = tuple(slice(0, n) for n in full.shape)
        get = full.tensor if isinstance(full, _safetensors.Entry) else lambda: full
        return cls(tuple(full.shape), full.dtype, [(box, get)])


@torch.no_grad()
def load_full(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    cast: bool = False,
) -> IncompatibleKeys:
    """Reads whole parameters and buffers from a checkpoint into this rank's shards; no collective.

    Files are mapped: a rank reads the pages of its own parts, ranks of a host share the page cache,
    and no whole tensor is made. Nothing is written before all names, shapes and dtypes are known to
    fit. Local: each rank calls it, in any order, between two steps.

    Args:
        model: sharded or not; a meta-device model needs ``to_empty()`` before.
        source: a ``.safetensors`` file, a file of ``torch.save`` with a dict of tensors, an index
            (``model.safetensors.index.json``) or the folder of one, or a dict of whole tensors.
            Of a tied parameter's names one is enough.
        strict: missing and unexpected names are an error.
        cast: takes tensors of other dtypes; otherwise they are an error.

    Returns:
        ``(missing_keys, unexpected_keys)``.

    Raises:
        RuntimeError: names, shapes or dtypes that do not fit, all of them in one message.
        ValueError: a file that cannot be read.

    Examples:
        >>> whole = {name: t.clone() for name, t in fsdp_c.iter_full_params(model)}
        >>> keys = fsdp_c.load_full(model, whole, strict=False)
        >>> print(keys.missing_keys)
    """
    tensors = source if isinstance(source, Mapping) else _read(Path(source))
    stored = {name: Stored.of(tensor) for name, tensor in _full_tensors(tensors)}
    return fill(model, stored, "load_full", strict=strict, cast=cast)


def _full_tensors(
    tensors: Mapping[str, Any],
) -> Iterable[tuple[str, torch.Tensor | _safetensors.Entry]]:
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor | _safetensors.Entry):
            raise ValueError(
                f"load_full: '{name}' is a {type(tensor).__name__}, not a whole tensor: pass a"
                " state dict of plain tensors, such as full_tensor() gives"
            )
        yield _fqns.clean(name), tensor


def _read(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        found = sorted(path.glob(f"*{_INDEX}")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise ValueError(
                f"{path} has {len(found)} checkpoints (*{_INDEX}, *.safetensors): name the file"
            )
        path = found[0]
    if path.name.endswith(_INDEX):
        parts: dict[str, Any] = {}
        files = json.loads(path.read_text())["weight_map"].values()
        for name in sorted(set(files)):
            parts.update(_read(path.parent / name))
        return parts
    if path.suffix == ".safetensors":
        return _safetensors.read(path)
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def fill(
    model: nn.Module, stored: Mapping[str, Stored], caller: str, *, strict: bool, cast: bool
) -> IncompatibleKeys:
    """Writes what is stored into the model, once everything is known to fit."""
    targets = _fqns.tensors_of(model)
    known = {name for named in targets for name in named.names}
    unexpected = [name for name in stored if name not in known]
    missing, faults = [], []
    pairs = []
    for named in targets:
        name = next((name for name in named.names if name in stored), None)
        if name is None:
            missing.append(named.names[0])
        else:
            faults += misfits(name, named.tensor, stored[name], cast)
            pairs.append((named.tensor, stored[name]))
    if strict and missing:
        faults.append(f"missing: {_list(missing)}")
    if strict and unexpected:
        faults.append(f"unexpected: {_list(unexpected)}")
    if faults:
        rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
        raise RuntimeError(
            f"{caller} of {type(model).__name__}{rank}, nothing was written: "
            + "; ".join([*faults[:_SHOWN], *(["..."] if len(faults) > _SHOWN else [])])
        )
    for tensor, source in pairs:
        look_at(tensor, source)
    for tensor, source in pairs:
        copy_into(tensor, source)
    _count(model)
    return IncompatibleKeys(missing, unexpected)


def _count(model: nn.Module) -> None:
    """Ranks that have not loaded are out of step; what was gathered before is out of date."""
    for module in model.modules():
        groups = (
            _versions.groups_of(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ()
        )
        for group in groups:
            if hasattr(group, "_is_bound"):
                group._core_count_load()


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))


def misfits(name: str, target: torch.Tensor, source: Stored, cast: bool) -> list[str]:
    """Why the source cannot be written into the target; empty if it can."""
    local = target._local_tensor if isinstance(target, DTensor) else target
    if local.is_meta:
        return [f"'{name}' is on the meta device (call model.to_empty(device='cpu') before)"]
    if source.shape != tuple(target.shape):
        return [f"'{name}' has shape {tuple(target.shape)}, the source {source.shape}"]
    if source.dtype != local.dtype and not cast:
        return [f"'{name}' is {local.dtype}, the source {source.dtype} (pass cast=True to cast)"]
    try:
        _own_box(target)
    except ValueError as error:
        return [f"'{name}': {error}"]
    return []


def _own_box(tensor: torch.Tensor) -> _dtensor_chunks.Box:
    if isinstance(tensor, DTensor):
        return _dtensor_chunks.tensor_boxes(tensor)[_dtensor_chunks.own_place(tensor.device_mesh)]
    return tuple(slice(0, n) for n in tensor.shape)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part itself, outside of autograd; of a plain tensor all of it."""
    return _dtensor_chunks.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def look_at(target: torch.Tensor, source: Stored) -> None:
    """Fetches what `copy_into` will use: what cannot be read raises before anything is written."""
    own = _own_box(target)
    for box, get in source.pieces:
        if _dtensor_chunks.overlap(own, box) is not None:
            get()


def copy_into(target: torch.Tensor, source: Stored) -> None:
    """This rank's part, from all pieces that overlap it."""
    own = _own_box(target)
    local = local_part(target)
    for box, get in source.pieces:
        common = _dtensor_chunks.overlap(own, box)
        if common is not None:
            part = get()[_dtensor_chunks.within(common, box)]
            local[_dtensor_chunks.within(common, own)].copy_(part)
