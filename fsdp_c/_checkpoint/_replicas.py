"""check_replicas: whether ranks that hold copies of one tensor hold the same."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_c._checkpoint import _full
from fsdp_c._comm import _dtensor_chunks, _process_group
from fsdp_c._fully_shard import _fqns

_SHOWN = 5


@torch.no_grad()
def check_replicas(
    model: nn.Module, *, buffers: bool = True, repair: bool = False
) -> tuple[str, ...]:
    """Compares, bit by bit, what several ranks hold copies of; collective, between two steps.

    That is the shards of replicas (HSDP), replicated parameters, those that no unit holds
    (``ignored_params``) and buffers, also those that state dicts leave out. They drift apart when
    ranks initialize or change them differently; nothing else would tell.

    Args:
        buffers: False leaves them out, for running statistics that each rank keeps of its own data.
        repair: gives all ranks the copies of the first one that holds them, and returns.

    Returns:
        The names of what was repaired; without `repair` none.

    Raises:
        RuntimeError: without `repair`, on all ranks: the names, and the ranks that differ.

    Examples:
        >>> repaired = fsdp_c.check_replicas(model, repair=True)
        >>> print(repaired)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_replicas expects a module, not {type(model).__name__}")
    tensors = dict(_tensors_of(model, buffers))
    all_ranks = _group_of_all(tensors.values())
    by_group: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in tensors.items():
        for group in _groups_of(tensor, all_ranks):
            if group.size() > 1 and not tensor.is_meta:
                by_group.setdefault(group, []).append(name)
    faults: dict[str, str] = {}
    for group, names in by_group.items():
        found = _compare(group, {name: _digest_of(tensors[name]) for name in names})
        for name in found if repair else ():
            _send_first(tensors[name], group)
        faults |= found
    answers: list[dict[str, str]] = (
        [{} for _ in range(all_ranks.size())] if all_ranks is not None else [{}]
    )
    if all_ranks is not None:
        dist.all_gather_object(answers, faults, group=all_ranks)
    all_faults = {name: text for faults in answers for name, text in faults.items()}
    if all_faults and not repair:
        more = f" and {len(all_faults) - _SHOWN} more" if len(all_faults) > _SHOWN else ""
        raise RuntimeError(
            f"ranks hold different copies of {', '.join(list(all_faults.values())[:_SHOWN])}{more}:"
            " they were initialized or written differently. check_replicas(model, repair=True)"
            " gives all ranks those of the first"
        )
    return tuple(all_faults)


def _tensors_of(model: nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for named in _fqns.tensors_of(model):
        if buffers or isinstance(named.tensor, nn.Parameter):
            yield named.names[0], named.tensor
    for prefix, module in model.named_modules() if buffers else ():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers[name]
            if buffer is not None:
                yield _fqns.clean(f"{prefix}.{name}" if prefix else name), buffer


def _group_of_all(tensors: Iterable[torch.Tensor]) -> dist.ProcessGroup | None:
    """The ranks of the model: those of its largest mesh."""
    meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
    if meshes:
        return _dtensor_chunks.group_of(max(meshes, key=lambda mesh: mesh.size()))[0]
    return dist.group.WORLD if dist.is_initialized() else None


def _groups_of(
    tensor: torch.Tensor, all_ranks: dist.ProcessGroup | None
) -> Iterator[dist.ProcessGroup]:
    """Groups whose ranks hold the same part of the tensor."""
    if not isinstance(tensor, DTensor):
        yield from () if all_ranks is None else (all_ranks,)
        return
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            yield tensor.device_mesh.get_group(dim)


def _digest_of(tensor: torch.Tensor) -> bytes:
    local = _full.local_part(tensor).cpu().contiguous()
    n_bytes = local.numel() * local.itemsize
    memory = (ctypes.c_char * n_bytes).from_address(local.data_ptr()) if n_bytes else b""
    return hashlib.blake2b(memory, digest_size=16).digest()


def _compare(group: dist.ProcessGroup, digests: dict[str, bytes]) -> dict[str, str]:
    """By name what differs, in words."""
    of_ranks: list[dict[str, bytes]] = [{} for _ in range(group.size())]
    dist.all_gather_object(of_ranks, digests, group=group)
    ranks = _process_group.global_ranks(group)
    faults = {}
    for name, first in of_ranks[0].items():
        others = [
            str(rank)
            for rank, theirs in zip(ranks, of_ranks, strict=True)
            if theirs.get(name) != first
        ]
        if others:
            faults[name] = f"'{name}' (rank {', '.join(others)} not as rank {ranks[0]})"
    return faults


def _send_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    local = _full.local_part(tensor)
    copy = local.contiguous()
    dist.broadcast(copy, src=_process_group.global_ranks(group)[0], group=group)
    local.copy_(copy)
