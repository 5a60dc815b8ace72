"""LSTMs on CPU ranks: a call of torch's oneDNN per layer, with memory that no shape tells."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decompositions
from torch.utils._python_dispatch import _disable_current_modes

_LAYER = torch.ops.aten.mkldnn_rnn_layer
_LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward
_GATES = 4
# Steps that are tried to find out what a step takes.
_TRIED = (16, 32)


@contextlib.contextmanager
def one_call_per_layer() -> Iterator[None]:
    """Fake tensors otherwise go step by step where gradients are wanted, which the CPU does not."""
    own = decompositions.select_one_layer_lstm_function

    def select(input: torch.Tensor, hx: Any, params: Any) -> Any:
        return own(input.detach(), hx, params)

    decompositions.select_one_layer_lstm_function = select
    try:
        yield
    finally:
        decompositions.select_one_layer_lstm_function = own


def with_workspace(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The operation's results, with what a layer keeps for backward as large as it is."""
    if func is not _LAYER.default:
        return out
    steps, batch, width = args[0].shape
    size_of = functools.partial(_workspace, batch, width, args[10], args[12], args[0].dtype)
    if steps > _TRIED[1]:
        low, high = (size_of(tried) for tried in _TRIED)
        size = high + (high - low) * (steps - _TRIED[1]) // (_TRIED[1] - _TRIED[0])
    else:
        size = size_of(steps)
    return (*out[:3], out[3].new_empty(size))


@functools.cache
def _workspace(
    batch: int, width: int, hidden: int, has_biases: bool, dtype: torch.dtype, steps: int
) -> int:
    """Bytes; by a layer of real tensors."""
    with _disable_current_modes(), torch.enable_grad():
        weights = [torch.zeros(_GATES * hidden, n, dtype=dtype) for n in (width, hidden)]
        biases = [torch.zeros(_GATES * hidden, dtype=dtype) for _ in range(2)]
        states = [torch.zeros(1, batch, hidden, dtype=dtype) for _ in range(2)]
        inputs = torch.zeros(steps, batch, width, dtype=dtype)
        lstm = 2  # ideep::rnn_kind
        out = _LAYER.default(
            inputs, *weights, *biases, *states, False, [], lstm, hidden, 1, has_biases, False,
            False, True,
        )  # fmt: skip
        return out[3].nbytes


def flop_formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils import flop_counter

    def layer(inputs: Any, weight0: Any, weight1: Any, *rest: Any, **options: Any) -> int:
        steps, batch, _ = inputs
        return 2 * steps * batch * (weight0[0] * weight0[1] + weight1[0] * weight1[1])

    def backward(*args: Any, **options: Any) -> int:
        return 2 * layer(*args, **options)

    return {
        _LAYER: flop_counter.shape_wrapper(layer),
        _LAYER_BACKWARD: flop_counter.shape_wrapper(backward),
    }
