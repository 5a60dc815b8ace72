"""What happens to a module before FullyShardedDataParallel shards it: memory, device, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _init_utils
from torch.distributed.utils import _sync_params_and_buffers

_BUCKET_BYTES = 250 * 2**20  # as torch's FSDP1
_SYNCED = "_fsdp_synced"  # torch's mark on buffers that were sent already


def device_of(
    module: nn.Module, ignored: set[nn.Parameter], device_id: int | torch.device | None
) -> torch.device:
    """Where the module is to run: what was asked for, where it is, or the accelerator if any."""
    if device_id is not None:
        return torch.device(device_id)
    for param in _init_utils._get_orig_params(module, ignored):
        if param.device.type not in ("cpu", "meta"):
            return param.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def prepare(
    state: Any,
    module: nn.Module,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    sync: bool,
) -> None:
    """Gives meta parameters memory, moves to the device, sends rank 0's values to all."""
    ignored = state._ignored_params
    _init_utils._check_single_device_module(module, ignored, device)
    on_meta, deferred = _init_utils._need_to_materialize_module(
        module, ignored, state._ignored_modules
    )
    if (on_meta or deferred) and param_init_fn is not None:
        _init_utils._materialize_with_param_init_fn(module, param_init_fn, state._ignored_modules)
    elif on_meta:
        _init_utils._materialize_meta_module(
            module, device, state._ignored_modules, state._device_handle
        )
    if device.type != "cpu":
        buffers = {buffer for m in state._ignored_modules for buffer in m.buffers()}
        _init_utils._move_module_to_device(module, ignored, buffers, device)
    if sync:
        _sync(state, module, list(_init_utils._get_orig_params(module, ignored)))


def _sync(state: Any, module: nn.Module, params: list[nn.Parameter]) -> None:
    buffers = [buffer for buffer in module.buffers() if not getattr(buffer, _SYNCED, False)]
    tensors = [tensor.detach() for tensor in (*buffers, *params)]
    groups: list[dist.ProcessGroup] = [state.process_group]
    if state._inter_node_pg is not None:
        groups.insert(0, state._inter_node_pg)  # first, so that each row's first rank has them
    for group in groups:
        _sync_params_and_buffers(group, tensors, _BUCKET_BYTES, src=0)
    for buffer in buffers:
        setattr(buffer, _SYNCED, True)
