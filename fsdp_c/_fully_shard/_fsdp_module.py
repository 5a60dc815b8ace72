"""What the classes of sharded modules refuse or tell beyond torch's FSDPModule."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_c import _env
from fsdp_c._compat import _versions
from fsdp_c._native import _C

# Buffers that to_empty made -> their version then: nobody has written them while it is the same.
_empty: Any = WeakIdKeyDictionary()

OFFLOADED = (
    "the model's memory was moved away by fsdp_c.offload(): call fsdp_c.onload(model) on all ranks"
    " before it is used"
)


def equip(modules: Sequence[nn.Module]) -> None:
    """Adds to the modules' classes, which fully_shard has made, what this module defines."""
    for module in modules:
        cls: Any = type(module)
        if "__copy__" not in cls.__dict__:
            cls.__copy__ = _copy
            cls.__deepcopy__ = _refuse_deepcopy
            cls._apply = _apply
            cls.unshard = _unshard
            cls.zero_grad = _zero_grad_of(cls)
            for name, setter in _SETTERS.items():
                setattr(cls, name, setter)
            _C.call_directly(cls)


def _copy(self: nn.Module) -> Any:
    if _env.is_strict():  # what copy.copy does without this method
        rebuild, arguments, state, *_ = self.__reduce_ex__(4)
        copied = rebuild(*arguments)
        copied.__setstate__(state)
        return copied
    raise TypeError(
        f"{type(self).__name__} does not support copy.copy: both modules would swap the same"
        " parameters. fsdp_c.clone(model) makes a second one"
    )


def _refuse_deepcopy(self: nn.Module, _: Any) -> Any:
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization. For a second"
        " sharded model with the same weights call fsdp_c.clone(model)"
    )


def _apply(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """nn.Module's way to move, cast and convert."""
    name = getattr(function, "__qualname__", "")
    if name.startswith("Module.share_memory."):
        raise RuntimeError(
            f"share_memory() cannot be called on {type(self).__name__}: its parameters are sharded,"
            " each rank holds its own part"
        )
    result = FSDPModule._apply(self, function, *args, **kwargs)
    if name.startswith("Module.to_empty."):
        for buffer in self.buffers():
            _empty[buffer] = buffer._version
    return result


@functools.wraps(FSDPModule.unshard)
def _unshard(self: Any, async_op: bool = False) -> Any:
    handle = FSDPModule.unshard(self, async_op)
    if _env.keeps_unsharded():
        for group in _versions.groups_of(self._get_fsdp_state()):
            if hasattr(group, "_is_bound"):
                group.keep_unsharded()
    return handle


def _zero_grad_of(cls: Any) -> Callable[..., None]:
    @functools.wraps(nn.Module.zero_grad)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        super(cls, self).zero_grad(set_to_none)
        # Units that are unsharded show parameters that have no gradients of their own.
        for module in self.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in _versions.groups_of(module._get_fsdp_state()):
                if not hasattr(group, "_is_bound"):
                    continue  # torch's own; classes are made once per class of modules
                for param in (p.sharded_param for p in group.fsdp_params):
                    if param.grad is not None and set_to_none:
                        param.grad = None
                    elif param.grad is not None:
                        param.grad.detach_().zero_()

    return zero_grad


def warn_user(text: str) -> None:
    """A warning at the line outside of torch, and of this package, that led here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "fsdp_c.")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def warn_of_lost_settings(groups: Sequence[Any], names: Sequence[str]) -> None:
    """In a first forward: what the user has set and nothing will follow."""
    for group in groups:
        for fsdp_param in group.fsdp_params:
            if fsdp_param.sharded_param._backward_hooks:
                warnings.warn(
                    f"hooks of parameter '{fsdp_param._param_fqn}' never run: FSDP writes gradients"
                    " of sharded parameters itself. Use register_post_accumulate_grad_hook, or"
                    " register the hook while the parameter is unsharded",
                    stacklevel=2,
                )
    root = next((group for group in groups if group._module_fqn == ""), None)
    factor = None if root is None else root.gradient_divide_factor
    others = [
        name
        for group, name in zip(groups, names, strict=True)
        if factor is not None and group.gradient_divide_factor != factor
    ]
    if others:
        warnings.warn(
            f"set_gradient_divide_factor({factor}) was called on the root, and is not recursive:"
            f" the gradients of {len(others)} other units, such as '{others[0]}', are divided by"
            " factors of their own. Call it on each FSDPModule",
            stacklevel=2,
        )


class ReplicatedError(ValueError, AssertionError):
    """A setter about shards on a unit that has none; torch's is an AssertionError without text."""


def _refused_if_replicated(name: str, recurse_by_default: bool) -> Callable[..., Any]:
    """torch's setter, which changes nothing where it would meet a replicated unit."""
    setter = getattr(FSDPModule, name)

    @functools.wraps(setter)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        recurse = kwargs.get("recurse", args[1] if len(args) > 1 else recurse_by_default)
        for path, module in self.named_modules() if recurse else [("", self)]:
            is_unit = isinstance(module, FSDPModule)
            groups = _versions.groups_of(module._get_fsdp_state()) if is_unit else ()
            if not all(isinstance(group.mesh_info, FSDPMeshInfo) for group in groups):
                raise ReplicatedError(
                    f"{name}() is not for replicated units, and module '{path or '(root)'}'"
                    f" ({type(module).__name__}) is one: its parameters are whole on every rank,"
                    " nothing of them is gathered, resharded or scattered. Call it on sharded"
                    " units only, with recurse=False where it has that argument"
                )
        return setter(self, *args, **kwargs)

    return checked


_SETTERS = {
    name: _refused_if_replicated(name, recurse_by_default)
    for name, recurse_by_default in (
        ("set_reshard_after_forward", True),
        ("set_separate_reduce_scatter_group", True),
        ("set_allocate_memory_from_process_group_for_comm", False),
    )
    if hasattr(FSDPModule, name)
}


def warn_of_empty_buffers(root: nn.Module) -> None:
    """Names the buffers that hold what happened to be in memory; each once."""
    if not _empty:
        return
    names = [
        name for name, buffer in root.named_buffers() if _empty.pop(buffer, None) == buffer._version
    ]
    if names:
        warnings.warn(
            f"buffers of {type(root).__name__} were made by to_empty() and never written since:"
            f" {', '.join(names)}. Initialize or load them",
            stacklevel=2,
        )
