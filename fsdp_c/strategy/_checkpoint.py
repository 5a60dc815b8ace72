"""Activation checkpointing of modules, with state-dict keys as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed._composable import checkpoint

from fsdp_c.strategy._units import find_units


def modules_for(
    model: nn.Module, rule: Any, units: list[nn.Module], ignored: Iterable[Any]
) -> list[nn.Module]:
    """What to checkpoint: for True the units that have parts, otherwise what the rule finds."""
    if rule is None or rule is False:
        return []
    if rule is not True:
        try:
            return list(find_units(model, rule, ignored=ignored))
        except (ValueError, TypeError) as error:  # which begins with the argument's name
            said = re.sub(r"\bunits(?=[=:])", "checkpoint", str(error)).replace('"auto"', "True")
            raise type(error)(said) from None
    if not units:
        raise ValueError(
            "checkpoint=True recomputes unit by unit, but the model is one unit: choose units, or"
            " name the classes to checkpoint"
        )
    composite = [unit for unit in units if any(True for _ in unit.children())]
    return composite or list(units)


def apply(modules: Iterable[nn.Module]) -> None:
    """Drops activations in forward and computes them again in backward; without reentry."""
    for module in modules:
        checkpoint(module)
