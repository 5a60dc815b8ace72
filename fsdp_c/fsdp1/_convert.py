"""Values of checkpoints as shards of the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import _get_aligned_numel
from torch.distributed.tensor import DTensor

from fsdp_c._checkpoint import _full
from fsdp_c._comm import _dtensor_chunks


@torch.no_grad()
def shard_like(param: DTensor, value: Any, name: str) -> Any:
    """This rank's part of the value, placed like the parameter; other values as they are.

    Takes whole tensors, DTensors, and ShardedTensors of torch's FSDP1 cut for as many ranks.
    """
    if isinstance(value, ShardedTensor):
        return _from_sharded(param, value, name)
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh and value.placements == param.placements:
            return value
        value = value.full_tensor()
    part = torch.empty_like(param.detach(), dtype=value.dtype)
    _full.copy_into(part, _full.Stored.of(value.detach()))
    return part


def local_like(param: DTensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's own part as a DTensor like the parameter."""
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


@torch.no_grad()
def cut_flat(
    params: Mapping[str, DTensor],
    flat: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    name: str,
) -> dict[str, torch.Tensor]:
    """Shards of the flat parameter that a LOCAL state dict of torch's FSDP1 has. Collective."""
    names = {param: clean_tensor_name(key) for key, param in params.items()}
    distinct = list(dict.fromkeys(params.values()))
    # Under use_orig_params=True each parameter begins at an aligned place, and the end is padded.
    sizes = [param.numel() for param in distinct]
    n_flat = flat.size().numel()
    for align, n_more in ((1, 1), (_get_aligned_numel(flat.dtype), group.size())):
        starts, end = [], 0
        for size in sizes:
            starts.append(-(-end // align) * align)
            end = starts[-1] + size
        if isinstance(flat, ShardedTensor) and end <= n_flat < end + n_more:
            break
    else:
        raise ValueError(
            f"'{name}' does not have the {sum(sizes)} elements of {len(sizes)} parameters that this"
            " wrapper holds: its model was wrapped in another way. Save a FULL or SHARDED state"
            " dict there"
        )
    full = torch.zeros(n_flat, dtype=flat.dtype, device=device)
    for shard in flat.local_shards():
        (start,), (size,) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        full[start : start + size] = shard.tensor
    dist.all_reduce(full, group=group)
    parts = {
        param: shard_like(param, full[start : start + size].view(param.shape), names[param])
        for param, start, size in zip(distinct, starts, sizes, strict=True)
    }
    return {key: parts[param] for key, param in params.items()}


def _from_sharded(param: DTensor, value: ShardedTensor, name: str) -> torch.Tensor:
    own = _dtensor_chunks.tensor_boxes(param)[_dtensor_chunks.own_place(param.device_mesh)]
    part = torch.zeros_like(param.detach(), dtype=value.dtype)
    local = _full.local_part(part)
    n_written = 0
    for shard in value.local_shards():
        low, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        box = tuple(slice(at, at + n) for at, n in zip(low, size, strict=True))
        common = _dtensor_chunks.overlap(own, box)
        if common is not None:
            inside = _dtensor_chunks.within(common, own)
            local[inside].copy_(shard.tensor[_dtensor_chunks.within(common, box)])
            n_written += _dtensor_chunks.box_numel(common)
    if n_written != local.numel():
        raise ValueError(
            f"'{name}' is a ShardedTensor cut for other ranks than the parameter: load it with"
            " torch.distributed.checkpoint, which reads what each rank needs"
        )
    return part
