"""Bytes that an optimizer will keep for a parameter: found out by trying it on a small one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_c import _text
from fsdp_c._fully_shard._param_spec import ParamSpec

# A matrix, since some take nothing else.
_PROBE = (8, 8)


def known_optimizer(given: Any) -> Any:
    """What `StateSize` takes; a name is looked up in ``torch.optim``.

    Raises:
        ValueError, TypeError: no such name, or no optimizer.
    """
    if isinstance(given, str):
        classes = {
            name: value
            for name, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        }
        if given not in classes or given == "Optimizer":
            hint = _text.did_you_mean(given, classes)
            raise ValueError(f"torch.optim has no optimizer {given!r}{hint}")
        return classes[given]
    if given is None or callable(given) or isinstance(given, torch.optim.Optimizer):
        return given
    raise TypeError(
        f"optimizer={given!r}: pass a class such as torch.optim.AdamW, its name, a partial of one,"
        " an optimizer or None"
    )


def shard_numel(row: ParamSpec, n_shards: int) -> int:
    """Elements of a rank's shard, padding included."""
    return row.outer * -(-row.rows // n_shards) * row.inner


class StateSize:
    """Bytes of a rank's state for a parameter. An optimizer that cannot be tried is refused."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        is_made = isinstance(optimizer, torch.optim.Optimizer)
        self.make = _maker_of(optimizer) if is_made else optimizer
        self.known: dict[torch.dtype, tuple[float, int]] = {}

    def __call__(self, row: ParamSpec, n_shards: int) -> int:
        if self.make is None or not row.trainable:
            return 0
        dtype = row.orig
        if dtype not in self.known:
            self.known[dtype] = self._try(dtype)
        per_element, fixed = self.known[dtype]
        return round(shard_numel(row, n_shards) * per_element) + fixed

    def _try(self, dtype: torch.dtype) -> tuple[float, int]:
        probe = nn.Parameter(torch.ones(_PROBE, dtype=dtype))
        probe.grad = torch.ones_like(probe)
        try:
            optimizer = self.make([probe])
            optimizer.step()
            state = optimizer.state[probe].values()
        except Exception as error:  # whatever a class of the user's raises
            raise ValueError(
                f"what {_name_of(self.optimizer)} keeps is not known, since trying it on a {dtype}"
                f" parameter of size {_PROBE} failed ({error}): name a class or a function that"
                " makes an optimizer of a list of parameters, or optimizer=None to count none"
            ) from error
        tensors = [t for t in state if isinstance(t, torch.Tensor)]
        like = [t for t in tensors if t.numel() == probe.numel()]
        rest = [t for t in tensors if t.numel() != probe.numel()]
        return float(sum(t.itemsize for t in like)), sum(t.numel() * t.itemsize for t in rest)


def _maker_of(optimizer: torch.optim.Optimizer) -> Callable[[list[nn.Parameter]], Any]:
    names = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in names}
    return lambda params: type(optimizer)(params, **options)


def _name_of(optimizer: Any) -> str:
    made = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return getattr(made, "__name__", str(made))
