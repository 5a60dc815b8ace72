"""torch's `replicate`, while fsdp_c is installed: its states and units are fsdp_c's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable import replicate_with_fsdp as _torch
from torch.distributed._composable_state import _get_module_state

from fsdp_c._compat import _redirection
from fsdp_c._fully_shard import _fsdp_init, _fsdp_module, _unmanaged_params, _watches
from fsdp_c._fully_shard._fsdp_state import FSDPState, FSDPStateContext

_originals: dict[str, Any] = {}


TorchsState: Any = _torch._ReplicateState


class _ReplicateStateContext(FSDPStateContext, _torch._ReplicateStateContext):
    """What a replicated root and the units below it share."""


class ReplicateState(FSDPState, TorchsState):
    """The state of one call of `replicate`: a shard group of one rank, and all ranks replicas."""

    _state_name = "Replicate"

    def __init__(self) -> None:
        super().__init__()
        self._state_ctx = _ReplicateStateContext()

    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: Any,
        auto_reshard_after_forward: bool = False,
    ) -> None:
        super().init(modules, device, mp_policy, auto_reshard_after_forward)


ReplicateState.__name__ = ReplicateState.__qualname__ = TorchsState.__name__


def _get_modules_and_states(
    module: Any, device: torch.device, ignored_params: Any = None, **kwargs: Any
) -> Any:
    """The only one of these functions that is told what to ignore."""
    found = _originals["_get_modules_and_states"](module, device, ignored_params, **kwargs)
    _unmanaged_params.ignore(found[1], ignored_params)
    return found


def _init_param_group(
    state: Any,
    params: list[nn.Parameter],
    modules: tuple[nn.Module, ...],
    mesh_info: Any,
    post_forward_mesh_info: Any,
    device: torch.device,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    _fsdp_init.make_groups(
        state,
        params,
        modules,
        mesh_info,
        post_forward_mesh_info,
        device,
        shard_placement_fn,
        mp_policy,
        _fsdp_init.offload_for(device, offload_policy),
        True,
    )
    _watches.watch(state)


def _apply_to_module(modules: tuple[nn.Module, ...], *args: Any) -> None:
    _originals["_apply_to_module"](modules, *args)
    _fsdp_module.equip(modules)
    state = _get_module_state(modules[0])
    if isinstance(state, FSDPState):
        state.settle()


def install() -> None:
    """`replicate` looks these functions up in its module; who holds `replicate` gets them too."""
    for function in (_get_modules_and_states, _init_param_group, _apply_to_module):
        name = function.__name__
        _originals.setdefault(name, getattr(_torch, name))
        setattr(_torch, name, function)
    cell = _redirection.state_class(_torch.replicate)
    if cell is not None:
        _originals.setdefault("state_cls", cell.cell_contents)
        cell.cell_contents = ReplicateState


def uninstall() -> None:
    """Takes `install` back; modules that are replicated already stay as they are."""
    cell = _redirection.state_class(_torch.replicate)
    if cell is not None and (torchs := _originals.pop("state_cls", None)) is not None:
        cell.cell_contents = torchs
    for name, function in _originals.items():
        setattr(_torch, name, function)
    _originals.clear()
