"""Units that torch's own functions have made below a root of fsdp_c become fsdp_c's.

So it is where `replicate` is called without `install()`, or `fully_shard` before it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard import _fsdp_state

from fsdp_c._fully_shard import _fsdp_module, _replicate, _state_places, _watches
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._fsdp_state import FSDPState


def adopt_below(root: nn.Module) -> None:
    """Takes over what has not run yet, in the same modules and with the same shards; local."""
    adopted: dict[Any, FSDPState] = {}
    for module in root.modules():
        state = _composable_state._get_module_state(module)
        is_torchs = isinstance(state, _fsdp_state.FSDPState) and not isinstance(state, FSDPState)
        if getattr(state, "is_handed_over", False):
            continue
        if is_torchs and state not in adopted and state._is_root is None:
            adopted[state] = _adopt(state)
    for torchs, ours in adopted.items():
        for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
            named = getattr(torchs, name)
            if named:
                setattr(ours, name, [adopted.get(state, state) for state in named])


def _adopt(torchs: Any) -> FSDPState:
    is_replicated = isinstance(torchs, _replicate.TorchsState)
    ours = _replicate.ReplicateState() if is_replicated else FSDPState()
    _state_places.take_place(ours, torchs)
    context, before = ours._state_ctx, torchs._state_ctx
    context.is_last_backward = before.is_last_backward
    context.post_optim_event = before.post_optim_event
    ours._fsdp_param_groups = [_adopt_group(group) for group in torchs._fsdp_param_groups]
    _fsdp_module.equip(ours._modules)
    _watches.watch(ours)
    return ours


def _adopt_group(torchs: Any) -> FSDPParamGroup:
    group = FSDPParamGroup.__new__(FSDPParamGroup)
    group._post_save_state_dict_hook_handles = []
    for name, value in vars(torchs).items():
        setattr(group, name, value)
    for fsdp_param in group.fsdp_params:
        fsdp_param.__class__ = FSDPParam
        fsdp_param.adopt()
    return group
