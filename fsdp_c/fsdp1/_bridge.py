"""Lets the static functions of torch's FullyShardedDataParallel take the package's models too.

Libraries call them by torch's name (torch.distributed.checkpoint.state_dict does): a root that
holds wrappers of this package goes to its functions, every other one to torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as _torch

from fsdp_c.fsdp1 import _optim_states, _summon

_TORCHS: Any = _torch.FullyShardedDataParallel
# name: (which argument is the model, what takes the package's)
_BRIDGED: dict[str, tuple[str, Callable[..., Any]]] = {
    "summon_full_params": ("module", _summon.summon_full_params),
    "_optim_state_dict_impl": ("model", _optim_states.saved),
    "_optim_state_dict_to_load_impl": ("model", _optim_states.to_load),
}


def connect(ours: type) -> None:
    """Called with the package's class, torch's subclass, when an object of it is made."""
    for name, (argument, replacement) in _BRIDGED.items():
        torchs = inspect.getattr_static(_TORCHS, name).__func__
        if not hasattr(torchs, "_fsdp_c"):
            setattr(_TORCHS, name, staticmethod(_either(torchs, replacement, argument, ours)))


def _either(
    torchs: Callable[..., Any], replacement: Callable[..., Any], argument: str, ours: type
) -> Callable[..., Any]:
    signature = inspect.signature(torchs)

    def call(*args: Any, **options: Any) -> Any:
        model: nn.Module = signature.bind(*args, **options).arguments[argument]
        is_ours = any(issubclass(type(module), ours) for module in model.modules())
        return (replacement if is_ours else torchs)(*args, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = torchs.__doc__
    call._fsdp_c = True  # type: ignore[attr-defined]
    return call
