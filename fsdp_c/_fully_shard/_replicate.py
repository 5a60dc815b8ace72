"""torch's `replicate`, while fsdp_c is installed: its units are fsdp_c's, run by torch's code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable import replicate_with_fsdp

from fsdp_c._fully_shard import _fsdp_init, _fsdp_module

_originals: dict[str, Any] = {}


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


def _apply_to_module(modules: tuple[nn.Module, ...], *args: Any) -> None:
    _originals["_apply_to_module"](modules, *args)
    _fsdp_module.equip(modules)


def install() -> None:
    """`replicate` looks these functions up in its module; who holds `replicate` gets them too."""
    for function in (_init_param_group, _apply_to_module):
        name = function.__name__
        _originals.setdefault(name, getattr(replicate_with_fsdp, name))
        setattr(replicate_with_fsdp, name, function)


def uninstall() -> None:
    """Takes `install` back; modules that are replicated already stay as they are."""
    for name, function in _originals.items():
        setattr(replicate_with_fsdp, name, function)
    _originals.clear()
