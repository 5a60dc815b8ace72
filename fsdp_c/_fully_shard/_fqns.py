"""Names: a model's tensors as its checkpoints call them, units as messages do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# What torch.compile, activation checkpointing and FSDP1's class put into names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass
class Named:
    """A parameter (its shard, if it is sharded) or a buffer that state dicts hold."""

    names: list[str]  # more than one if it is tied
    tensor: torch.Tensor


def clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def tensors_of(model: nn.Module) -> list[Named]:
    """All of the model's, in the order of its state dict; units are resharded first. Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found: dict[int, Named] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters.items()]
        own += [
            (name, buffer)
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]
        for name, tensor in own:
            if tensor is not None:
                full = clean(f"{prefix}.{name}" if prefix else name)
                named = found.setdefault(id(tensor), Named([], tensor))
                if full not in named.names:
                    named.names.append(full)
    return list(found.values())


def unit_name(group: Any) -> str:
    if group._module_fqn is None:  # unsharded before the root's first forward
        return ", ".join(type(module).__name__ for module in group.modules)
    return clean(group._module_fqn + ".")[:-1] or "(root)"


def state_name(state: Any) -> str:
    """How messages call the module that a forward began with."""
    group = state._fsdp_param_groups[0] if state._fsdp_param_groups else None
    return unit_name(group) if group is not None else type(state._modules[0]).__name__
