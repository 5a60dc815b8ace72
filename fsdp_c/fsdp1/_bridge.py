"""Lets the static functions of torch's FullyShardedDataParallel take the package's models too.

Libraries call them by torch's name (torch.distributed.checkpoint.state_dict does): a tree that
holds wrappers of this package goes to its functions, every other one to torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as _torch

_TORCHS: Any = _torch.FullyShardedDataParallel
_BRIDGED = {
    "summon_full_params": "module",
    "_optim_state_dict_impl": "model",
    "_optim_state_dict_to_load_impl": "model",
}


def connect(ours: Any) -> None:
    """Called with the package's class when its first object is made."""
    for name, argument in _BRIDGED.items():
        torchs = inspect.getattr_static(_TORCHS, name)
        if not hasattr(torchs.__func__, "_fsdp_c"):
            both = _either(torchs.__func__, getattr(ours, name), argument, ours)
            setattr(_TORCHS, name, staticmethod(both))


def _either(
    torchs: Callable[..., Any], replacement: Callable[..., Any], argument: str, ours: type
) -> Callable[..., Any]:
    signature = inspect.signature(torchs)

    def call(*args: Any, **options: Any) -> Any:
        model: nn.Module = signature.bind(*args, **options).arguments[argument]
        is_ours = any(isinstance(module, ours) for module in model.modules())
        return (replacement if is_ours else torchs)(*args, **options)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call._fsdp_c = True  # type: ignore[attr-defined]
    return call
