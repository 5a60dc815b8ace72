"""What a step on the core warns of and refuses: csrc/bind asks for these texts."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from fsdp_c._fully_shard import _fqns

# In the order of the core's enum fc_written.
_WRITTEN = (
    "within a forward that had read the parameter before, so other ranks may have read either"
    " value: write shards between two forwards, or before their first use in one, or set"
    " FSDP_C_TRANSPORT=callback, which gathers for each use",
    "within a backward, after other ranks had gathered it: write shards between backward and"
    " forward, or set FSDP_C_BATCH_BYTES=0, which gathers units one by one",
    "within a forward, after other ranks had gathered it ahead of its use, as no forward before had"
    " written any: write shards before the model's forward, or set FSDP_C_BATCH_BYTES=0, which"
    " gathers units one by one",
)


def _name(fsdp_param: Any) -> str:
    return fsdp_param._param_fqn or "?"


def tell_of_write(fsdp_param: Any, what: int) -> None:
    if what < len(_WRITTEN):
        raise RuntimeError(
            f"the shard of parameter '{_name(fsdp_param)}' was written on rank"
            f" {dist.get_rank()} {_WRITTEN[what]}"
        )
    warnings.warn(
        f"the unsharded parameter '{_name(fsdp_param)}' of FSDP unit"
        f" '{_fqns.unit_name(fsdp_param.unit)}' was written: on one rank it is the shard itself, so"
        " the write stays. Later writes to the unit's parameters last until they are resharded, as"
        " on several ranks; write to the sharded parameters, outside of forward and backward, what"
        " is meant to stay",
        stacklevel=2,
    )


def warn_of_outdated(group: Any) -> None:
    warnings.warn(
        f"backward goes through a graph of FSDP unit '{_fqns.unit_name(group)}' from before an"
        " optimizer step, or a load, that has changed its weights since: detach() what is carried"
        " over a step, or run all backwards before it",
        stacklevel=2,
    )


def warn_of_unfinalized() -> None:
    warnings.warn(
        "backward was left to finalize_backward(), which was not called before this forward:"
        " gradients of some FSDP units are not reduced yet, and an optimizer step in between has"
        " not used them",
        stacklevel=2,
    )


def refuse_backward(group: Any) -> None:
    raise RuntimeError(
        "the previous backward ended in an exception, and another one reached FSDP unit"
        f" '{_fqns.unit_name(group)}' without a forward in between: call forward again first"
    )


def refuse_zero_divisor(group: Any) -> None:
    raise ZeroDivisionError(
        f"set_gradient_divide_factor(0) on unit '{_fqns.unit_name(group)}': its gradients cannot be"
        " divided by zero"
    )


def refuse_grad_dtype(fsdp_param: Any, given: str, wanted: str) -> None:
    raise RuntimeError(
        f"parameter '{_name(fsdp_param)}' of FSDP unit '{_fqns.unit_name(fsdp_param.unit)}':"
        f" attempting to assign a gradient with dtype '{given}' to a tensor with grad_dtype"
        f" '{wanted}'. From torch 2.15 on grad_dtype can be set before the first forward"
    )


def refuse_plain_gradient(fsdp_param: Any) -> None:
    raise AssertionError(
        f"expected the gradient of sharded parameter '{_name(fsdp_param)}' to be DTensor, got a"
        " plain tensor: set it to None, or to a DTensor placed as its parameter"
    )


def refuse_frozen_gradient(fsdp_param: Any) -> None:
    """Parameters that were frozen at set-up have no place in what a device stages."""
    raise RuntimeError(
        f"parameter '{_name(fsdp_param)}' of FSDP unit '{_fqns.unit_name(fsdp_param.unit)}' was"
        " frozen when this forward began and has a gradient now: call requires_grad_(True) before"
        " the forward"
    )


def refuse_accumulated(fsdp_param: Any, dtype: str) -> None:
    raise ValueError(
        f"an accumulated gradient of parameter '{_name(fsdp_param)}' must have the size of the"
        f" whole parameter and the dtype {dtype}"
    )


def refuse_orphan(unit: str) -> None:
    raise RuntimeError(
        f"backward goes through a graph of FSDP unit '{unit}' from before its parameters were"
        " replaced or moved, so that its gradients belong to nothing: call forward again before"
        " backward"
    )


def text_of_sharded(unit: str) -> str:
    return (
        f"a parameter of FSDP unit '{unit}' is sharded now, so its full weight cannot be read: the"
        " unit is not in forward or backward. Read it inside the unit's forward, call unshard() on"
        " the unit first, or use register_fsdp_forward_method() for the method that needs it"
    )


def text_for_graph(unit: str) -> str:
    return (
        f"{text_of_sharded(unit)}. If it is a backward that reads it, from a tensor inside of the"
        " unit that its output does not depend on: return that tensor from the unit's forward, or"
        " call set_reshard_after_forward(False) on the unit"
    )


def text_of_withheld(unit: str) -> str:
    return (
        f"backward needs a parameter of FSDP unit '{unit}', which was told to do without: call"
        " set_unshard_in_backward(True) on it"
    )
