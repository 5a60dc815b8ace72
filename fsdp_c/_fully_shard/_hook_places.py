"""Hooks of modules that come where others were: users' hooks stay before or behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


@contextlib.contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Hooks of forward that are registered inside take the places of those removed inside.

    As many as were removed have to be registered, of each kind and on each of the modules.
    """
    kinds = [(m._forward_pre_hooks, m._forward_hooks) for m in modules]
    ordered = [hooks for pair in kinds for hooks in pair]
    before = [list(hooks) for hooks in ordered]
    yield
    for hooks, keys in zip(ordered, before, strict=True):
        new = iter([key for key in hooks if key not in keys])
        for key in keys:
            hooks.move_to_end(key if key in hooks else next(new))
