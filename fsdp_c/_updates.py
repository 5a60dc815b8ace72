"""Counts the steps of optimizers, of each for the units whose shards it holds.

Ranks whose shards have seen different numbers of steps are out of step: the core compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import compiler, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_c._native import _C

_KNOWN = "_fsdp_c_steps"  # an attribute of optimizers, which pickles and copies do not see

_units: weakref.WeakSet[Any] = weakref.WeakSet()
_n_watched = 0


class _Steps:
    """Of one optimizer: its counter, and what it held when its units were found."""

    def __init__(self) -> None:
        self.counter = _C.StepCounter()
        self.held: Any = None


def watch(units: Iterable[Any]) -> None:
    """Counts steps over these units' shards from now on."""
    global _n_watched
    if not _n_watched:
        register_optimizer_step_post_hook(_after_step)
    _n_watched += 1
    _units.update(units)


def _after_step(optimizer: optim.Optimizer, *_: Any) -> None:
    if compiler.is_compiling():
        return
    steps = optimizer.__dict__.get(_KNOWN)
    if steps is None:
        steps = optimizer.__dict__[_KNOWN] = _Steps()
    groups = optimizer.param_groups
    held = _n_watched, len(groups), len(groups[-1]["params"]) if groups else 0
    if steps.held != held:
        steps.held = held
        _follow(optimizer, steps.counter)
    steps.counter.count()


def _follow(optimizer: optim.Optimizer, counter: Any) -> None:
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for unit in _units:
        if any(id(p.sharded_param) in params for p in unit.fsdp_params):
            unit._core_follow(counter)
