"""Slices of a smaller mesh, to which forward reshards where reshard_after_forward is an int."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _engine_bind, _param_layout


class BoundSlice(NamedTuple):
    """What modules show of a parameter then; read by name in csrc/bind/fsdp/slices.cpp."""

    param: Any  # a DTensor
    local: torch.Tensor  # its local tensor, the only one of a storage
    offset: int  # of that storage in the memory that has the unit's slices; bytes
    size: int


@torch.no_grad()
def make(fsdp_param: Any) -> BoundSlice:
    """Called by the core before the first such reshard."""
    group, info = fsdp_param.unit, fsdp_param.post_forward_mesh_info
    binding, index = group._binding, group.fsdp_params.index(fsdp_param)
    dtype = _versions.compute_dtype(fsdp_param)
    size, stride, first = _rows_of(fsdp_param, info)
    if binding.smaller is None:  # where the unsharded parameter lies
        place = binding.shard.layout(binding.index)["params"][index]
        offset = place["offset"] + first * dtype.itemsize
    else:  # packed
        offset = binding.smaller.layout(binding.index)["params"][index]["packed"]
        stride = _param_layout.strides_for(size, fsdp_param.memory_order)
    n_bytes = _span(size, stride) * dtype.itemsize
    with torch.inference_mode(False):
        storage = torch.UntypedStorage(n_bytes, device="cpu")
        local = torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)
        placement = fsdp_param.fsdp_placement if fsdp_param._orig_size else Replicate()
        spec = DTensorSpec(
            info.mesh,
            (Replicate(), placement),
            tensor_meta=fsdp_param._sharding_spec.tensor_meta,
        )
        param = _engine_bind.parameter_of(local, spec, fsdp_param.sharded_param.requires_grad)
    return BoundSlice(param=param, local=param._local_tensor, offset=offset, size=n_bytes)


def _rows_of(fsdp_param: Any, info: Any) -> tuple[list[int], tuple[int, ...], int]:
    """Size and strides of this rank's slice in the unsharded parameter, and its first element."""
    size, stride = list(fsdp_param._orig_size), fsdp_param.unsharded_stride
    if not size:
        own = fsdp_param.mesh_info.shard_mesh_rank if fsdp_param.copies > 1 else 0
        return size, stride, own
    dim = fsdp_param.fsdp_placement.dim
    chunk = -(-size[dim] // info.shard_mesh_size)
    begin = min(info.shard_mesh_rank * chunk, size[dim])
    size[dim] = min(chunk, size[dim] - begin)
    return size, stride, begin * stride[dim]


def _span(size: list[int], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
