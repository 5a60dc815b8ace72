"""All differences between torch versions that the package meets, each behind one name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import _common_utils
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

TORCH: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]

# torch's classes and functions as of 2.13.
if TORCH >= (2, 13):
    TorchParam: Any = _fsdp_param.FSDPParam
    TorchGroup: Any = _fsdp_param_group.FSDPParamGroup
    TorchState: Any = _fsdp_state.FSDPState
    ShardPlacementResult: Any = _fsdp_common.ShardPlacementResult
    resolve_shard_placement = _fsdp_common.resolve_shard_placement
    get_orig_param_uid = _fsdp_param._get_orig_param_uid
    get_mesh_info = _fsdp_init._get_mesh_info
    validate_mesh = _fsdp_init._validate_mesh
    collect_grad_tensors = _common_utils.collect_grad_tensors
    replace_grad_tensors = _common_utils.replace_grad_tensors
else:
    from fsdp_c._compat import _torch_pre_2_13

    TorchParam = _torch_pre_2_13.FSDPParam
    TorchGroup = _torch_pre_2_13.FSDPParamGroup
    TorchState = _torch_pre_2_13.FSDPState
    ShardPlacementResult = _torch_pre_2_13.ShardPlacementResult
    resolve_shard_placement = _torch_pre_2_13.resolve_shard_placement
    get_orig_param_uid = _torch_pre_2_13.get_orig_param_uid
    get_mesh_info = _torch_pre_2_13.get_mesh_info
    validate_mesh = _torch_pre_2_13.validate_mesh
    collect_grad_tensors = _torch_pre_2_13.collect_grad_tensors
    replace_grad_tensors = _torch_pre_2_13.replace_grad_tensors

# The collectives that units of torch's call.
COLLECTIVES = (
    ("all_gather_single", "reduce_scatter_single")
    if TORCH >= (2, 13)
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)

# From 2.15 a parameter may say in which dtype its gradients are kept (Tensor.grad_dtype), and
# reductions without reduce_dtype run in the original dtype instead of the compute dtype.
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "_has_grad_dtype_override")
# From 2.15 reset_iter_state() drops the gradients of shards too.
RESET_DROPS_GRADIENTS = HAS_GRAD_DTYPE
# From 2.15 a unit has two functions that lay out what its collectives move.
LAYOUT_FUNCTIONS = {
    name: getattr(_fsdp_param_group, default)
    for name, default in (
        ("_all_gather_output_fn", "_default_all_gather_output_fn"),
        ("_prepare_reduce_scatter_inputs", "_default_reduce_scatter_input_fn"),
    )
    if hasattr(_fsdp_param_group, default)
}
# From 2.13 a parameter that is a DTensor itself has one attribute for its layout.
SHARDS_DTENSORS = TORCH >= (2, 13)
# Names of torch.distributed.fsdp that only some versions have.
OPTIONAL_NAMES = {
    name: getattr(torch.distributed.fsdp, name)
    for name in ("DataParallelMeshDims", "GradientReductionHandle")
    if hasattr(torch.distributed.fsdp, name)
}


def groups_of(state: Any) -> list[Any]:
    """The units of a state, also of torch's own."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # before torch 2.13
    return [] if group is None else [group]


def is_spmd(mesh_info: Any) -> bool:
    """Whether a mesh is the data-parallel part of a larger one (dp_mesh_dims, from 2.13)."""
    return getattr(mesh_info, "is_spmd_mesh", False)


class _AtDestroy:
    """Stands among the communicators that destroy_process_group() ends with the default group."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.finalize = end


def at_destroy(end: Callable[[], None]) -> None:
    """Calls `end` when the default process group is destroyed, before its backends are."""
    ends = getattr(distributed_c10d._world, "comms", None)
    if ends is not None and not any(isinstance(e, _AtDestroy) and e.finalize == end for e in ends):
        ends.append(_AtDestroy(end))


def compute_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype of the unsharded parameter."""
    return fsdp_param.param_dtype or fsdp_param.orig_dtype


class AccumulatedGradient:
    """Base of FSDPParam; before 2.15 it has a place beside the leaf, which is the core's."""

    if not HAS_GRAD_DTYPE:

        @property
        def unsharded_accumulated_grad(self) -> torch.Tensor | None:
            if self.unit is None:  # type: ignore[attr-defined]
                return self.__dict__.get("unsharded_accumulated_grad")
            return self.unit._core_accumulated(self.unit.fsdp_params.index(self))  # type: ignore[attr-defined]

        @unsharded_accumulated_grad.setter
        def unsharded_accumulated_grad(self, grad: torch.Tensor | None) -> None:
            if self.unit is None:  # type: ignore[attr-defined]
                self.__dict__["unsharded_accumulated_grad"] = grad
            else:
                index = self.unit.fsdp_params.index(self)  # type: ignore[attr-defined]
                self.unit._core_set_accumulated(index=index, tensor=grad)  # type: ignore[attr-defined]


def accumulated_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype in which micro-batches without synchronization are added up."""
    asked = fsdp_param.unsharded_grad_dtype if HAS_GRAD_DTYPE else fsdp_param.reduce_dtype
    return with_both_parts(asked or compute_dtype(fsdp_param), compute_dtype(fsdp_param))


def with_both_parts(asked: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """No part of a complex gradient is lost in sums of a real dtype, which torch refuses."""
    return torch.promote_types(asked, compute) if compute.is_complex else asked


def set_sum_dtypes(fsdp_params: Sequence[Any]) -> None:
    """One dtype for the sums of a unit's gradients: the widest that one of them is held in.

    Parameters of another original dtype, which torch refuses, keep to themselves.
    """
    held: dict[torch.dtype, set[torch.dtype]] = {}
    for fsdp_param in fsdp_params:
        if fsdp_param.sharded_param.requires_grad:
            held.setdefault(fsdp_param.orig_dtype, set()).add(accumulated_dtype(fsdp_param))
    for fsdp_param in fsdp_params:
        dtypes = held.get(fsdp_param.orig_dtype, set()) | {accumulated_dtype(fsdp_param)}
        fsdp_param.sum_dtype = functools.reduce(torch.promote_types, dtypes)


def set_reduce_dtype(group: Any, dtype: torch.dtype) -> None:
    """Gradients of the unit are summed in it from the next set-up on."""
    for owner in (group, *group.fsdp_params):
        if hasattr(owner, "mp_policy"):  # from 2.15 on only parameters have one
            owner.mp_policy = dataclasses.replace(owner.mp_policy, reduce_dtype=dtype)


def reduce_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype in which the parameter's gradients are summed over ranks."""
    return fsdp_param.sum_dtype


def takes_any_gradient(fsdp_param: Any) -> bool:
    """Whether sums are of the dtype that a gradient happens to have (from 2.15)."""
    return HAS_GRAD_DTYPE and fsdp_param.unsharded_grad_dtype is None


def unset_reduce_dtype(orig: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The same where a policy names no reduce_dtype."""
    return orig if HAS_GRAD_DTYPE else compute


def grad_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype of the sharded gradient."""
    if HAS_GRAD_DTYPE:
        return fsdp_param.sharded_grad_dtype or accumulated_dtype(fsdp_param)
    return fsdp_param.orig_dtype


def set_grad_dtype(fsdp_param: Any, unsharded: torch.nn.Parameter) -> None:
    """Tells autograd in which dtype to add up gradients on the unsharded parameter (from 2.15)."""
    if HAS_GRAD_DTYPE and unsharded.is_floating_point():
        unsharded.grad_dtype = fsdp_param.unsharded_grad_dtype  # type: ignore[attr-defined]


def copy_grad_dtype(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    """Gives `target` the gradient dtype that was set on `source`, if one was."""
    if HAS_GRAD_DTYPE and source._has_grad_dtype_override:  # type: ignore[attr-defined]
        target.grad_dtype = source.grad_dtype  # type: ignore[attr-defined]


def take_grad_dtype(fsdp_param: Any, param: torch.nn.Parameter) -> None:
    """Settles the gradient dtype where `param` may have replaced the sharded parameter."""
    if not HAS_GRAD_DTYPE:
        return
    fsdp_param._capture_grad_dtype_policy(fsdp_param.sharded_param)
    if param is not fsdp_param.sharded_param:
        fsdp_param._capture_grad_dtype_policy(param)
    if not fsdp_param._has_sharded_grad_dtype_override:
        fsdp_param.sharded_grad_dtype = param.dtype
    elif not param._has_grad_dtype_override:  # type: ignore[attr-defined]
        param.grad_dtype = fsdp_param.sharded_grad_dtype  # type: ignore[attr-defined]


def forget_specs(fsdp_param: Any) -> None:
    """To be called where the spec of the sharded parameter changes."""
    if HAS_GRAD_DTYPE:
        fsdp_param._sharding_spec_by_dtype.clear()


def policy_for(mp_policy: Any, param: torch.nn.Parameter) -> Any:
    """The policy of one parameter: from 2.15 it may differ from its unit's."""
    resolve = getattr(mp_policy, "_resolve_for_param", None)
    return mp_policy if resolve is None else resolve(param)


def allow_mixed_dtypes(group: Any) -> None:
    """What torch's group would know about its parameters' dtypes if they were all alike."""
    group._orig_dtype = group._reduce_dtype = None
    group._fsdp_params_with_wider_grad_dtype = []


def is_annotated(param: torch.nn.Parameter) -> bool:
    """Whether a parameter carries spmd_types annotations (from 2.14, with that package)."""
    spmd = getattr(_fsdp_param, "spmd", None)
    return spmd is not None and bool(spmd.get_local_type(param))


def is_typed_spmd(fsdp_param: Any) -> bool:
    """Whether the parameter carries spmd_types annotations (from 2.14)."""
    return bool(getattr(fsdp_param, "is_spmd_types", False))


# Gathers that torch's own setters choose, by their classes' names: a torch may lack one.
COMM_MEMORY = {
    "ProcessGroupAllocAllGather": "its collectives use memory of the process group",
    "SymmMemAllGather": "its collectives use symmetric memory",
}


def default_comms() -> tuple[type, type]:
    """The classes of the collectives that a group has unless the user replaces them."""
    return _fsdp_param_group.DefaultAllGather, _fsdp_param_group.DefaultReduceScatter


def divide_factors(group: Any, dtype: torch.dtype) -> tuple[float | None, float | None, Any, Any]:
    """By what torch's group divides gradients before and after its collectives, and their ops."""
    info = group.mesh_info
    return _fsdp_collectives._get_gradient_divide_factors(
        getattr(info, "shard_process_group", None),
        getattr(info, "replicate_process_group", None),
        dtype,
        group.device.type,
        group.gradient_divide_factor,
        sums_are_forced(group),
    )


def sums_are_forced(group: Any) -> bool:
    """Whether torch's group has to divide sums itself, asked to or not."""
    shards = getattr(group.mesh_info, "shard_process_group", None)
    if group.gradient_divide_factor is None or shards is None or shards.size() == 1:
        return group.force_sum_reduction_for_comms
    # Only NCCL can scale while it sums; with one rank there is nothing to scatter.
    return group.force_sum_reduction_for_comms or dist.get_backend(shards) != "nccl"


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """torch.utils.flop_counter's formulas; 2.13 has none for attention on the CPU."""
    from torch.utils import flop_counter

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
        **flop_counter.flop_registry,
    }
