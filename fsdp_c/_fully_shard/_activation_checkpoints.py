"""Notices activation checkpoints: their backward runs a module's code, which needs parameters.

A backward may begin inside of a unit. What it reads there is in place; but code that runs again
looks for the parameters in its modules, so the core has to know which forwards will be run again.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils import checkpoint

from fsdp_c._native import _C

_CALLED_BY_EACH = "_get_autocast_kwargs"  # by every checkpoint's forward, reentrant or not


def watch() -> None:
    """Counts checkpoints from now on."""
    original = getattr(checkpoint, _CALLED_BY_EACH, None)
    if original is None or hasattr(original, "_fsdp_c_counts"):
        return

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        _C.count_checkpoint()
        return original(*args, **kwargs)

    counting._fsdp_c_counts = True
    setattr(checkpoint, _CALLED_BY_EACH, counting)
