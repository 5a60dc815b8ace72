"""clone: a second sharded model like the first, for averages of weights and frozen references."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1

from fsdp_c._checkpoint import _full
from fsdp_c._compat import _versions
from fsdp_c._compat._versions import ShardPlacementResult
from fsdp_c._fully_shard import (
    _fsdp_init,
    _fsdp_module,
    _fully_shard,
    _param_attributes,
    _param_layout,
    _torchs_own,
)

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class _Copied:
    """One sharded parameter and what becomes its copy."""

    fsdp_param: Any
    full: nn.Parameter  # on the meta device, until fully_shard has made a shard of it


@torch.no_grad()
def clone(model: Model) -> Model:
    """Makes a second sharded model with this one's weights and buffers. Nothing is gathered.

    The copy has modules, parameters and buffers of its own and is sharded by the calls of
    ``fully_shard`` that sharded ``model``. Gradients are not copied, nor what setters changed after
    those calls. For an average of weights:

        ema = fsdp_c.clone(model).requires_grad_(False)
        update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
        update(list(ema.parameters()), list(model.parameters()), None)  # after each step

    All ranks call it, between two steps.

    Raises:
        ValueError, TypeError: something that cannot be copied; names it. Nothing is changed.
        NotImplementedError: torch's implementation runs a unit.

    Examples:
        >>> ema = fsdp_c.clone(model).requires_grad_(False)
        >>> update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
        >>> update(list(ema.parameters()), list(model.parameters()), None)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"clone expects a module, not {type(model).__name__}: pass the model")
    states = _states_of(model)
    copied = [
        _Copied(fsdp_param, _full_on_meta(fsdp_param))
        for state in states
        for group in state._fsdp_param_groups
        for fsdp_param in group.fsdp_params
    ]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    memo: dict[int, Any] = {id(c.fsdp_param.sharded_param): c.full for c in copied}
    methods = [(module, name) for state in states for module, name in _forward_methods(state)]
    with _unwrapped(states):
        for module, name in methods:
            del module.__dict__[name]
        twin = copy.deepcopy(model, memo)
    sharded = {id(c.fsdp_param.sharded_param) for c in copied}
    plain = {memo[id(param)] for param in model.parameters() if id(param) not in sharded}
    places = {id(c.full): _place_of(c.fsdp_param) for c in copied}
    for state in states:
        _shard_like(state, memo, plain, places)
    for module, name in methods:
        register_fsdp_forward_method(memo[id(module)], name)
    _fill(twin, memo, copied)
    return twin


def _states_of(model: nn.Module) -> list[Any]:
    """The states of the calls of fully_shard, in their order."""
    states: dict[Any, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, TorchFSDP1):
            raise TypeError(
                f"clone: module '{name or '(root)'}' is a FullyShardedDataParallel, which clone"
                " does not copy: build and wrap a second model and load the first one's state"
            )
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            _torchs_own.refuse("clone", _versions.groups_of(state))
            if getattr(state, "call", None) is None:
                raise ValueError(
                    f"clone: module '{name or '(root)'}' was not sharded by fsdp_c.fully_shard:"
                    " build and shard a second model and load the first one's state"
                )
            if state.offloaded is not None:
                raise RuntimeError(f"clone: {_fsdp_module.OFFLOADED}")
            states[state] = None
    if not states:
        raise ValueError(f"{type(model).__name__} has no units: copy.deepcopy(model) copies it")
    inside = {id(module) for module in model.modules()}
    for state in states:
        if any(id(module) not in inside for module in state._modules):
            raise ValueError(
                "clone: a unit of the model has modules outside of it: pass the model that holds"
                " all of them"
            )
    return sorted(states, key=lambda state: state.call.number)


def _full_on_meta(fsdp_param: Any) -> nn.Parameter:
    """What the parameter was before it was sharded, but without memory."""
    if reason := _torchs_own.why_not_a_tensor(fsdp_param):
        raise ValueError(f"clone: {reason}, and only plain tensors can be copied")
    shard = fsdp_param.sharded_param
    size = fsdp_param._orig_size
    strides = _param_layout.strides_for(size, fsdp_param.memory_order)
    data = torch.empty_strided(size, strides, dtype=shard.dtype, device="meta")
    full = nn.Parameter(data, requires_grad=shard.requires_grad)
    _param_attributes.copy_attributes(shard, full)
    return full


@contextmanager
def _unwrapped(states: Sequence[Any]) -> Iterator[None]:
    """The modules without what fully_shard gave them, but for the sharded parameters."""
    modules = {id(m): m for state in states for part in state._modules for m in part.modules()}
    saved = [(m, m.__class__, _fsdp_init.copy_fields(m)) for m in modules.values()]
    try:
        for state in states:
            for handle in _handles(state):
                handle.remove()
            for module in state._modules:
                module.__class__ = type(module).__mro__[2]
                _fully_shard.forget(module)
        yield
    finally:
        for module, cls, fields in saved:
            module.__class__ = cls
            _fsdp_init.put_fields(module, fields)


def _forward_methods(state: Any) -> Iterator[tuple[nn.Module, str]]:
    """What register_fsdp_forward_method has put on the state's modules."""
    for module in state._modules:
        for name, value in module.__dict__.items():
            code = getattr(getattr(value, "__func__", None), "__code__", None)
            if code in register_fsdp_forward_method.__code__.co_consts and code is not None:
                yield module, name


def _handles(state: Any) -> Iterator[Any]:
    """Of the hooks on the state's modules."""
    yield state._pre_forward_hook_handle
    yield state._post_forward_hook_handle
    for group in state._fsdp_param_groups:
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()
        yield from group._post_save_state_dict_hook_handles
        for fsdp_param in group.fsdp_params:
            yield fsdp_param._post_load_hook_handle


def _shard_like(
    state: Any, memo: dict[int, Any], plain: set[nn.Parameter], places: dict[int, Any]
) -> None:
    """Makes the call of fully_shard that made the state, for the copies of its modules."""
    call = state.call
    modules = [memo[id(module)] for module in state._modules]
    ignored = {param for module in modules for param in module.parameters()} & plain
    _fully_shard.fully_shard(
        modules[0] if call.is_single else modules,
        shard_placement_fn=(lambda param: places[id(param)]) if call.is_placed else None,
        ignored_params=ignored or None,
        **call.arguments,
    )


def _place_of(fsdp_param: Any) -> Any:
    return ShardPlacementResult(fsdp_param.fsdp_placement, fsdp_param.mesh_info)


def _fill(twin: nn.Module, memo: dict[int, Any], copied: Sequence[_Copied]) -> None:
    """Gives the copies memory and this rank's values; both models are sharded."""
    places = []
    for c in copied:
        module, name = _param_attributes.registrations(c.fsdp_param)[0]
        if not c.fsdp_param.sharded_param.is_meta:
            places.append((memo[id(module)], name, c.fsdp_param.sharded_param))
    devices = {id(module._parameters[name]): source.device for module, name, source in places}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        device = devices.get(id(tensor))
        return tensor if device is None else torch.empty_like(tensor, device=device)

    twin._apply(allocate)
    for module, name, source in places:
        target = module._parameters[name]
        _param_attributes.copy_attributes(source, target)
        _full.local_part(target).copy_(_full.local_part(source))
