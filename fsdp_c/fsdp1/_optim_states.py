"""Optimizer states by parameter name, whole or sharded, as FSDP1 saves and loads them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor

from fsdp_c._checkpoint import _iter_full_params
from fsdp_c.fsdp1 import _convert


def saved(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    optim_input: Any = None,
    rank0_only: bool = True,
    full_state_dict: bool = True,
    group: dist.ProcessGroup | None = None,
    cpu_offload: bool = True,
    *,
    _stacklevel: int = 1,
) -> dict[str, Any]:
    """An optimizer's state_dict with names in the place of indices; collective where whole."""
    names = _names(model, optim, optim_input)
    is_kept = not full_state_dict or not rank0_only or dist.get_rank(group) == 0
    state: dict[str, Any] = {}
    shards = []
    found = optim_state_dict["state"]
    for key in sorted(found, key=lambda key: (key not in names, str(names.get(key, key)))):
        name, values = names.get(key, key), found[key]
        if isinstance(name, int):
            raise ValueError(f"the optimizer's state of parameter {key} is not the model's")
        if key not in names and not isinstance(values, dict):
            warnings.warn(f"optimizer state {key!r} is copied as it is", stacklevel=3)
            state[name] = values
            continue
        state[name] = dict(values)
        for what, value in values.items():
            if isinstance(value, DTensor) and full_state_dict:
                shards.append(((name, what), value))
            elif isinstance(value, torch.Tensor):
                kept = value.detach().clone()
                state[name][what] = kept.cpu() if cpu_offload else kept
    for (name, what), full in _iter_full_params.full_tensors_of(shards):
        if is_kept:
            state[name][what] = full.to("cpu" if cpu_offload else full.device, copy=True)
    if not is_kept:
        return {}
    result: dict[str, Any] = {"state": state}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = [
            {**copy.deepcopy(members), "params": [names.get(k, k) for k in members["params"]]}
            for members in optim_state_dict["param_groups"]
        ]
    return result


def to_load(
    optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
    full_state_dict: bool = True,
    rank0_only: bool = False,
    is_named_optimizer: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The way back: what `optim.load_state_dict` takes, in shards. Collective with rank0_only."""
    if rank0_only:
        optim_state_dict = _sent(optim_state_dict, group)
    assert optim_state_dict is not None
    names = _names(model, optim, optim_input)
    params = dict(enumerate(_params(model, optim, optim_input)))
    found = optim_state_dict["state"]
    state: dict[Any, Any] = {}
    known = set()
    for key, name in names.items():
        if name not in found:
            continue
        known.add(name)
        param, values = params[key], found[name]
        state[name if is_named_optimizer else key] = {
            what: _convert.shard_like(param, value, f"{name}, {what}")
            if isinstance(param, DTensor)
            else value
            for what, value in values.items()
        }
    all_names = {clean_tensor_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    state |= {name: value for name, value in found.items() if name not in known | all_names}
    if "param_groups" not in optim_state_dict:
        return {"state": state}
    keys = {name: name if is_named_optimizer else key for key, name in names.items()}
    groups = []
    for members in optim_state_dict["param_groups"]:
        if lacking := [name for name in members["params"] if name not in keys]:
            raise KeyError(f"the optimizer has no parameter '{lacking[0]}' of the state to load")
        groups.append(
            {**copy.deepcopy(members), "params": sorted({keys[n] for n in members["params"]})}
        )
    return {"state": state, "param_groups": groups}


def _params(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any
) -> list[nn.Parameter]:
    """The parameters in the order of their indices in the optimizer's state_dict."""
    members: Iterable[Any]
    if optim_input is not None:
        members = list(optim_input)
    elif optim is not None:
        members = optim.param_groups
    else:
        members = model.parameters()
    params: list[nn.Parameter] = []
    for member in members:
        params += member["params"] if isinstance(member, dict) else [member]
    return params


def _names(model: nn.Module, optim: Any, optim_input: Any) -> dict[int, str]:
    names: dict[Any, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, clean_tensor_name(name))
    params = _params(model, optim, optim_input)
    return {index: names[param] for index, param in enumerate(params) if param in names}


def _sent(state_dict: dict[str, Any] | None, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Rank 0's dict on all ranks; tensors travel one by one."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    tensors: list[Any] = []

    def taken_out(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            tensors.append(value)
            return _Hole(tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            return {key: taken_out(member) for key, member in value.items()}
        return value

    box = [taken_out(state_dict) if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, source, group=group)

    def put_back(value: Any) -> Any:
        if isinstance(value, _Hole):
            full = torch.empty(value.shape, dtype=value.dtype)
            if dist.get_rank() == source:
                full.copy_(tensors.pop(0))
            dist.broadcast(full, source, group=group)
            return full
        if isinstance(value, dict):
            return {key: put_back(member) for key, member in value.items()}
        return value

    return put_back(box[0])


class _Hole:
    """Where a tensor goes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
