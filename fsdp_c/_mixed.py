"""What to say where a sharded parameter meets plain tensors: which one it is, and the cures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed import _composable_state
from torch.distributed.tensor import DTensor

from fsdp_c import _plan
from fsdp_c._native import _C
from fsdp_c._unit import FSDPParamGroup


def _groups() -> Iterator[FSDPParamGroup]:
    """All units of this process."""
    for ref in list(_composable_state._module_state_mapping.values()):
        for group in getattr(ref(), "_fsdp_param_groups", ()):
            if isinstance(group, FSDPParamGroup):
                yield group


def describe(tensors: list[Tensor]) -> str:
    """About the first parameter of a unit among the tensors, or a view of one; or nothing."""
    storages = {
        tensor._local_tensor.untyped_storage()._cdata
        for tensor in tensors
        if isinstance(tensor, DTensor)
    }
    for group in _groups():
        for fsdp_param in group.fsdp_params:
            local: Any = getattr(fsdp_param.sharded_param, "_local_tensor", None)
            if local is None or local.untyped_storage()._cdata not in storages:
                continue
            name = fsdp_param._param_fqn or fsdp_param._module_info.param_name
            return (
                f"'{name}' is a parameter of FSDP unit '{_plan.unit_name(group)}' and sharded now:"
                " the unit is not in forward or backward. Call the unit's module itself; or name"
                " the method that uses the parameter to register_fsdp_forward_method(); or call"
                " unshard() on the unit's module before, and reshard() after"
            )
    return ""


def install() -> None:
    """From now on torch's error about mixed tensors says more."""
    _C.name_mixed(describe)
