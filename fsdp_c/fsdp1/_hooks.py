"""Communication hooks of FSDP1: what adds gradients up in the place of FSDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from fsdp_c._compat import _versions
from fsdp_c.fsdp1 import _meshes

_PLAIN = (default_hooks.allreduce_hook, default_hooks.reduce_scatter_hook)
_COMPRESSED = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}


def register(wrappers: Sequence[Any], state: Any, hook: Callable[..., None]) -> None:
    """Lets the hook add up the gradients of all units; collective once forward has run.

    Hooks of torch that come to what a unit does anyway are left to it. Every other one gets the
    unit's gradients as a flat tensor (each rank's parts next to each other) and runs on torch's.
    """
    for wrapper in wrappers:
        if _meshes.is_hybrid(wrapper.sharding_strategy):
            raise AssertionError(
                "Communication hook is not supported for hybrid strategies:"
                f" {wrapper.sharding_strategy}"
            )
        if wrapper._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook}")
    for wrapper in wrappers:
        wrapper._comm_hook, wrapper._comm_hook_state = hook, state
        for group in wrapper._groups:
            if not _averages(wrapper, group, state, hook):
                _hand_over(wrapper, group, functools.partial(hook, state))
            elif hook in _COMPRESSED:
                _reduce_in(group, _COMPRESSED[hook])
    on_core = [w._unit for w in wrappers if getattr(w._unit, "_root", None)]
    roots = {id(unit._root): unit for unit in on_core}
    for unit in roots.values():
        unit._rebuild_units()


def _averages(wrapper: Any, group: Any, state: Any, hook: Any) -> bool:
    """Whether the hook takes the mean over the unit's own ranks, in its dtypes, and no more."""
    is_replicated = wrapper.sharding_strategy is ShardingStrategy.NO_SHARD
    if hook in _COMPRESSED:
        trained = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        if type(state) is not default_hooks.LowPrecisionState or any(
            param.dtype != state.parameter_type for param in trained
        ):
            return False
    elif hook is not _PLAIN[not is_replicated] or not isinstance(state, default_hooks.DefaultState):
        return False
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    ranks = [dist.get_process_group_ranks(g) for g in (state.process_group, wrapper.process_group)]
    return divisor == wrapper.process_group.size() and set(ranks[0]) == set(ranks[1])


def _reduce_in(group: Any, dtype: torch.dtype) -> None:
    _versions.set_reduce_dtype(group, dtype)
    if not getattr(group, "_is_bound", False):
        group._init_mp_dtypes()


def _hand_over(wrapper: Any, group: Any, hook: Callable[..., None]) -> None:
    if wrapper.sharding_strategy is ShardingStrategy.NO_SHARD:
        group._all_reduce_hook = hook
        if isinstance(group.mesh_info, HSDPMeshInfo):  # nothing but the hook sums over copies
            info = group.mesh_info
            group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    else:
        group._reduce_scatter_comm = _Hooked(hook)
    group.gradient_divide_factor = 1.0  # the hook divides
    group.force_sum_reduction_for_comms = True


class _Hooked(_versions.default_comms()[1]):  # type: ignore[misc]
    """A reduce-scatter that the hook does."""

    def __init__(self, hook: Callable[..., None]) -> None:
        super().__init__()
        self.hook = hook

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any
    ) -> None:
        self.hook(input_tensor, output_tensor)
