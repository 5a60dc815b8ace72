"""Values of checkpoints as shards of the parameters that they belong to."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_c import _load, _pieces


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
    _load.copy_into(part, _load.Stored.of(value.detach()))
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


def _from_sharded(param: DTensor, value: ShardedTensor, name: str) -> torch.Tensor:
    own = _pieces.tensor_boxes(param)[_pieces.own_place(param.device_mesh)]
    part = torch.zeros_like(param.detach(), dtype=value.dtype)
    local = _load.local_part(part)
    n_written = 0
    for shard in value.local_shards():
        low, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        box = tuple(slice(at, at + n) for at, n in zip(low, size, strict=True))
        common = _pieces.overlap(own, box)
        if common is not None:
            inside = _pieces.within(common, own)
            local[inside].copy_(shard.tensor[_pieces.within(common, box)])
            n_written += _pieces.box_numel(common)
    if n_written != local.numel():
        raise ValueError(
            f"'{name}' is a ShardedTensor cut for other ranks than the parameter: load it with"
            " torch.distributed.checkpoint, which reads what each rank needs"
        )
    return part
