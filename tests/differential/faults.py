"""Mistakes planted into the tested side, to show that the comparison finds them.

Those of `PATCHES` change how fsdp_c is set up, those of `TAMPERS` what a line has left.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from parity import local

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fsdp_param_group


def dropped_division() -> Any:
    """Gradients are summed, not averaged."""
    original = _fsdp_param_group.FSDPParamGroup.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.gradient_divide_factor = 1.0

    return mock.patch.object(_fsdp_param_group.FSDPParamGroup, "__init__", init)


def missed_cast() -> Any:
    """Parameters are not cast to `param_dtype`."""
    return mock.patch.object(_versions, "compute_dtype", lambda fsdp_param: fsdp_param.orig_dtype)


def wrong_gradient_dtype() -> Any:
    """Gradients reach the shards in the dtype in which they were summed."""
    return mock.patch.object(_versions, "grad_dtype", _versions.reduce_dtype)


def forgotten_accumulate() -> Any:
    """What was held without reduction is lost when reductions are switched on again."""
    original = _fsdp_param_group.FSDPParamGroup.__setattr__

    def setattr_(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name == "reduce_grads" and value is True and self._is_bound:
            self._core_release_gradients()
            for fsdp_param in self.fsdp_params:
                fsdp_param._unsharded_param.grad = None

    return mock.patch.object(_fsdp_param_group.FSDPParamGroup, "__setattr__", setattr_)


def stale_shard(names: dict[str, Any], line: str, before: dict[str, Any]) -> None:
    """One shard misses an optimizer step."""
    if line == "optimizer.step()" and "model" in names:
        name = next(iter(names["shards"]))
        with torch.no_grad():
            local(names["shards"][name]).copy_(before[name])


def leaked_unsharded(names: dict[str, Any], line: str, before: dict[str, Any]) -> None:
    """A unit stays unsharded after backward."""
    if line.startswith("loss = backward"):
        names["model"].unshard()


def doubled_buffer(names: dict[str, Any], line: str, before: dict[str, Any]) -> None:
    """A forward writes to a buffer twice."""
    if line.startswith("out = model("):
        for buffer in names["model"].buffers():
            buffer.mul_(2)


def lost_gradient(names: dict[str, Any], line: str, before: dict[str, Any]) -> None:
    """A gradient of zeros where there is none, as torch leaves it."""
    if line.startswith("loss = backward"):
        for shard in names["shards"].values():
            if shard.grad is None and shard.requires_grad:
                shard.grad = torch.zeros_like(shard)


PATCHES: dict[str, Callable[[], Any]] = {
    fn.__name__: fn
    for fn in (dropped_division, missed_cast, wrong_gradient_dtype, forgotten_accumulate)
}
TAMPERS: dict[str, Callable[..., None]] = {
    fn.__name__: fn for fn in (stale_shard, leaked_unsharded, doubled_buffer, lost_gradient)
}


@contextlib.contextmanager
def installed(fault: str) -> Iterator[None]:
    with PATCHES[fault]() if fault in PATCHES else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def planted(fault: str, side: Any, line: str) -> Iterator[None]:
    """Around a line of the tested side."""
    names = side.names
    before = {}
    if fault in TAMPERS:
        before = {name: local(shard).clone() for name, shard in names.get("shards", {}).items()}
    yield
    if fault in TAMPERS and "shards" in names:
        TAMPERS[fault](names, line, before)
