"""State dicts of FullyShardedDataParallel: full, sharded and local, under clean names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, clean_tensor_name
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _replace_by_prefix

from fsdp_c._checkpoint import _full, _iter_full_params
from fsdp_c.fsdp1 import _convert


def register(wrapper: nn.Module) -> None:
    wrapper._register_state_dict_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def _after_saving(wrapper: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Called from the inside out: what wrapped modules below hold is done already."""
    _replace_by_prefix(state_dict, prefix + FSDP_PREFIX, prefix)
    kind, config = wrapper._state_dict_type, wrapper._state_dict_config
    summoned = _summoned(wrapper, state_dict, prefix, kind)
    shards = {
        key: value
        for key, value in state_dict.items()
        if key.startswith(prefix) and isinstance(value, DTensor)
    }
    buffers = _buffers_of(wrapper, state_dict, prefix)
    if kind is StateDictType.FULL_STATE_DICT:
        is_kept = not config.rank0_only or wrapper.rank == 0
        for key, full in _iter_full_params.full_tensors_of(list(shards.items())):
            if is_kept:
                state_dict[key] = full.to(
                    "cpu" if config.offload_to_cpu else full.device, copy=True
                )
        if not is_kept:
            for key in (*shards, *summoned, *buffers):
                del state_dict[key]
            return
    elif kind is StateDictType.LOCAL_STATE_DICT:
        state_dict.update({key: _full.local_part(shard) for key, shard in shards.items()})
    for key, dtype in buffers.items():
        if wrapper.mixed_precision.buffer_dtype is not None:
            state_dict[key] = state_dict[key].to(dtype, copy=True)
    if config.offload_to_cpu:
        for key in (*shards, *summoned, *buffers):
            state_dict[key] = state_dict[key].cpu()


def _summoned(
    wrapper: Any, state_dict: dict[str, Any], prefix: str, kind: StateDictType
) -> list[str]:
    """Keys of the wrapper's own parameters if they are whole now; with what was written there."""
    own = {param.registered for param in wrapper._summoned_params}
    if own and kind is not StateDictType.FULL_STATE_DICT:
        raise RuntimeError(
            f"state_dict() of {kind.name} inside of summon_full_params, where parameters are whole:"
            " leave the context first, or ask for FULL_STATE_DICT"
        )
    named = wrapper._fsdp_wrapped_module.named_parameters(remove_duplicate=False) if own else ()
    keys = [prefix + clean_tensor_name(name) for name, param in named if param in own]
    return [key for key in keys if key in state_dict]


def _buffers_of(wrapper: Any, state_dict: dict[str, Any], prefix: str) -> dict[str, torch.dtype]:
    """Keys of the module's buffers in the dict, and the dtypes that they had at first."""
    return {
        prefix + name: dtype
        for name, dtype in wrapper._buffer_name_to_orig_dtype.items()
        if prefix + name in state_dict and name not in wrapper._ignored_buffer_names
    }


def _before_loading(wrapper: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Called from the outside in: each wrapper names and cuts what it holds itself."""
    module = wrapper._fsdp_wrapped_module
    if (flat := state_dict.pop(prefix + FLAT_PARAM, None)) is not None:
        own = {
            prefix + name: param
            for name, param in module.named_parameters(remove_duplicate=False)
            if FSDP_PREFIX not in name and isinstance(param, DTensor)
        }
        name = clean_tensor_name(prefix + FLAT_PARAM)
        group, device = wrapper.process_group, wrapper.compute_device
        state_dict |= _convert.cut_flat(own, flat, group, device, name)
    _replace_by_prefix(state_dict, prefix, prefix + FSDP_PREFIX)
    for name, param in module.named_parameters(remove_duplicate=False):
        key = prefix + FSDP_PREFIX + name
        if FSDP_PREFIX in name or not isinstance(param, DTensor) or key not in state_dict:
            continue
        value = state_dict[key]
        is_local = wrapper._state_dict_type is StateDictType.LOCAL_STATE_DICT
        if is_local and not isinstance(value, DTensor):
            state_dict[key] = _convert.local_like(param, value)
        else:
            state_dict[key] = _convert.shard_like(param, value, clean_tensor_name(key))


def _after_loading(wrapper: Any, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_tensor_name(key) for key in keys]
