"""Parameters that modules of several units share: the unit around all of those owns them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed import _composable_state

from fsdp_c import _env
from fsdp_c._fully_shard import _param_attributes

# [Note: tied over units] A unit is gathered while any unit inside it runs, and reduced after them.
# So a tied parameter moves to the unit around all modules that have it: from the inner unit where
# that exists already, or, if two units side by side share it, as soon as a call encloses both.
# Until then the second of those leaves the parameter as it is.
_deferred: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass
class Ties:
    """What a call has to know of the parameters that it shares with units below or beside it."""

    taken: list[nn.Parameter] = field(default_factory=list)  # that it gets from units below
    deferred: set[nn.Parameter] = field(default_factory=set)  # that it leaves to a later call

    def params_to_shard(self, params: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters to shard, of those in the modules that the call manages."""
        own = [param for param in params if param not in self.deferred]
        return own + [param for param in self.taken if param not in set(own)]


@contextmanager
def taken_from_inner_units(
    modules: Sequence[nn.Module], ignored_params: Collection[nn.Parameter] | None
) -> Iterator[Ties]:
    """Takes from units below `modules` what they share with others there.

    They have it back if the body raises.
    """
    ties = Ties()
    below = {module: None for root in modules for module in root.modules()}
    tied = {
        param: owner
        for module in below
        for param in module._parameters.values()
        if param is not None
        and param not in (ignored_params or ())
        and (owner := _owner(param)) is not None
    }
    if not tied or _env.is_strict():
        yield ties
        return
    saved = []
    try:
        for param, (state, group, fsdp_param) in tied.items():
            if all(module in below for module, _ in _param_attributes.registrations(fsdp_param)):
                saved.append((state, state._fsdp_param_groups, group, group.fsdp_params))
                _release(group, fsdp_param, param)
                state._fsdp_param_groups = [g for g in saved[-1][1] if g.fsdp_params]
                ties.taken.append(param)
            else:
                ties.deferred.add(param)
        yield ties
    except BaseException:
        for state, groups, group, fsdp_params in reversed(saved):
            state._fsdp_param_groups = groups
            group.fsdp_params = fsdp_params
        raise
    _deferred.update({_uid(param): param for param in ties.deferred})
    for param in ties.taken:
        _deferred.pop(_uid(param), None)


def _uid(param: nn.Parameter) -> int:
    """The serial number that torch gives a parameter when it is sharded; -1 before."""
    return getattr(param, "_fsdp_orig_uid", -1)


def _owner(param: nn.Parameter) -> tuple[Any, Any, Any] | None:
    """Its state, group and parameter there, if a call in this process has sharded this very one."""
    uid = _uid(param)
    if uid < 0:
        return None
    for ref in list(_composable_state._module_state_mapping.values()):
        state = ref()
        for group in getattr(state, "_fsdp_param_groups", ()):
            for fsdp_param in group.fsdp_params:
                if fsdp_param._orig_param_uid == uid:
                    return state, group, fsdp_param
    return None


def _release(group: Any, fsdp_param: Any, param: nn.Parameter) -> None:
    name = fsdp_param._module_info.param_name
    if group._is_bound or group._training_state.name != "IDLE" or group.is_unsharded:
        raise ValueError(
            f"parameter '{name}' is tied to one in a unit that has been used already: call"
            " fully_shard on all modules before the first forward or unshard()"
        )
    group.fsdp_params = [other for other in group.fsdp_params if other is not fsdp_param]
    fsdp_param._post_load_hook_handle.remove()
    fsdp_param._setattr_on_modules(param)


def check(root: nn.Module) -> None:
    """ValueError if a unit of the root shares a parameter with one outside of it."""
    if not _deferred:
        return
    for name, param in root.named_parameters():
        if _uid(param) in _deferred:
            raise ValueError(
                f"Parameter '{name}' is shared with a parameter already managed by another FSDP"
                " group. Call fully_shard on a module that contains both, after the calls on its"
                " submodules, or use fully_shard([module_a, module_b]) to place them in the same"
                " FSDP group."
            )
