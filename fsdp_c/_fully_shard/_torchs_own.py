"""What the core cannot run is handed over: it becomes states and units of torch's own classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable.replicate_with_fsdp import _ReplicateState

from fsdp_c._comm import _agreement, _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _errors,
    _fqns,
    _heap,
    _replaced_functions,
    _state_places,
    _unmanaged_params,
)
from fsdp_c._fully_shard._param_spec import is_summable
from fsdp_c._native import _C

# Attributes of torch's unit that a new one has of its own.
_OF_EACH = {
    "_module_fqn",  # torch adds to a name that is there
    "_module_to_pre_save_state_dict_hook_handle",
    "_module_to_pre_load_state_dict_hook_handle",
    "_all_gather_result",
    "_sharded_state",
    "_training_state",
}

# ---- why ----


def why_from_the_start(state: Any) -> str:
    """What of a call of fully_shard no torch and no setting lets the core run; alike on all ranks,
    and for good."""
    for group in state._fsdp_param_groups:
        if not _device.has_core(group.device):
            return f"it is on {group.device.type}"
        if group.mesh_info.mesh.device_type != group.device.type:
            return f"its mesh is on {group.mesh_info.mesh.device_type}"
        for fsdp_param in group.fsdp_params:
            if reason := _why_never_laid_out(fsdp_param):
                return reason
    return ""


def _why_never_laid_out(fsdp_param: Any) -> str:
    shard = fsdp_param.sharded_param
    if shard.requires_grad and not is_summable(shard.dtype):
        return f"gradients of {_name(fsdp_param)} are {shard.dtype}"
    is_fake = isinstance(fsdp_param._sharded_param_data, FakeTensor)
    if is_fake or _versions.is_typed_spmd(fsdp_param) or not _versions.SHARDS_DTENSORS:
        return why_not_a_tensor(fsdp_param)
    return ""


def why(group: Any) -> str:
    """What the unit has, as it is before a forward, that only torch can run."""
    return _what_lays_out(group) or _why_for_all_ranks(group)


def _what_lays_out(group: Any) -> str:
    for name, default in _versions.LAYOUT_FUNCTIONS.items():
        if getattr(group, name) is not default:
            return f"its {name} was replaced"
    return ""


def _why_for_all_ranks(group: Any) -> str:
    for fsdp_param in group.fsdp_params:
        if reason := _why_not_summed(fsdp_param):
            return reason
    return _device.why_not(group) if _device.is_wanted(group) else ""


def why_of_root(states: Sequence[Any], groups: Sequence[Any]) -> str:
    """Why the whole root becomes torch's, on this rank or on another; collective, unless torch's
    own is among it."""
    for part in (*groups, *states):
        if not isinstance(part, _C.State | _C.Group):
            reason = getattr(part, "why_torchs", "")
            return f"some of its units are torch's own{': ' * bool(reason)}{reason}"
    for group in groups:
        if reason := _why_for_all_ranks(group):
            return f"unit {_fqns.unit_name(group)}: {reason}"
    return agreed(groups, why_here(groups))


def why_here(groups: Sequence[Any]) -> str:
    """What a tool may have done on one rank alone."""
    if reason := _replaced_functions.replaced():
        return reason
    _replaced_functions.refuse_replaced()
    for group in groups:
        if reason := _what_lays_out(group):
            return f"unit {_fqns.unit_name(group)}: {reason}"
    return ""


def agreed(groups: Sequence[Any], mine: str) -> str:
    """A reason that some rank has, this one's first; collective."""
    _agreement.check_process_groups([(_fqns.unit_name(g), g.mesh_info) for g in groups])
    named = f"{mine} on rank {dist.get_rank()}" if mine else ""
    found = _agreement.first_reason_of_units("choice of implementation", groups, named)
    return mine or found


def _name(fsdp_param: Any) -> str:
    return fsdp_param._param_fqn or fsdp_param._module_info.param_name


def why_not_a_tensor(fsdp_param: Any) -> str:
    """What the parameter is other than a tensor of numbers, each rank's rows of it."""
    local, name = fsdp_param._sharded_local_tensor, _name(fsdp_param)
    if _versions.is_typed_spmd(fsdp_param):  # torch has made DTensors of them: asked first
        return f"{name} has spmd types"
    if fsdp_param.is_dtensor:
        return f"{name} is a DTensor of its own (tensor parallel)"
    if type(local) is not torch.Tensor:
        return f"{name} is a {type(local).__name__}"
    if hasattr(local, "fsdp_pre_all_gather"):
        return f"{name} has an all-gather extension"
    return ""


def _why_not_summed(fsdp_param: Any) -> str:
    orig, compute = fsdp_param.orig_dtype, _versions.compute_dtype(fsdp_param)
    if orig.is_complex != compute.is_complex:
        return f"{_name(fsdp_param)} is {orig} and computed with as {compute}"
    if not fsdp_param.sharded_param.requires_grad:
        return ""
    if _versions.takes_any_gradient(fsdp_param):
        return f"gradients of {_name(fsdp_param)} may be of any dtype (grad_dtype=None)"
    for dtype in (_versions.reduce_dtype(fsdp_param), _versions.grad_dtype(fsdp_param)):
        if not is_summable(dtype) or dtype.is_complex != orig.is_complex:
            return f"gradients of {_name(fsdp_param)} are {dtype}"
    return ""


def refuse(what: str, groups: Sequence[Any]) -> None:
    """NotImplementedError if a unit was handed over, for what works on the core alone."""
    for group in groups:
        if reason := getattr(group, "why_torchs", ""):
            raise NotImplementedError(
                f"{what}: torch's implementation runs FSDP unit '{_fqns.unit_name(group)}'"
                f" ({reason}), and this is for units that run on the core"
            )


# ---- handing over ----


def leave_core(states: Sequence[Any], reason: str) -> list[_C.Domain]:
    """Before `hand_over`, between two steps: no rank's core is to run these any more; local.

    What is returned has to be waited for: who left alone would wait in collectives of torch's that
    nobody joins. It tells of ranks that go on.
    """
    ours = [state for state in states if isinstance(state, _C.State)]
    for state in ours:
        for group in state._fsdp_param_groups:
            _check(group, reason, is_set_up=state._is_root is not None)
            group.find_replaced_shards()
    domains: dict[_C.Domain, None] = {}
    for state in ours:
        for group in state._fsdp_param_groups:
            parts = group._binding or ()
            domains.update((part, None) for part in parts if isinstance(part, _C.Domain))
            group.unbind(keeps_values=True)
        state._join(root=None, groups=())
        state._state_ctx.__dict__.pop("_root", None)
    for domain in domains:
        domain.leave()
    return list(domains)


def hand_over(states: Sequence[Any], reason: str) -> None:
    """From now on torch's own objects stand in the places of these; the shards stay the same."""
    _heap.HEAP.prepare_for_torch()
    for state in states:
        if not isinstance(state, _C.State):  # ours have set it up, and it joins another root
            state._is_root = None
            for group in state._fsdp_param_groups:
                group._module_fqn = None
    made = {state: _state_of(state, reason) for state in states if isinstance(state, _C.State)}
    for state, torchs in made.items():
        for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
            setattr(torchs, name, [made.get(other, other) for other in getattr(state, name)])


def _check(group: Any, reason: str, is_set_up: bool) -> None:
    """Raises if the unit has what torch cannot run either."""
    for fsdp_param in group.fsdp_params:
        if fsdp_param.is_special:
            raise NotImplementedError(
                f"parameter '{fsdp_param._param_fqn}' of FSDP unit '{_fqns.unit_name(group)}', with"
                f" size {tuple(fsdp_param._orig_size)}, strides {fsdp_param.unsharded_stride}"
                f" and placement {fsdp_param.fsdp_placement}, can only be run by the core, but"
                f" its model also needs torch's implementation ({reason}). Use a contiguous"
                " parameter with at least one dim that the ranks divide evenly, or put it into"
                " ignored_params"
            )
    if replaced := _replaced_functions.CALLED_METHODS & vars(group).keys():
        raise NotImplementedError(
            f"{min(replaced)} of FSDP unit '{_fqns.unit_name(group)}' was replaced, and the unit is"
            f" to be torch's own ({reason}), which would not call it: replace it on the module's"
            " unit after that, or on torch's class"
        )
    if not is_set_up:  # torch's own set-up refuses what follows
        return
    try:
        _versions.TorchGroup._init_mp_dtypes(group)
    except AssertionError as error:
        raise AssertionError(
            f"FSDP unit '{_fqns.unit_name(group)}' is to be torch's own ({reason}), which refuses"
            f" its dtypes: {error}"
        ) from error


def _state_of(ours: Any, reason: str) -> Any:
    """Torch's, in the same modules, with the same shards and what was set."""
    is_replicated = isinstance(ours, _ReplicateState)
    torchs = _ReplicateState() if is_replicated else _versions.TorchState()
    context = ours._state_ctx
    _state_places.take_place(torchs, ours)
    torchs._comm_ctx = ours._comm_ctx  # perhaps shared with another root
    torchs._fsdp_param_groups[:] = [
        _group_of(group, ours._mp_policy, reason) for group in ours._fsdp_param_groups
    ]
    if ours._is_root is False and not isinstance(context.all_states[0], _C.State):
        _join_torchs_root(ours, torchs)
    elif ours._is_root is not False:  # else it is the root's, whose state has it
        for name in ("is_last_backward", "post_optim_event", "manual_backward_finalization"):
            if hasattr(context, name):
                setattr(torchs._state_ctx, name, getattr(context, name))
    ours.torchs, ours._fsdp_param_groups = torchs, torchs._fsdp_param_groups
    torchs.is_handed_over = True
    _errors.watch(torchs)
    _unmanaged_params.watch(torchs, None)
    return torchs


def _join_torchs_root(ours: Any, torchs: Any) -> None:
    """Its root is torch's, and set up: the forward that runs now is that root's."""
    torchs._is_root, torchs._state_ctx = False, ours._state_ctx
    states = ours._state_ctx.all_states
    states[states.index(ours)] = torchs
    for group, old in zip(torchs._fsdp_param_groups, ours._fsdp_param_groups, strict=True):
        group._module_fqn = old._module_fqn
        group.lazy_init()


def _group_of(ours: Any, mp_policy: Any, reason: str) -> Any:
    ours.remove_state_dict_hooks()
    torchs = _versions.TorchGroup(
        [],
        ours.modules,
        ours.mesh_info,
        ours.post_forward_mesh_info,
        ours.device,
        None,
        mp_policy,
        ours.offload_policy,
    )
    for name in vars(torchs).keys() - _OF_EACH:
        setattr(torchs, name, getattr(ours, name))
    is_whole = [fsdp_param.become_torchs() for fsdp_param in torchs.fsdp_params]
    if is_whole and all(is_whole):
        torchs._to_unsharded()
    if _versions.sums_are_forced(ours):
        torchs.force_sum_reduction_for_comms = True
    ours.fsdp_params = []  # nobody who still has it finds them here
    torchs.why_torchs = ours.why_torchs = reason
    return torchs
