"""What users hang on parameters, and the modules that parameters are registered in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Attributes of parameters that belong to torch, not to the user.
_TORCHS_OWN = frozenset({"_fsdp_orig_uid", "_is_param", "_local_tensor", "_spec"})


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives a parameter what users have set on the one that it stands for."""
    for name, value in source.__dict__.items():
        if name not in _TORCHS_OWN:
            target.__dict__.setdefault(name, value)


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives a parameter the hooks of one that it replaces; their handles remove them from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, name, None):
            setattr(target, name, hooks)


def registrations(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """The modules, and the names there, that a parameter is registered under."""
    info = fsdp_param._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
