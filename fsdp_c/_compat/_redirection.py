"""Makes torch's own fully_shard and FSDP1's class, the very objects, run another implementation."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any

# What torch's functions had before: (the decorated function, the attribute `state`).
_replaced: dict[Any, tuple[Any, Any]] = {}


def decorated(function: Any) -> CellType | None:
    """Where a decorator of torch keeps the function `func` that its wrapper calls."""
    return _cell(function, "func")


def state_class(function: Any) -> CellType | None:
    """Where the decorator keeps the class of the states that it makes."""
    return _cell(function, "state_cls")


def _cell(function: Any, name: str) -> CellType | None:
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)] if name in names else None


def redirect(function: Any, implementation: Callable[..., Any]) -> None:
    """From now on `function`, torch's fully_shard, calls `implementation`.

    Whoever holds the function (default arguments, closures, `functools.partial`) gets it too.
    Under a torch whose decorator is built differently only names can be replaced.
    """
    cell = decorated(function)
    if cell is None:
        return
    original = function.__wrapped__

    def fully_shard(module: Any, *args: Any, **options: Any) -> Any:
        _unmark(module, fully_shard)
        return implementation(module, *args, **options)

    def state(module: Any) -> Any:
        return _states(module).get(original)

    _replaced.setdefault(function, (cell.cell_contents, function.state))
    cell.cell_contents = fully_shard
    function.state = state


def restore(function: Any) -> None:
    """Undoes `redirect`."""
    if function in _replaced:
        cell = decorated(function)
        assert cell is not None
        cell.cell_contents, function.state = _replaced.pop(function)


def redirect_class(cls: Any, implementation: Callable[[], type]) -> None:
    """From now on `cls(...)`, torch's FSDP1, makes an object of the subclass that is returned.

    Who holds the class has the new one too: objects are instances of both. A user's subclass gets
    the implementation between itself and torch's class.
    """
    between: dict[type, type] = {}

    def new(made: type, *args: Any, **options: Any) -> Any:
        target = implementation()
        if made is cls:
            made = target
        elif not issubclass(made, target):
            if made not in between:
                names = {"__module__": made.__module__, "__qualname__": made.__qualname__}
                between[made] = type(made.__name__, (made, target), names)
            made = between[made]
        return object.__new__(made)

    cls.__new__ = new


def restore_class(cls: Any) -> None:
    """Undoes `redirect_class`. (Without an own __new__ Python would refuse the arguments.)"""
    cls.__new__ = lambda made, *args, **options: object.__new__(made)


def _states(module: Any) -> dict[Any, Any]:
    # Late: torch's import is for the user's script to time.
    from torch.distributed._composable.contract import STATE_KEY

    return module.__dict__.setdefault(STATE_KEY, {})


def _unmark(module: Any, mark: Any) -> None:
    """Takes away what the decorator has noted on the modules: the implementation does so anew."""
    from torch import nn
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for member in [module] if isinstance(module, nn.Module) else module:
        if _states(member).pop(mark, None) is not None:
            member.__dict__[REGISTRY_KEY].pop(mark.__name__)
        for key in (STATE_KEY, REGISTRY_KEY):
            if not member.__dict__.get(key, True):
                del member.__dict__[key]
