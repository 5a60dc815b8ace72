"""The lists that torch.optim's own code steps, filled with local tensors."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fsdp_c import _env
from fsdp_c._native import _C
from fsdp_c._optim import _dispatch_modes

Lists = tuple[list[Any], ...]


class Members:
    """Which parameters of a group are sharded by fsdp_c, looked up once, and how it is collected.

    What torch's `_init_group` puts into its lists is learned from what it has put there once: later
    steps fill them from the same entries of the state.
    """

    def __init__(self, params: list[Tensor], sharded: set[int]) -> None:
        self.sharded = sharded.intersection(map(id, params))
        self.plan = _C.Params(
            params=params, sharded=self.sharded
        )  # keeps params: the ids stay theirs
        self.is_on_host = all(p.is_cpu for p in params)
        self.only_known_types = all(type(p) in (DTensor, nn.Parameter, Tensor) for p in params)
        self.result: Any = None  # of torch's collecting
        self._keys: tuple[str, ...] | None = None  # of the state, one for each list that is filled
        self._filled: list[int] = []  # these lists
        self._learned_with: Any = None

    def collect(self, optimizer: optim.Optimizer, group: dict[str, Any], lists: Lists) -> bool:
        """Fills the lists as torch would, with local tensors; False: torch has to."""
        if self._keys is None or self._learned_with != _options_of(group):
            return False
        if _dispatch_modes.see_operations() or (_is_listwise(group) and _env.is_strict()):
            return False
        rows = self.plan.collect(state=optimizer.state, keys=self._keys)
        if rows is None:
            return False
        for index, column in zip(self._filled, zip(*rows, strict=True), strict=bool(rows)):
            lists[index][:] = column
        return True

    def learn(self, state: Any, group: dict[str, Any], lists: Lists, result: Any) -> None:
        """From lists of parameters that torch has filled."""
        options = _options_of(group)
        if not lists[0] or self._learned_with == options or not is_stock(state):
            return
        self._learned_with = options
        self.result = result
        self._filled = [i for i, column in enumerate(lists) if column]
        states = [state.get(param, {}) for param in lists[0]]
        keys = [_key_of(lists[i], states) for i in self._filled[2:]]
        is_usual = self._filled[:2] == [0, 1] and result in (False, (False, False))
        self._keys = tuple(keys) if is_usual and None not in keys else None


def is_stock(state: Any) -> bool:
    """Whether nobody else looks at what is read and written."""
    return type(state) in (defaultdict, dict)


def _options_of(group: dict[str, Any]) -> list[Any]:
    """What may decide which lists are filled: switches, and which numbers are above 0."""
    return [
        (type(value), value > 0) if type(value) in (bool, int, float) else type(value)
        for value in group.values()
    ]


def _key_of(column: list[Any], states: list[Any]) -> str | None:
    """The one under which every state has what the column has."""
    if len(column) != len(states):
        return None
    rows = list(zip(column, states, strict=True))
    keys = [key for key in states[0] if all(state.get(key) is value for value, state in rows)]
    return keys[0] if len(keys) == 1 else None


def function_of(cls: type[optim.Optimizer]) -> Callable[..., None]:
    """The arithmetic of its step: a function, which nobody hooks."""
    return vars(sys.modules[cls.__module__])[cls.__name__.lower()]


def localize(
    members: Members, optimizer: optim.Optimizer, group: dict[str, Any], lists: Lists, result: Any
) -> None:
    """Puts local tensors into lists that torch has filled."""
    members.learn(optimizer.state, group, lists, result)
    n_rows = len(lists[0])
    found, columns = _find(group, members.plan, lists)
    if not found:
        return
    torch.autograd.graph.increment_version([lists[0][i] for i in found])
    for column, values in zip((c for c in lists if len(c) == n_rows), columns, strict=True):
        if len(found) == n_rows:
            column[:] = values
        else:
            for i, value in zip(found, values, strict=True):
                column[i] = value


def step_momentum(
    members: Members, optimizer: optim.Optimizer, group: dict[str, Any], lists: Lists, result: Any
) -> None:
    """SGD keeps its buffers under the parameters it is given, so these are stepped here."""
    if group["momentum"] == 0:
        localize(members, optimizer, group, lists, result)
        return
    found, columns = _find(group, members.plan, lists)
    if not found:
        return
    params = [lists[0][i] for i in found]
    torch.autograd.graph.increment_version(params)
    _run_sgd(optimizer, group, columns)
    for param, buffer in zip(params, columns[2], strict=True):
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = DTensor(buffer, param._spec, requires_grad=False)
    is_found = set(found)
    for column in lists:
        column[:] = [value for i, value in enumerate(column) if i not in is_found]


def step_buffers(members: Members, optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """SGD's step where all buffers are there; False: torch has to collect."""
    if group["momentum"] == 0 or group["differentiable"] or _dispatch_modes.see_operations():
        return False
    if _is_listwise(group) and _env.is_strict():
        return False
    rows = members.plan.collect(state=optimizer.state, keys=("momentum_buffer",))
    if rows is None or any(buffer is None for _, _, buffer in rows):
        return False
    _run_sgd(optimizer, group, _columns(rows, 3))
    return True


def _run_sgd(
    optimizer: optim.Optimizer, group: dict[str, Any], columns: Iterable[list[Any]]
) -> None:
    function_of(optim.SGD)(
        *columns,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        fused=group["fused"],
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
    )


def _find(
    group: dict[str, Any], plan: _C.Params, lists: Lists
) -> tuple[list[int], list[list[Any]]]:
    """The rows of `lists` that can be replaced, and column by column what to put there."""
    n_rows = len(lists[0])
    columns = [column for column in lists if len(column) == n_rows]
    rows = plan.locals(zip(*columns, strict=True))
    found = [i for i, row in enumerate(rows) if row is not None]
    if _is_listwise(group) and found:
        # These take lists of one kind only; torch refuses some that would work here.
        n_dtensors = sum(type(param) is DTensor for param in lists[0])
        if n_dtensors > len(found) or _env.is_strict():
            return [], []
    return found, _columns([rows[i] for i in found], len(columns))


def _columns(rows: list[tuple[Any, ...]], n: int) -> list[list[Any]]:
    return [[row[c] for row in rows] for c in range(n)]


def _is_listwise(group: dict[str, Any]) -> bool:
    return bool(group.get("foreach") or group.get("fused"))
