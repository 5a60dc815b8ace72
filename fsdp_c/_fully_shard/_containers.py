"""Tensors in containers of any kind: casts, which keep types and attributes, and what is seen."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def apply_to_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` rebuilt with `function` of its tensors, in the containers that torch opens.

    Unlike torch's function it keeps the types and attributes of dicts, lists and tuples of derived
    classes, casts packed sequences, and takes dataclasses with fields that are not arguments.
    """

    def apply(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return _dataclass(x, {f.name: apply(getattr(x, f.name)) for f in dataclasses.fields(x)})
        if isinstance(x, PackedSequence):
            return type(x)(apply(x.data), *x[1:])
        if isinstance(x, dict):
            changed = copy.copy(x)
            for key, item in x.items():
                changed[key] = apply(item)
            return changed
        if isinstance(x, list):
            changed = copy.copy(x)
            changed[:] = map(apply, x)
            return changed
        if isinstance(x, tuple):
            rebuilt = type(x)(*map(apply, x)) if hasattr(x, "_fields") else type(x)(map(apply, x))
            getattr(rebuilt, "__dict__", {}).update(getattr(x, "__dict__", {}))
            return rebuilt
        if isinstance(x, set):
            return type(x)(map(apply, x))
        return x

    return apply(value)


def shows_all_tensors(value: Any) -> bool:
    """Whether torch's traversal comes by all tensors that are reachable from `value`."""
    others = getattr(value, "__dict__", {}).keys()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return others <= set(names) and all(shows_all_tensors(getattr(value, n)) for n in names)
    if isinstance(value, (list, tuple)):
        return not others and all(map(shows_all_tensors, value))
    if isinstance(value, dict):
        return not others and all(map(shows_all_tensors, value.values()))
    return isinstance(value, (Tensor, int, float, complex, str, bytes, type(None)))


def _dataclass(x: Any, fields: dict[str, Any]) -> Any:
    if all(field.init for field in dataclasses.fields(x)):
        return dataclasses.replace(x, **fields)
    changed = copy.copy(x)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)  # frozen ones too
    return changed
