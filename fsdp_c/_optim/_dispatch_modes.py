"""Modes under which somebody wants to see torch's operations."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def see_operations() -> bool:
    """Whether one is active; a default device is none."""
    if torch._C._len_torch_dispatch_stack() != 0:
        return True
    return torch._C._len_torch_function_stack() != 0 and not all(
        type(mode) is DeviceContext for mode in _get_current_function_mode_stack()
    )
