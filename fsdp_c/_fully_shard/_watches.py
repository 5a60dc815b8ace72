"""What looks at a sharded model from its first unit on: steps, saves, mistakes, clipping."""

from __future__ import annotations

from typing import Any

from fsdp_c._comm import _rendezvous
from fsdp_c._fully_shard import (
    _activation_checkpoints,
    _errors,
    _save_guard,
    _unmanaged_params,
    _update_counters,
)
from fsdp_c._optim import _clip_grad_norm, _step


def watch(state: Any, ignored_params: Any = None) -> None:
    """From now on the state's parameters are known to optimizers, clipping and errors; local."""
    groups = state._fsdp_param_groups
    _errors.watch(state)
    _unmanaged_params.watch(state, ignored_params)
    _save_guard.install()
    _clip_grad_norm.install()
    if state._device.type == "cpu":
        _rendezvous.announce()
    if state._device.type in ("cpu", "cuda"):
        _step.watch(groups)
        _update_counters.watch(groups)
        _activation_checkpoints.watch()
