"""Why torch's implementation runs a root: what its units have that the core cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_c._comm import _agreement, _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _replaced_functions
from fsdp_c._fully_shard._param_spec import SUMMABLE


def why_torch(group: Any) -> str:
    """What the unit has that only torch's own implementation can run; empty: the core runs it."""
    return why_torch_everywhere(group) or why_torch_here(group)


def why_torch_everywhere(group: Any) -> str:
    """What of that comes with the arguments of fully_shard: alike on all ranks."""
    mesh_info = group.mesh_info
    if group.device.type != "cpu" and not _device.is_wanted(group):
        return f"it is on {group.device.type}"
    if mesh_info.mesh.device_type != group.device.type:
        return f"its mesh is on {mesh_info.mesh.device_type}"
    if not _device.is_wanted(group) and _device.offloads(group)[1]:
        return "offloading to pinned memory"
    for fsdp_param in group.fsdp_params:
        if reason := _why_not_laid_out(fsdp_param) or _why_not_summed(fsdp_param):
            return reason
    return _device.why_not(group) if _device.is_wanted(group) else ""


def why_torch_here(group: Any) -> str:
    """What of that is set later, perhaps by a tool that runs on one rank alone."""
    for name, default in _versions.LAYOUT_FUNCTIONS.items():
        if getattr(group, name) is not default:
            return f"its {name} was replaced"
    if reason := _replaced_functions.replaced_on(group):
        return reason
    return ""


def agreed_reason(groups: Sequence[Any], mine: str) -> str:
    """A reason that some rank has, this one's first; collective."""
    _agreement.check_process_groups([(_fqns.unit_name(g), g.mesh_info) for g in groups])
    named = f"{mine} on rank {dist.get_rank()}" if mine else ""
    found = _agreement.first_reason_of_units("choice of implementation", groups, named)
    return mine or found


def why_not_a_tensor(fsdp_param: Any) -> str:
    """What the parameter is other than a tensor of numbers, each rank's rows of it."""
    local = fsdp_param._sharded_local_tensor
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    if fsdp_param.is_dtensor:
        return f"{name} is a DTensor of its own (tensor parallel)"
    if type(local) is not torch.Tensor:
        return f"{name} is a {type(local).__name__}"
    if hasattr(local, "fsdp_pre_all_gather"):
        return f"{name} has an all-gather extension"
    return f"{name} has spmd types" if _versions.is_typed_spmd(fsdp_param) else ""


def _why_not_laid_out(fsdp_param: Any) -> str:
    """What keeps the core from gathering the parameter's memory as it is."""
    is_special = _versions.is_typed_spmd(fsdp_param) or isinstance(
        fsdp_param._sharded_param_data, FakeTensor
    )
    is_known = _versions.SHARDS_DTENSORS and not is_special
    return "" if is_known else why_not_a_tensor(fsdp_param)


def _why_not_summed(fsdp_param: Any) -> str:
    name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
    if fsdp_param.sharded_param.requires_grad and _versions.takes_any_gradient(fsdp_param):
        return f"gradients of {name} may be of any dtype (grad_dtype=None)"
    dtypes = {_versions.reduce_dtype(fsdp_param), _versions.grad_dtype(fsdp_param)}
    if fsdp_param.sharded_param.requires_grad and not dtypes <= SUMMABLE:
        return f"gradients of {name} are of another dtype than floating point"
    return ""
