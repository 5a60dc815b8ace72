"""A state takes the place of another one: in the modules, and among their hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import STATE_KEY


def take_place(new: Any, old: Any) -> None:
    """Initializes `new` with what `old` was initialized with; users' hooks stay before or behind
    those of the state."""
    modules = old._modules
    with _hooks_kept(modules):
        old._pre_forward_hook_handle.remove()
        old._post_forward_hook_handle.remove()
        for module in modules:
            del _composable_state._module_state_mapping[module]
            states = module.__dict__[STATE_KEY]
            states.update({key: new for key, state in states.items() if state is old})
        new.init(modules, old._device, old._mp_policy, old._auto_reshard_after_forward)


@contextlib.contextmanager
def _hooks_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
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
