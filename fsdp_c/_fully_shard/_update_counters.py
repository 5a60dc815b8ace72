"""Counts the steps of optimizers, of each for the units whose shards it holds.

Ranks whose shards have seen different numbers of steps are out of step: the core compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, compiler, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_c._native import _C

_units: weakref.WeakSet[Any] = weakref.WeakSet()
_n_watched = 0


class _Steps:
    """Of one optimizer: its counter, and what it held when its units were found."""

    def __init__(self) -> None:
        self.counter = _C.StepCounter()
        self.held: Any = None


class _Index:
    """The unit of each shard, by the shard's id, as of some time."""

    def __init__(self) -> None:
        self.n_watched = -1
        self.units: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def renew(self) -> None:
        self.n_watched = _n_watched
        self.units.clear()
        for unit in _units:
            for fsdp_param in unit.fsdp_params:
                self.units[id(fsdp_param.sharded_param)] = unit

    def find(self, param: Tensor) -> Any:
        """None if it is no shard of a unit; shards are replaced now and then."""
        unit = self.units.get(id(param))
        known = unit is not None and any(p.sharded_param is param for p in unit.fsdp_params)
        return unit if known else None


_steps: weakref.WeakKeyDictionary[optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
_index = _Index()


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
    steps = _steps.get(optimizer)
    if steps is None:
        steps = _steps[optimizer] = _Steps()
    groups = optimizer.param_groups
    held = _n_watched, len(groups), len(groups[-1]["params"]) if groups else 0
    if steps.held != held:
        steps.held = held
        for unit in _units_of([param for group in groups for param in group["params"]]):
            unit._core_follow(steps.counter)
    steps.counter.count()


def _units_of(params: list[Tensor]) -> list[Any]:
    if _index.n_watched != _n_watched:
        _index.renew()
    found = [_index.find(param) for param in params]
    if any(f is None and isinstance(p, DTensor) for f, p in zip(found, params, strict=True)):
        _index.renew()
        found = [_index.find(param) for param in params]
    return list({id(unit): unit for unit in found if unit is not None}.values())
