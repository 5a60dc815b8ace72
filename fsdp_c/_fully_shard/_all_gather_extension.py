"""What the first method of an all-gather extension returns is checked before it is gathered."""

from __future__ import annotations

import contextlib
import inspect
import json
import types
import weakref
from typing import Any

import torch

from fsdp_c import _env
from fsdp_c._comm import _process_group, _rendezvous

_PRE = "fsdp_pre_all_gather"


def ask(fsdp_param: Any) -> tuple[list[torch.Tensor], Any]:
    """What the parameter's shard has to be gathered, and what its second method is to get.

    The first time ranks agree on it.
    """
    inner = fsdp_param._sharded_local_tensor
    if fsdp_param.offload_to_cpu:
        inner = inner.to(fsdp_param.device, non_blocking=True)
    try:
        inputs, metadata = _validated(fsdp_param, inner, _call(fsdp_param, inner))
    except Exception as raised:
        with contextlib.suppress(RuntimeError):  # of others, while this rank has its own
            _agree(fsdp_param, None, f"{type(raised).__name__}: {raised}")
        raise
    _agree(fsdp_param, inputs, "")
    return inputs, metadata


def check_alike(fsdp_param: Any, inputs: list[torch.Tensor]) -> None:
    """RuntimeError unless they are as in the first gather, by which their place is laid out."""
    if any(
        now.size() != first.size() or now.dtype != first.dtype
        for now, first in zip(inputs, fsdp_param.inputs, strict=False)
    ) or len(inputs) != len(fsdp_param.inputs):
        now, first = (
            [(tuple(tensor.size()), str(tensor.dtype)) for tensor in tensors]
            for tensors in (inputs, fsdp_param.inputs)
        )
        raise RuntimeError(
            f"{_PRE} of parameter '{fsdp_param._name}' must return inputs of the same sizes and"
            f" dtypes for every gather: now {now}, at first {first}"
        )


def _call(fsdp_param: Any, inner: torch.Tensor) -> Any:
    method = inner.fsdp_pre_all_gather
    n_params = _count_params(method)
    if n_params == 1:
        return method(fsdp_param.shard_mesh_from_root)
    if n_params != 5:
        raise AssertionError(
            f"Invalid {_PRE}: {inspect.signature(method)}\nExpects fsdp_pre_all_gather(self, mesh:"
            " DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module:"
            " nn.Module, mp_policy: MixedPrecisionPolicy)"
        )
    return method(
        fsdp_param.shard_mesh_from_root,
        fsdp_param._orig_size,
        fsdp_param._contiguous_orig_stride,
        fsdp_param._module_info.module,
        fsdp_param.mp_policy,
    )


_N_PARAMS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _count_params(method: Any) -> int:
    """Of methods of a class, counted once: inspection takes longer than all else here."""
    function = getattr(method, "__func__", None)
    if type(function) is not types.FunctionType:
        return len(inspect.signature(method).parameters)
    if function not in _N_PARAMS:
        _N_PARAMS[function] = len(inspect.signature(method).parameters)
    return _N_PARAMS[function]


def _validated(fsdp_param: Any, inner: torch.Tensor, result: Any) -> tuple[list[torch.Tensor], Any]:
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
    _check_padding(fsdp_param, inner, who, inputs)
    if _env.is_strict() and not all(tensor.is_contiguous() for tensor in inputs):
        raise RuntimeError(f"{who} returned a tensor that is not contiguous, which torch refuses")
    for tensor in inputs:
        if tensor.device.type != fsdp_param.device.type:
            raise ValueError(
                f"{who} returned a tensor on {tensor.device}, and the unit is on"
                f" {fsdp_param.device}"
            )
    return [_plain(tensor) for tensor in inputs], metadata


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        tensor = torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.contiguous().resolve_conj().resolve_neg()


def _check_padding(
    fsdp_param: Any, inner: torch.Tensor, who: str, inputs: list[torch.Tensor]
) -> None:
    """Torch's own check, which the ranks that need padding would fail alone."""
    padded = fsdp_param.padded_sharded_param_size
    if (
        inner.size() != padded
        and _count_params(inner.fsdp_pre_all_gather) == 5  # it is told the size
        and any(tensor.size() != padded for tensor in inputs)
    ):
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
