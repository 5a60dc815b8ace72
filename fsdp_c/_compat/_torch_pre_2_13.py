"""What torch before 2.13 lacks of the internals that this package extends, in terms of its own.

One group of parameters per call there, where 2.13 has a list; meshes belong to a call and not to a
parameter; nothing starts over after an exception.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import (
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten, tree_map


@dataclass
class ShardPlacementResult:
    """Where a parameter is sharded: the dim, None for dim 0, and the mesh."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def collect_grad_tensors(output: Any) -> tuple[Tensor, ...]:
    """The tensors of a tree that need gradients, where torch's own hooks look for them."""
    return tuple(filter(_needs_grad, tree_flatten(output)[0]))


def replace_grad_tensors(output: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with others in their places, in the same order."""
    return tree_map(lambda value: next(tensors) if _needs_grad(value) else value, output)


def resolve_shard_placement(result: Any, mesh_info: FSDPMeshInfo) -> ShardPlacementResult:
    """What a `shard_placement_fn` has returned, as a result."""
    if isinstance(result, ShardPlacementResult):
        return result
    if result is None or isinstance(result, Shard):
        return ShardPlacementResult(result, mesh_info)
    raise ValueError(f"Invalid shard_placement_fn result: {result}")


_uids = itertools.count()


def get_orig_param_uid(param: nn.Parameter) -> int:
    """The same number for all that stand for one original parameter."""
    if not hasattr(param, "_fsdp_orig_uid"):
        param._fsdp_orig_uid = next(_uids)  # type: ignore[attr-defined]
    return param._fsdp_orig_uid  # type: ignore[attr-defined]


def _refuse_dims(dp_mesh_dims: Any) -> None:
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims needs torch 2.13 or newer")


def validate_mesh(mesh: Any, dp_mesh_dims: Any) -> None:
    _refuse_dims(dp_mesh_dims)
    _fsdp_init._validate_mesh(mesh)


def get_mesh_info(mesh: Any, dp_mesh_dims: Any) -> Any:
    _refuse_dims(dp_mesh_dims)
    return _fsdp_init._get_mesh_info(mesh)


class FSDPParam(_fsdp_param.FSDPParam):
    """Its mesh comes with its placement."""

    @torch.no_grad()
    def _init_sharded_param(
        self,
        param: nn.Parameter,
        device: torch.device,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None,
        mesh_info: Any,
    ) -> None:
        result = None if shard_placement_fn is None else shard_placement_fn(param)
        wanted = resolve_shard_placement(result, mesh_info)
        self.mesh_info = wanted.mesh_info
        self._orig_param_uid = get_orig_param_uid(param)
        super()._init_sharded_param(param, device, lambda _: wanted.placement)  # type: ignore[call-arg]

    def _init_sharding_spec(self, param: torch.Tensor, placement: Any, dim: int) -> torch.Tensor:
        """Of a plain parameter."""
        placements: tuple[Any, ...] = (placement,)
        if isinstance(self.mesh_info, HSDPMeshInfo):
            placements = (Replicate(), placement)
        self._spmd_placements = placements
        self._sharding_spec = DTensorSpec(
            self._spmd_mesh,
            placements,
            tensor_meta=TensorMeta(param.size(), param.stride(), param.dtype),
        )
        return param


class FSDPParamGroup(_fsdp_param_group.FSDPParamGroup):
    """It starts over."""

    _num_param_groups = 1
    reduce_scatter_unused_params = False

    def _reset_iter_state(self) -> None:
        self._wait_for_what_runs()
        for fsdp_param in self.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
        self._training_state = TrainingState.IDLE
        self._post_forward_indices.clear()
        self._partial_reduce_output = None
        if self.is_unsharded:
            self._to_sharded()

    def _wait_for_what_runs(self) -> None:
        self.wait_for_unshard()
        stream = self.device_handle.current_stream()
        for event in (
            self._post_reduce_event,
            self._all_reduce_state.event if self._all_reduce_state is not None else None,
        ):
            if event is not None:
                stream.wait_event(event)
        self._post_reduce_event = self._all_reduce_state = None


class FSDPState(_fsdp_state.FSDPState):
    """Its groups are a list."""

    def __init__(self) -> None:
        self._fsdp_param_groups: list[Any] = []
        super().__init__()

    @property
    def _fsdp_param_group(self) -> Any:
        return self._fsdp_param_groups[0] if self._fsdp_param_groups else None

    @_fsdp_param_group.setter
    def _fsdp_param_group(self, group: Any) -> None:
        self._fsdp_param_groups[:] = [] if group is None else [group]

    def _init_shared_state(self) -> None:
        super()._init_shared_state()
        self._comm_ctx.reduce_scatter_max_input_buffers = 1  # of which there is one

    def _reset_iter_state(self) -> None:
        if self._is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        comm = self._comm_ctx
        if comm.reduce_scatter_state is not None:
            self._device_handle.current_stream().wait_event(comm.reduce_scatter_state.event)
        comm.all_gather_state = comm.reduce_scatter_state = None
        comm.post_forward_order.clear()
        for state in self._state_ctx.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            for group in state._fsdp_param_groups:
                group._reset_iter_state()
        self._state_ctx.iter_forward_root = None
        self._state_ctx.post_backward_final_callback_queued = False
