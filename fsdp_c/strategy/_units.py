"""Which modules of a model become units: rules, torch's policies, and repeated blocks by default.

A rule gives each matching module the options of its unit (empty: those of the whole call).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy

Found = dict[nn.Module, dict[str, Any]]

# In bytes; a plain number counts parameters.
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTORS |= {f"{name}i": 1 << (10 * i) for i, name in enumerate("kmgt", 1)}

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Units(list[nn.Module]):
    """Modules, innermost first, the root not among them; `options` has what a policy said of one.

    ``options[module]`` are the arguments that a ``CustomPolicy`` returned for it.

    Examples:
        >>> units = fsdp_c.find_units(whole_model, Block)
        >>> print(len(units), units.options)
    """

    def __init__(self, modules: Iterable[nn.Module], options: Found) -> None:
        super().__init__(modules)
        self.options = options


def find_units(model: nn.Module, units: Any, *, ignored: Iterable[Any] = ()) -> Units:
    """The modules of ``model`` that ``units`` chooses, innermost first, without the model itself.

    Modules without parameters, and containers that cannot run (``nn.ModuleList``), are left out.

    Args:
        units: one of

            - ``"auto"``: the repeated blocks (outermost children of one class in a list; those that
              a Hugging Face model names in ``_no_split_modules``), modules that several of them
              share, and each embedding or output layer outside of them that is as large as a block
              and not tied;
            - a class, the name of one, or several of these; modules of the model;
            - a number: units of at least so many parameters; ``"200MB"``, ``"1GiB"``: bytes;
            - ``f(module) -> bool``, or a dict of options for the unit;
            - torch's ``ModuleWrapPolicy``, ``CustomPolicy``, ``always_wrap_policy``, a partial of
              its ``*_auto_wrap_policy``, any ``f(module, recurse, nonwrapped_numel)``;
            - None or an empty list: no units beside the model.
        ignored: modules (with all below them) and parameters to pass over.

    Raises:
        ValueError, TypeError: a rule that matches nothing, or is none; "auto" may match nothing.

    Examples:
        >>> units = fsdp_c.find_units(whole_model, "auto")
        >>> print([type(unit).__name__ for unit in units])
    """
    ignored_modules, ignored_params = _ignored(model, ignored)
    found = _matching(model, units, ignored_modules, ignored_params)
    order = list(dict.fromkeys(_post_order(model, ignored_modules)))
    chosen = [
        module
        for module in order
        if module in found
        and module is not model
        and _can_run(module)
        and any(param not in ignored_params for param in module.parameters())
    ]
    if not chosen and not _may_be_empty(units):
        classes = Counter(_name(module) for module in order if _has_params(module))
        there = ", ".join(name for name, _ in classes.most_common(8)) or "no module"
        raise ValueError(
            f"units={_shown(units)} matches no module of {_name(model)} that could be a unit: name"
            f' a class that it has ({there}), a smaller size, or units="auto"'
        )
    return Units(chosen, {module: found[module] for module in chosen if found[module]})


def _may_be_empty(units: Any) -> bool:
    return units is None or units == "auto" or (isinstance(units, list | tuple) and not units)


def _matching(
    model: nn.Module, units: Any, ignored: set[nn.Module], ignored_params: set[nn.Parameter]
) -> Found:
    modules = [module for module in model.modules() if module not in ignored]
    if units is None:
        return {}
    if isinstance(units, str):
        if units == "auto":
            return _automatic(model, modules)
        if size := _SIZE.fullmatch(units.strip()):
            n_bytes = float(size[1]) * _FACTORS[(size[2] or "").lower()]
            if n_bytes < 1:
                raise ValueError(f"units={units!r}: a unit has at least one byte")
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=n_bytes)
            return _recursive(model, policy, ignored, ignored_params, _n_bytes)
        return _by_class(modules, [units])
    if isinstance(units, int | float) and not isinstance(units, bool):
        if units < 1:
            raise ValueError(f"units={units}: a unit has at least one parameter")
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=units)
        return _recursive(model, policy, ignored, ignored_params, torch.Tensor.numel)
    if isinstance(units, type):
        return _by_class(modules, [units])
    if isinstance(units, _Policy):
        return dict(units._run_policy(model, ignored, {}))
    if callable(units) and not isinstance(units, nn.Module):
        if _is_predicate(units):
            return _by_predicate(modules, units)
        return _recursive(model, units, ignored, ignored_params, torch.Tensor.numel)
    if isinstance(units, Iterable) and not isinstance(units, dict | torch.Tensor):
        return _by_class(modules, list(units))
    raise TypeError(
        f"units={_shown(units)} is no rule for units: use classes, class names, a size,"
        ' a predicate, a policy of torch or "auto"'
    )


# ---- rules ----


def _by_class(modules: list[nn.Module], wanted: list[Any]) -> Found:
    """Of classes, names of classes, and modules; each of them has to be there."""
    found: Found = {}
    for one in wanted:
        if isinstance(one, nn.Module):
            matches = [module for module in modules if module is one]
        elif isinstance(one, type):
            matches = [module for module in modules if isinstance(module, one)]
        elif isinstance(one, str):
            matches = [module for module in modules if one in _class_names(module)]
        else:
            raise TypeError(f"units: {_shown(one)} is neither a class, nor a name, nor a module")
        if not matches and len(wanted) > 1:
            raise ValueError(
                f"units: {_shown(one)} matches no module of {_name(modules[0])}: leave it out, or"
                " correct it"
            )
        found.update(dict.fromkeys(matches, {}))
    return found


def _by_predicate(modules: list[nn.Module], predicate: Callable[[nn.Module], Any]) -> Found:
    found: Found = {}
    for module in modules:
        answer = predicate(module)
        if not isinstance(answer, bool | dict):
            raise ValueError(
                f"units: the predicate returned {answer!r} for a {_name(module)}: return True,"
                " False or a dict of options"
            )
        if answer:
            found[module] = dict(answer) if isinstance(answer, dict) else {}
    return found


def _recursive(
    model: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    size_of: Callable[[torch.Tensor], int],
) -> Found:
    """As FSDP1 asks such policies: on the way down, and up with what is in no unit yet."""
    found: Found = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        visited.add(module)
        total = sum(size_of(p) for p in module.parameters() if p not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        inside = sum(
            visit(child)
            for child in module.children()
            if child not in ignored and child not in visited
        )
        if module is not model and policy(
            module=module, recurse=False, nonwrapped_numel=total - inside
        ):
            found[module] = {}
            return total
        return inside

    visit(model)
    return found


def _automatic(model: nn.Module, modules: list[nn.Module]) -> Found:
    named = getattr(model, "_no_split_modules", None) or ()
    blocks = [m for m in modules if m is not model and _class_names(m) & set(named)]
    blocks = _outermost(blocks) or _repeated(modules)
    if not blocks:
        return {}
    inside = {below for block in blocks for below in block.modules()}
    smallest = min(_n_params(block) for block in blocks)
    uses = Counter(p for m in modules for p in m._parameters.values() if p is not None)
    ends = [
        module
        for module in modules
        if isinstance(module, nn.Embedding | nn.Linear)
        and module is not model
        and module not in inside
        and _n_params(module) >= smallest
        and all(uses[param] == 1 for param in module.parameters())
    ]
    blocks_of = Counter(m for block in blocks for m in block.modules())
    shared = [m for m in modules if blocks_of[m] > 1 and _can_run(m) and _has_params(m)]
    return dict.fromkeys([*_outermost(shared), *blocks, *ends], {})


def can_be_split(module: nn.Module, units: Iterable[nn.Module]) -> bool:
    """Whether what it has outside of the units are repeated blocks, none of them most of it."""
    own = list(_post_order(module, set(units) - {module}))
    sizes = [sum(map(_n_bytes, block.parameters())) for block in _repeated(own)]
    params = {p: None for m in own for p in m._parameters.values() if p is not None}
    return bool(sizes) and 2 * max(sizes) <= sum(map(_n_bytes, params))


def _repeated(modules: list[nn.Module]) -> list[nn.Module]:
    """Children of one class in a container: of composite classes, or else single layers."""
    composite: list[nn.Module] = []
    layers: list[nn.Module] = []
    for container in modules:
        if not isinstance(container, _CONTAINERS):
            continue
        children = [c for c in container.children() if _can_run(c) and _has_params(c)]
        counts = Counter(type(child) for child in children)
        for child in children:
            if counts[type(child)] > 1:
                has_parts = any(_has_params(part) for part in child.children())
                (composite if has_parts else layers).append(child)
    known = set(modules)
    return [m for m in _outermost(composite or layers) if m in known]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    below = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in dict.fromkeys(modules) if module not in below]


# ---- what a module is ----


def listed(ignored: Iterable[Any]) -> list[Any]:
    """What is to be passed over, once; TypeError of what iterates over something else."""
    if isinstance(ignored, str | torch.Tensor | nn.Module):
        raise TypeError(f"ignored={_shown(ignored)}: pass a list of modules and parameters")
    return list(ignored)


def _ignored(model: nn.Module, ignored: Iterable[Any]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    there = {*model.modules(), *model.parameters()}
    for one in listed(ignored):
        if isinstance(one, nn.Module | nn.Parameter) and one not in there:
            raise ValueError(
                f"ignored: {_shown(one)} is not in {_name(model)}: pass modules and parameters of"
                " the model that is sharded"
            )
        if isinstance(one, nn.Module):
            modules.update(one.modules())
            params.update(one.parameters())
        elif isinstance(one, nn.Parameter):
            params.add(one)
        else:
            raise TypeError(f"ignored: {_shown(one)} is neither a module nor a parameter")
    return modules, params


def _post_order(module: nn.Module, ignored: set[nn.Module]) -> Iterator[nn.Module]:
    visited = {module}

    def visit(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if child not in visited and child not in ignored:
                visited.add(child)
                yield from visit(child)
        yield parent

    return visit(module)


def _can_run(module: nn.Module) -> bool:
    """fully_shard refuses lists and dicts of modules unless they define a forward."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_list or type(module).forward is not nn.Module.forward


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _n_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _class_names(module: nn.Module) -> set[str]:
    classes = type(module).__mro__
    names = {cls.__name__ for cls in classes}
    return names | {f"{cls.__module__}.{cls.__qualname__}" for cls in classes}


def _name(module: nn.Module) -> str:
    """The class that the user wrote, also of a sharded module."""
    cls = type(module)
    return cls.__mro__[2].__name__ if isinstance(module, FSDPModule) else cls.__name__


def _is_predicate(function: Callable[..., Any]) -> bool:
    """Whether it takes a module alone; otherwise it is asked as FSDP1's policies are."""
    try:
        params = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return True
    if any(p.name == "recurse" or p.kind is p.VAR_KEYWORD for p in params):
        return False
    required = [p for p in params if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return len(required) <= 1


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if not isinstance(value, nn.Module) else _name(value)
