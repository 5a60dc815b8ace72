"""Parameters that no forward uses any more, and the error for an optimizer that holds one.

torch's optimizers skip parameters without a gradient, so such a script would train nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, compiler, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_replaced: Any = WeakIdKeyDictionary()  # parameter -> (its name, what replaced it)
_version = 0  # of _replaced
_unsharded: list[Callable[[], Iterable[tuple[Tensor, str]]]] = []
_others: list[Callable[[optim.Optimizer], None]] = []
_checked: weakref.WeakKeyDictionary[optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def note(param: Tensor, name: str, by: str) -> None:
    """Remembers that `param` is not trained from now on."""
    global _version
    _replaced[param] = name, by
    _version += 1


def forget(param: Tensor) -> None:
    """`param` is back in its place."""
    _replaced.pop(param, None)


def watch(unsharded: Callable[[], Iterable[tuple[Tensor, str]]]) -> None:
    """Optimizers are checked at their first step, and when parameters were replaced since.

    `unsharded` lists the unsharded parameters and their names.
    """
    if not _unsharded:
        _unsharded.append(unsharded)
        register_optimizer_step_pre_hook(_before_step)


def also(look: Callable[[optim.Optimizer], None]) -> None:
    """`look` is called with an optimizer whenever one is checked."""
    if look not in _others:
        _others.append(look)


def replaced() -> set[int]:
    """Ids of what `note` was called with."""
    return {id(param) for param in _replaced}


def _before_step(optimizer: optim.Optimizer, *_: Any) -> None:
    if compiler.is_compiling():
        return
    state = _version, len(optimizer.param_groups)
    if _checked.get(optimizer) != state:
        _check(optimizer)
        for look in _others:
            look(optimizer)
        _checked[optimizer] = state


def _check(optimizer: optim.Optimizer) -> None:
    """RuntimeError if the step would leave a parameter of a sharded model untrained."""
    unsharded = {id(param): name for param, name in _unsharded[0]()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None or not param.requires_grad:  # trained elsewhere, or never
                continue
            if id(param) in unsharded:
                name, by = unsharded[id(param)], "is only its unsharded copy during a step"
            elif param in _replaced:
                name, by = _replaced[param]
            else:
                continue
            raise RuntimeError(
                f"{type(optimizer).__name__} holds parameter '{name}' in a form that {by}; a step"
                " would not change the model. Build the optimizer after fully_shard and after"
                " loading, from model.parameters() while the model is sharded (model.reshard())"
            )
