"""What the first method of an all-gather extension returns is checked before it is gathered."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_c import _env
from fsdp_c._comm import _process_group, _rendezvous

_PRE = "fsdp_pre_all_gather"


@contextlib.contextmanager
def checked(fsdp_param: Any) -> Iterator[None]:
    """While torch's code asks the parameter's shard for what to gather."""
    inner = fsdp_param._sharded_local_tensor
    method = getattr(inner, _PRE, None)
    if method is None:
        yield
        return

    @functools.wraps(method)
    def pre(*args: Any) -> tuple[list[torch.Tensor], Any]:
        result, error = None, ""
        try:
            result = _validated(fsdp_param, method(*args))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            _agree(fsdp_param, None, error)
            raise
        _agree(fsdp_param, result[0], "")
        return result

    attached = inner.__dict__.get(_PRE)
    setattr(inner, _PRE, pre)
    try:
        yield
    finally:
        if attached is None:
            delattr(inner, _PRE)
        else:
            setattr(inner, _PRE, attached)


def _validated(fsdp_param: Any, result: Any) -> tuple[list[torch.Tensor], Any]:
    """Inputs and metadata; tensors that are not contiguous are copied, or refused as by torch."""
    who = f"{_PRE} of parameter '{fsdp_param._name}'"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"{who} returned a {type(result).__name__}: return a tuple of the inputs of the"
            " all-gather, themselves a tuple of tensors, and of what fsdp_post_all_gather is to get"
        )
    inputs, metadata = result
    if not isinstance(inputs, tuple | list) or not all(
        isinstance(tensor, torch.Tensor) for tensor in inputs
    ):
        raise TypeError(
            f"{who} returned a {type(inputs).__name__} as inputs of the all-gather: return a tuple"
            " of tensors, also if it is only one"
        )
    if not inputs:
        raise ValueError(f"{who} returned no inputs: an all-gather needs at least one tensor")
    placement, size = fsdp_param.fsdp_placement, fsdp_param.sharded_size
    if getattr(placement, "dim", 0) > 0 and any(tensor.size() != size for tensor in inputs):
        raise ValueError(
            f"{who} returned inputs of the sizes {[tuple(tensor.size()) for tensor in inputs]}."
            f" The parameter is sharded on dim {placement.dim}, where gathered inputs can only be"
            f" put together if each has the size of the shard, {tuple(size)}"
        )
    _check_padding(fsdp_param, who, inputs)
    if _env.is_strict() and not all(tensor.is_contiguous() for tensor in inputs):
        raise RuntimeError(f"{who} returned a tensor that is not contiguous, which torch refuses")
    return [tensor.contiguous() for tensor in inputs], metadata


def _check_padding(fsdp_param: Any, who: str, inputs: list[torch.Tensor]) -> None:
    """Torch's own check, which the ranks that need padding would fail alone."""
    inner, padded = fsdp_param._sharded_local_tensor, fsdp_param.padded_sharded_param_size
    knows_size = len(inspect.signature(inner.fsdp_pre_all_gather).parameters) == 5
    if knows_size and inner.size() != padded and any(t.size() != padded for t in inputs):
        raise AssertionError(
            f"{who} must return all-gather inputs with the padded sharded size {tuple(padded)},"
            f" but got {[tuple(tensor.size()) for tensor in inputs]}"
        )


def _agree(fsdp_param: Any, inputs: list[torch.Tensor] | None, error: str) -> None:
    """At the first gather: RuntimeError on every rank unless all return alike inputs."""
    if fsdp_param.inputs_agree:
        return
    group = getattr(fsdp_param.mesh_info, "shard_process_group", None)
    exchange = None if group is None else _rendezvous.exchange_for(group)
    if exchange is None:
        return
    alike = [(tuple(tensor.size()), str(tensor.dtype)) for tensor in inputs or ()]
    texts = exchange(f"inputs of {fsdp_param._name}", json.dumps([error, alike]).encode())
    found = [json.loads(text) for text in texts]
    if error:
        return  # this rank has an error of its own
    ranks = _process_group.global_ranks(group)
    for rank, (their_error, theirs) in zip(ranks, found, strict=True):
        if their_error or theirs != found[0][1]:
            what = their_error or f"{theirs}, on rank {ranks[0]} {found[0][1]}"
            raise RuntimeError(
                f"{_PRE} of parameter '{fsdp_param._name}' must return inputs of the same sizes and"
                f" dtypes on every rank, padded to {tuple(fsdp_param.padded_sharded_param_size)}"
                f" where they are those of the shard. Rank {rank}: {what}"
            )
    fsdp_param.inputs_agree = True
