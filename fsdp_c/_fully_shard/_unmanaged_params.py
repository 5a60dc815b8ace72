"""Parameters that are trained beside units while no unit holds them: ranks' copies drift apart.

Nobody averages their gradients, under torch's fully_shard neither. It happens where blocks are
sharded and the model around them is not, and where parameters are added after fully_shard.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_c._fully_shard import _fqns, _fsdp_module
from fsdp_c._optim import _replaced_params

_SHOWN = 3  # names in a warning
_states: weakref.WeakSet[Any] = weakref.WeakSet()  # of all calls of fully_shard
# Parameters that nothing is said about: named before, or ignored on purpose and of no module.
_not_reported: Any = WeakIdKeyDictionary()
# Where the ignored ones are: `to_empty` puts others there, and refuses those with weak references.
_ignored: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()

DRIFT = "held by no FSDP unit: each rank trains a copy of its own, and the copies drift apart"
_ON_PURPOSE = (
    "Where that is meant, or you average them yourself, put them into ignored_params of a"
    " fully_shard call"
)


def watch(state: Any, ignored_params: Iterable[Tensor] | None) -> None:
    """Optimizers are looked at once, at their first step."""
    _states.add(state)
    ignore(state._modules, ignored_params)
    _replaced_params.also(_look)


def ignore(modules: Iterable[nn.Module], params: Iterable[Tensor] | None) -> None:
    """The modules' parameters that a call was told to pass over, or those of other modules."""
    wanted = {id(param): param for param in params or ()}
    _find_ignored((m for top in modules for m in top.modules() if wanted), wanted)
    if wanted.keys() - ignored():
        _find_ignored(_all_modules(), wanted)
    for address in wanted.keys() - ignored():
        _not_reported[wanted[address]] = True


def _find_ignored(modules: Iterable[nn.Module], wanted: Container[int]) -> None:
    for module in modules:
        for name, param in module.__dict__.get("_parameters", {}).items():
            if id(param) in wanted:
                _ignored.setdefault(module, set()).add(name)


def ignored() -> set[int]:
    """Ids of what is now where parameters were ignored."""
    places = [(m.__dict__["_parameters"], names) for m, names in list(_ignored.items())]
    return {id(params.get(name)) for params, names in places for name in names}


def _all_modules() -> list[nn.Module]:
    # A module does not know what it is part of. (`isinstance` would run code of proxies.)
    return [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]


def meshes() -> set[Any]:
    """Of all parameters that units hold."""
    groups = [group for state in list(_states) for group in state._fsdp_param_groups]
    params = [fsdp_param.sharded_param for group in groups for fsdp_param in group.fsdp_params]
    return {param.device_mesh for param in params if isinstance(param, DTensor)}


def _look(optimizer: optim.Optimizer) -> None:
    """Warns of what the optimizer trains on this rank alone."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    alone = [param for param in params if _may_be_alone(param)]
    if not alone or all(_n_ranks(state) == 1 for state in list(_states)):
        return
    held, on_purpose = managed(), ignored()
    alone = [param for param in alone if id(param) not in held | on_purpose]
    if alone:
        _warn_of_those_in_models(alone)
    alone = [param for param in alone if param not in _not_reported and param.grad is not None]
    if alone and any(id(param) in held for param in params):
        _warn_of_others(alone, optimizer)
    _not_reported.update(dict.fromkeys(alone, True))


def _may_be_alone(param: Any) -> bool:
    return (
        isinstance(param, Tensor)
        and not isinstance(param, DTensor)
        and param.requires_grad
        and param not in _not_reported
        # Whoever listens for its gradient may well average it.
        and not (param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))
    )


def _n_ranks(state: Any) -> int:
    return max((g.mesh_info.mesh.size() for g in state._fsdp_param_groups), default=1)


def managed() -> set[int]:
    """Ids of what units hold, sharded and not."""
    managed = set()
    for group in (group for state in list(_states) for group in state._fsdp_param_groups):
        for fsdp_param in group.fsdp_params:
            managed.add(id(fsdp_param.sharded_param))
            managed.add(id(getattr(fsdp_param, "_unsharded_param", None)))
    return managed | _replaced_params.replaced()


# ---- those that are part of a model with units ----


def _warn_of_those_in_models(alone: Sequence[Tensor]) -> None:
    modules = _all_modules()
    for module in modules:
        if isinstance(module, DistributedDataParallel) or _is_torchs_fsdp1(module):
            _not_reported.update(dict.fromkeys(module.parameters(), True))
    wanted = {id(param) for param in alone if param not in _not_reported}
    if not wanted:
        return
    for top in _tops(modules):
        top = _narrowed(top, wanted)
        outer, added = _found_in(top, wanted)
        name = _class_of(top)
        if outer:
            _fsdp_module.warn_user(
                f"{listed(outer)} of {name} {_are(outer)} {DRIFT}. Call fully_shard on the whole"
                f" {name} too, after its blocks and before the optimizer is built. {_ON_PURPOSE}"
            )
        if added:
            _fsdp_module.warn_user(
                f"{listed(added)} of {name} {_are(added)} {DRIFT}. Add parameters before"
                " fully_shard, or call it on the module that was added before the optimizer gets"
                f" its parameters. {_ON_PURPOSE}"
            )


def _tops(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost modules around units of more than one rank."""
    around: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            around.setdefault(id(child), []).append(module)
    todo = [m for state in list(_states) if _n_ranks(state) > 1 for m in state._modules]
    seen = {id(module) for module in todo}
    tops = []
    while todo:
        module = todo.pop()
        holders = around.get(id(module), [])
        if not holders:
            tops.append(module)
        todo += [holder for holder in holders if id(holder) not in seen]
        seen.update(map(id, holders))
    return tops


def _narrowed(top: nn.Module, wanted: set[int]) -> nn.Module:
    """The innermost module that has as many of the wanted parameters, and units in it."""
    inside = wanted.intersection(map(id, top.parameters()))
    for child in () if isinstance(top, FSDPModule) else top.children():
        has_units = any(isinstance(m, FSDPModule) for m in child.modules())
        if has_units and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            if inside and inside <= set(map(id, child.parameters())):
                return _narrowed(child, wanted)
    return top


def _is_torchs_fsdp1(module: nn.Module) -> bool:
    is_fsdp1 = isinstance(module, FullyShardedDataParallel)
    return is_fsdp1 and getattr(module, "_handle", None) is not None


def _found_in(top: nn.Module, wanted: set[int]) -> tuple[list[str], list[str]]:
    """Names of the wanted parameters that no unit is around, and of those in units; once."""
    found: tuple[list[str], list[str]] = [], []

    def search(module: nn.Module, path: str, is_in_unit: bool) -> None:
        is_in_unit = is_in_unit or isinstance(module, FSDPModule)
        for name, param in module._parameters.items():
            if param is not None and id(param) in wanted and param not in _not_reported:
                _not_reported[param] = True
                found[is_in_unit].append(_fqns.clean(path + name))
        for name, child in module._modules.items():
            if child is not None:
                search(child, f"{path}{name}.", is_in_unit)

    search(top, "", False)
    return found


# ---- others that are stepped together with sharded ones ----


def _warn_of_others(alone: Sequence[Tensor], optimizer: optim.Optimizer) -> None:
    sizes = [str(tuple(param.shape)) for param in alone]
    what = f"{len(alone)} parameters" if len(alone) > 1 else "a parameter"
    _fsdp_module.warn_user(
        f"{type(optimizer).__name__} steps sharded parameters and {what} (size"
        f" {', '.join(sizes[:_SHOWN])}{', ...' * (len(sizes) > _SHOWN)}) that no model with units"
        " has, so each rank trains a copy of its own and the copies drift apart. Make them"
        f" parameters of the model before fully_shard. {_ON_PURPOSE}"
    )


# ---- text ----


def listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return f"parameter{'s' * (len(names) > 1)} {shown}{f' and {rest} more' if rest > 0 else ''}"


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _class_of(module: nn.Module) -> str:
    """As the user wrote it: fully_shard puts a class in front."""
    cls = type(module)
    return cls.__mro__[2].__name__ if isinstance(module, FSDPModule) else cls.__name__
