"""What `shard` chose for a model, remembered with it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from fsdp_c.strategy._strategies import Strategy


@dataclass(frozen=True)
class Choice:
    """The strategy of a model, and the calls that it came to."""

    strategy: Strategy
    calls: tuple[str, ...]  # as the user could have written them


_choices: weakref.WeakKeyDictionary[nn.Module, Choice] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, choice: Choice) -> None:
    _choices[model] = choice


def choice_of(model: nn.Module) -> Choice | None:
    """What `shard` chose for the model; None if it was sharded by hand."""
    return _choices.get(model)
