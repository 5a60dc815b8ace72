"""Whole parameters one after another, for a consumer such as an inference engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_c._checkpoint import _full
from fsdp_c._comm import _buckets, _communicator, _dtensor_chunks
from fsdp_c._fully_shard import _fqns


@torch.no_grad()
def iter_full_params(
    model: nn.Module,
    *,
    bucket_bytes: int = 32 << 20,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter's name and its whole tensor on every rank, a bucket at a time.

    One collective per bucket, over the ranks among which it is sharded; memory for two buckets is
    held and used again, so a tensor is valid **only until the next one is asked for**: clone what
    must last. Parameters of one dtype and mesh share buckets, and come in the model's order within
    one. A tied parameter comes once, under its first name; parameters that are not sharded come as
    they are (cast). Collective: all ranks go through it to the end, between two steps.

    Args:
        bucket_bytes: whole tensors of up to this size (or a single larger one) share a collective.
        dtype: floating-point parameters are cast to it, before they travel.

    Raises:
        ValueError: a parameter is on the meta device or is neither Shard nor Replicate; names it.

    Examples:
        >>> for name, tensor in fsdp_c.iter_full_params(model, dtype=torch.bfloat16):
        ...     print(name, tensor.shape)
    """
    entries = [
        (named.names[0], named.tensor)
        for named in _fqns.tensors_of(model)
        if isinstance(named.tensor, nn.Parameter)
    ]
    yield from full_tensors_of(entries, bucket_bytes, dtype)


@torch.no_grad()
def full_tensors_of(
    entries: Sequence[tuple[Any, torch.Tensor]],
    bucket_bytes: int = 32 << 20,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields each key with its full tensor; see `iter_full_params`."""
    _buckets.check(bucket_bytes)
    dtypes = [_travels_as(tensor, dtype) for _, tensor in entries]
    groups = [_group_of(name, tensor) for name, tensor in entries]
    kinds = list(zip(groups, dtypes, strict=True))
    sizes = [
        tensor.numel() * kind.itemsize for (_, tensor), kind in zip(entries, dtypes, strict=True)
    ]
    memory = _Memory()
    for bucket in _buckets.fill(kinds, sizes, bucket_bytes):
        group, kind = kinds[bucket[0]]
        members = [entries[index] for index in bucket]
        if group is None:
            for name, tensor in members:
                yield name, _full.local_part(tensor).to(kind)
        else:
            yield from _gathered(group, kind, members, memory)


def _travels_as(tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def _group_of(name: Any, tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks among which the tensor is sharded; None if each has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    if tensor._local_tensor.is_meta:
        raise ValueError(f"iter_full_params: '{name}' is on the meta device: load or init it first")
    try:
        _dtensor_chunks.tensor_boxes(tensor)
    except ValueError as error:
        raise ValueError(f"iter_full_params: '{name}': {error}") from None
    mesh = tensor.device_mesh
    dims = [dim for dim, at in enumerate(tensor.placements) if not isinstance(at, Replicate)]
    if not dims:
        return None
    return mesh.get_group(dims[0]) if len(dims) == 1 else _dtensor_chunks.group_of(mesh)[0]


def _boxes_of(tensor: DTensor, group: dist.ProcessGroup) -> list[_dtensor_chunks.Box]:
    """What each rank of the group holds."""
    places = tensor.device_mesh.mesh.flatten().tolist()
    boxes = _dtensor_chunks.tensor_boxes(tensor)
    return [boxes[places.index(rank)] for rank in dist.get_process_group_ranks(group)]


class _Memory:
    """Buffers that grow to the largest bucket."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def get(self, what: str, numel: int, like: torch.Tensor) -> torch.Tensor:
        n_bytes = numel * like.itemsize
        held = self.buffers.get(what)
        if held is None or held.numel() < n_bytes or held.device != like.device:
            self.buffers.pop(what, None)
            held = torch.empty(n_bytes, dtype=torch.uint8, device=like.device)
            self.buffers[what] = held
        return held[:n_bytes].view(like.dtype)


def _gathered(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    members: Sequence[tuple[Any, torch.Tensor]],
    memory: _Memory,
) -> Iterator[tuple[Any, torch.Tensor]]:
    boxes = [_boxes_of(tensor, group) for _, tensor in members]  # type: ignore[arg-type]
    n_ranks = group.size()
    each = max(sum(_dtensor_chunks.box_numel(of[rank]) for of in boxes) for rank in range(n_ranks))
    like = torch.empty(0, dtype=dtype, device=_full.local_part(members[0][1]).device)
    packed = memory.get("packed", each, like)
    at = 0
    for _, tensor in members:
        local = _full.local_part(tensor)
        packed[at : at + local.numel()].view(local.shape).copy_(local)
        at += local.numel()
    arrived = memory.get("arrived", each * n_ranks, like)
    if like.device.type == "cpu":
        _communicator.communicator_for(group).all_gather(arrived, packed)
    else:
        dist.all_gather_into_tensor(arrived, packed, group=group)
    offsets = [each * rank for rank in range(n_ranks)]
    for (name, tensor), of in zip(members, boxes, strict=True):
        full = memory.get("full", tensor.numel(), like).view(tensor.shape)
        for rank, box in enumerate(of):
            numel = _dtensor_chunks.box_numel(box)
            part = arrived[offsets[rank] : offsets[rank] + numel]
            full[box].copy_(part.view(_dtensor_chunks.box_size(box)))
            offsets[rank] += numel
        yield name, full
