"""torch.optim's element-wise optimizers see the local tensors of sharded parameters.

An element-wise update of a DTensor whose gradient and state have its placements is the same update
of the local tensors, without the dispatch. The optimizers' `_init_group` collects the tensors of a
step in lists; here the lists get the local tensors. Parameter groups and state are never touched,
so that everyone who looks, at any moment, sees DTensors.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from fsdp_c import _env, _stale

# By exact type: what a subclass does with parameters is not known.
CLASSES: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

_units: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: dict[type[optim.Optimizer], Callable[..., Any]] = {}


class _Members:
    """Which parameters of a group are sharded by fsdp_c; looked up once."""

    def __init__(self, params: list[Tensor], ids: list[int]) -> None:
        sharded = {id(p.sharded_param) for unit in _units for p in unit.fsdp_params}
        self.ids = ids
        self.sharded = sharded.intersection(ids)
        self.params = params  # kept, so that the ids stay theirs


_members: weakref.WeakKeyDictionary[optim.Optimizer, dict[int, _Members]] = (
    weakref.WeakKeyDictionary()
)


def watch(units: Iterable[Any]) -> None:
    """Lets optimizers see the local tensors of these units' parameters."""
    _units.update(units)
    _install()
    _stale.watch(_unsharded)


def _unsharded() -> Iterable[tuple[Tensor, str]]:
    for unit in _units:
        for fsdp_param in unit.fsdp_params:
            if hasattr(fsdp_param, "_unsharded_param"):
                yield fsdp_param._unsharded_param, fsdp_param._name


def _install() -> None:
    for cls in CLASSES:
        original = cls.__dict__.get("_init_group")
        if cls in _originals or original is None:  # AdamW has Adam's
            continue
        _originals[cls] = original
        cls._init_group = _replacement(cls, original)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Gives torch.optim's classes back as they were, until the next fully_shard."""
    for cls, original in _originals.items():
        cls._init_group = original  # type: ignore[attr-defined]
    _originals.clear()
    _members.clear()


def _replacement(cls: type[optim.Optimizer], original: Callable[..., Any]) -> Callable[..., Any]:
    localize = _step_momentum if cls is optim.SGD else _localize

    @functools.wraps(original)
    def _init_group(
        self: optim.Optimizer, group: dict[str, Any], *lists: list[Any], **named: list[Any]
    ) -> Any:
        result = original(self, group, *lists, **named)
        if not named and type(self) in CLASSES and not torch.compiler.is_compiling():
            sharded = _sharded_of(self, group)
            if sharded and not group["differentiable"]:
                localize(self, group, sharded, lists)
        return result

    return _init_group


def _sharded_of(optimizer: optim.Optimizer, group: dict[str, Any]) -> set[int]:
    params = group["params"]
    ids = list(map(id, params))
    known = _members.setdefault(optimizer, {})
    members = known.get(id(group))
    if members is None or members.ids != ids:
        members = known[id(group)] = _Members(list(params), ids)
    return members.sharded


def _local(tensor: Any, spec: Any, shape: torch.Size) -> Tensor | None:
    """The tensor's local part if it is laid out as `spec` says."""
    if type(tensor) is not DTensor:
        return None
    own = tensor._spec
    if own is not spec and (own.mesh != spec.mesh or own.placements != spec.placements):
        return None
    local = tensor._local_tensor
    is_plain = type(local) is Tensor and local.device.type == "cpu" and local.shape == shape
    return local if is_plain else None


def _locals(values: tuple[Any, ...]) -> list[Any] | None:
    """Local tensors of a parameter, its gradient and state; None if one is laid out otherwise.

    Scalars of the state (a step, a product) and what is missing stay as they are.
    """
    spec = values[0]._spec
    if any(placement.is_partial() for placement in spec.placements):
        return None
    shape = values[0]._local_tensor.shape
    result = []
    for i, value in enumerate(values):
        if i < 2 or type(value) is DTensor:
            local = _local(value, spec, shape)
            if local is None:
                return None
            result.append(local)
        elif value is None or (isinstance(value, Tensor) and value.dim() == 0):
            result.append(value)
        else:
            return None
    return result if result[0].dtype == result[1].dtype else None


def _find(
    group: dict[str, Any], sharded: set[int], lists: tuple[list[Any], ...]
) -> dict[int, list[Any]]:
    """The rows of `lists` that can be replaced, with what to put there."""
    n_rows = len(lists[0])
    filled = [column for column in lists if len(column) == n_rows]
    found = {}
    for i, row in enumerate(zip(*filled, strict=True)):
        if id(row[0]) in sharded:
            row_locals = _locals(row)
            if row_locals is not None:
                found[i] = row_locals
    is_listwise = bool(group.get("foreach") or group.get("fused"))
    if is_listwise:
        # These take lists of one kind only; torch refuses some that would work here.
        n_dtensors = sum(type(param) is DTensor for param in lists[0])
        if n_dtensors > len(found) or _env.is_strict():
            return {}
    return found


def _localize(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    sharded: set[int],
    lists: tuple[list[Any], ...],
) -> None:
    found = _find(group, sharded, lists)
    if not found:
        return
    n_rows = len(lists[0])
    filled = [column for column in lists if len(column) == n_rows]
    torch.autograd.graph.increment_version([lists[0][i] for i in found])
    for i, row in found.items():
        for column, value in zip(filled, row, strict=True):
            column[i] = value


def _step_momentum(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    sharded: set[int],
    lists: tuple[list[Any], ...],
) -> None:
    """SGD keeps its buffers under the parameters it is given, so these are stepped here."""
    if group["momentum"] == 0:
        _localize(optimizer, group, sharded, lists)
        return
    found = _find(group, sharded, lists)
    if not found:
        return
    params = [lists[0][i] for i in found]
    columns = [list(column) for column in zip(*found.values(), strict=True)]
    torch.autograd.graph.increment_version(params)
    sys.modules[optim.SGD.__module__].sgd(
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
    for param, buffer in zip(params, columns[2], strict=True):
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = DTensor(buffer, param._spec, requires_grad=False)
    for column in lists:
        column[:] = [value for i, value in enumerate(column) if i not in found]
