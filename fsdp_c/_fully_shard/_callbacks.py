"""What the core asks of Python: the functions that csrc/bind/python/calls.h names."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fsdp_c._fully_shard import _async_inputs, _core_messages, _errors, _slices
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._fsdp_state import FSDPState
from fsdp_c._native import _C

_LOG = logging.getLogger("torch.distributed.fsdp.fully_shard")


def _is_logging() -> bool:
    return _LOG.isEnabledFor(logging.DEBUG)


def _log_event(text: str) -> None:
    _LOG.debug("%s", text)


def _parameter_name(fsdp_param: Any) -> str | None:
    """For messages."""
    return fsdp_param._param_fqn


def _make_sharded_gradient(fsdp_param: Any, local: torch.Tensor) -> torch.Tensor:
    """The DTensor of a gradient, whose local tensor is given."""
    return fsdp_param.to_sharded_dtensor(local)


# Of a parameter, a unit, its name or nothing, for people.
_TEXTS = (
    _core_messages.tell_of_write,
    _core_messages.warn_of_outdated,
    _core_messages.warn_of_unfinalized,
    _core_messages.refuse_backward,
    _core_messages.refuse_zero_divisor,
    _core_messages.refuse_grad_dtype,
    _core_messages.refuse_plain_gradient,
    _core_messages.refuse_frozen_gradient,
    _core_messages.refuse_accumulated,
    _core_messages.refuse_orphan,
    _core_messages.text_of_sharded,
    _core_messages.text_for_graph,
    _core_messages.text_of_withheld,
)


def set_whole(**named: Any) -> None:
    """Hands functions down, or says all that is missing or unknown."""
    wanted = _C.callbacks()
    missing = [name for name in wanted if name not in named]
    unknown = [name for name, given in named.items() if name not in wanted or not callable(given)]
    told = {"missing": missing, "no such function": unknown}
    wrong = [f"{head}: {', '.join(names)}" for head, names in told.items() if names]
    if wrong:
        raise TypeError(f"set_callbacks: {'; '.join(wrong)}")
    _C.set_callbacks(**named)


def hand_down() -> None:
    """Before the first state is made. An error names what the core asks for and is not here."""
    set_whole(
        # Of a state, in its forward.
        join_root=FSDPState._join_root,
        look_around=FSDPState._look_around,
        rebuild_units=FSDPState._rebuild_units,
        refuse_unless_waited=FSDPState._refuse_unless_waited,
        # Of a unit whose collectives others see.
        note_forward=FSDPParamGroup._note_forward,
        prefetch_in_forward=FSDPParamGroup._prefetch_in_forward,
        prefetch_in_backward=FSDPParamGroup._prefetch_in_backward,
        # Of a state that was handed over: (module, args, kwargs), and (module, args, output).
        torchs_pre_forward=FSDPState._torchs_pre_forward,
        torchs_post_forward=FSDPState._torchs_post_forward,
        # Of a state and its module's arguments.
        wait_for_inputs=_async_inputs.wait_for,
        # Of a state and what the core does not open.
        cast_any_input=FSDPState._cast_any_input,
        cast_any_output=FSDPState._cast_any_output,
        # Of a state, for people.
        warn_of_view=FSDPState._warn_of_view,
        warn_of_hidden_output=FSDPState._warn_of_hidden_output,
        warn_of_failed_backward=FSDPState._warn_of_failed_backward,
        tell_of_double_backward=FSDPState._tell_of_double_backward,
        explain_error=_errors.explain,
        is_logging=_is_logging,
        log_event=_log_event,
        **{function.__name__: function for function in _TEXTS},
        # Of a parameter.
        refuse_sparse_gradient=FSDPParam._refuse_sparse_gradient,
        parameter_name=_parameter_name,
        make_sharded_gradient=_make_sharded_gradient,
        make_slice=_slices.make,
        local_gradient=FSDPParam._local_gradient,
        make_inputs=FSDPParam.make_inputs,
        fill_unsharded=FSDPParam.fill_unsharded,
    )
