"""How parameters lie in memory: also those without dims, of any strides, with uneven columns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c._compat import _versions
from fsdp_c._compat._versions import ShardPlacementResult


def strides_for(size: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims lie in memory in `order`, outermost first."""
    strides = [1] * len(size)
    step = 1
    for dim in reversed(order if order is not None else range(len(size))):
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


@contextlib.contextmanager
def outside_of_inference() -> Iterator[None]:
    """What is made here is trained later, also if the first forward is in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims in memory order; None if contiguous, or if elements share or skip memory."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


class ParamLayout(_versions.TorchParam):
    """The layout of one parameter, sharded and not.

    What torch refuses is *special* here, and only the core can run it: parameters without dims are
    replicated, other strides than contiguous ones are kept, and a shard of any dim is padded only
    behind its last element.
    """

    is_special = False
    # Dims in memory order, outermost first; None: contiguous.
    memory_order: tuple[int, ...] | None = None

    @torch.no_grad()
    def _init_special(
        self, param: nn.Parameter, device: torch.device, wanted: ShardPlacementResult
    ) -> None:
        """Lets torch shard the parameter with its rows in front, then lays the shard out again."""
        dim = _shard_dim(param, wanted)
        rows = param.detach().movedim(dim, 0) if param.ndim else param.detach().view(1)
        stand_in = nn.Parameter(rows.contiguous(), requires_grad=param.requires_grad)
        uid = _versions.get_orig_param_uid(param)
        stand_in._fsdp_orig_uid = uid  # type: ignore[attr-defined]
        _versions.copy_grad_dtype(param, stand_in)
        by_rows = ShardPlacementResult(Shard(0), wanted.mesh_info)
        super()._init_sharded_param(stand_in, device, lambda _: by_rows, wanted.mesh_info)

        self.is_special = True
        self.memory_order = memory_order(param)
        padded = list(self.padded_sharded_param_size)
        if param.ndim:
            self.fsdp_placement = Shard(dim)
            local = self._sharded_local_tensor.movedim(0, dim)
            padded.insert(dim, padded.pop(0))
        else:
            self.fsdp_placement = Replicate()
            local = param.detach()
            padded = []
        self._init_sharding_spec(param, self.fsdp_placement, dim)
        self._sharding_spec = dataclasses.replace(
            self._sharding_spec,
            tensor_meta=TensorMeta(
                param.size(), strides_for(param.size(), self.memory_order), param.dtype
            ),
        )
        _versions.forget_specs(self)
        self._orig_size = param.size()
        self._contiguous_orig_stride = strides_for(param.size(), None)
        self.sharded_size = local.size()
        self.contiguous_sharded_stride = strides_for(local.size(), None)
        self.padded_sharded_param_size = torch.Size(padded)
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(self.place(local)), requires_grad=param.requires_grad
        )
        _versions.copy_grad_dtype(param, self.sharded_param)
        self._setattr_on_modules(self.sharded_param)

    def _init_sharded_post_forward_param_metadata(self, param: torch.Tensor) -> None:
        if not self.is_special:  # torch's has a size for what it shards alone
            super()._init_sharded_post_forward_param_metadata(param)

    def unsharded_spec(self, dtype: torch.dtype) -> DTensorSpec | None:
        """Of the unsharded parameter, if it is a DTensor (tensor parallel, or of a larger mesh)."""
        spec = getattr(self, "_unsharded_dtensor_spec", None) if self.is_dtensor else None
        if spec is None or spec.tensor_meta.dtype == dtype:
            return spec
        return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))

    @property
    def unsharded_stride(self) -> tuple[int, ...]:
        return strides_for(self._orig_size, self.memory_order)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return strides_for(self.sharded_size, self.memory_order)

    @property
    def copies(self) -> int:
        """How often the unsharded buffer holds a replicated parameter: once per rank; else 1."""
        return 1 if self._orig_size else getattr(self.mesh_info, "shard_mesh_size", 1)

    def geometry(self) -> tuple[int, int, int]:
        """The full parameter as the core sees it, in memory order: [outer, rows, inner]."""
        if not self._orig_size:
            return 1, self.copies, 1
        dim = self.fsdp_placement.dim
        order = self.memory_order or range(len(self._orig_size))
        size = [self._orig_size[d] for d in order]
        at = list(order).index(dim)
        return math.prod(size[:at]), size[at], math.prod(size[at + 1 :])

    def is_placed(self, local: torch.Tensor) -> bool:
        """Whether a shard lies at the start of storage of its padded size, as the core wants it."""
        laid_out = local if self.memory_order is None else local.permute(self.memory_order)
        return (
            local.storage_offset() == 0
            and laid_out.is_contiguous()
            and local.untyped_storage().nbytes()
            == math.prod(self.padded_sharded_param_size) * local.itemsize
        )

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """A copy of a shard in such a place."""
        size = math.prod(self.padded_sharded_param_size)
        data = local.new_zeros(size, pin_memory=local.is_pinned())
        own = data.as_strided(local.size(), strides_for(local.size(), self.memory_order))
        own.copy_(local)
        self._sharded_param_data = data
        return own


def is_special(param: nn.Parameter, wanted: ShardPlacementResult) -> bool:
    """Whether torch's FSDPParam would refuse the parameter and ours need not."""
    info = wanted.mesh_info
    if (
        type(param) is not nn.Parameter
        or not isinstance(info, FSDPMeshInfo)
        or _versions.is_spmd(info)
        or not isinstance(wanted.placement or Shard(0), Shard)
        or _versions.is_annotated(param)
    ):
        return False
    if param.ndim == 0:
        return True
    dim = _shard_dim(param, wanted)
    if not 0 <= dim < param.ndim:
        return False
    return not param.is_contiguous() or (dim > 0 and param.size(dim) % info.shard_mesh_size != 0)


def _shard_dim(param: nn.Parameter, wanted: ShardPlacementResult) -> int:
    dim = wanted.placement.dim if wanted.placement is not None else 0
    return dim + param.ndim if dim < 0 else dim
