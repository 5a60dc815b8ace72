"""Inputs of compiled units that a collective has not finished."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fsdp_c._compat import _versions


class _Waited(torch.autograd.Function):
    """The plain tensor in an AsyncCollectiveTensor, with that one's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> torch.Tensor:
        inner = tensor.trigger_wait()
        return inner.view_as(inner)  # a tensor of its own: autograd writes to it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile has made of another module."""
    dynamo = sys.modules.get("torch._dynamo")  # whose import takes seconds
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def wait_for(state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, those waited for that need gradients, which torch.compile would lose."""
    tensors = _versions.collect_grad_tensors((args, kwargs))
    plain = [_Waited.apply(t) if type(t) is AsyncCollectiveTensor else t for t in tensors]
    return _versions.replace_grad_tensors((args, kwargs), iter(plain))
