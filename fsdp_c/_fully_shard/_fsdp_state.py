"""The state of one fully_shard call: torch's FSDPState whose hooks run in the core."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _MultiHandle
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor

from fsdp_c import _env
from fsdp_c._fully_shard import (
    _containers,
    _engine_bind,
    _fallback_reason,
    _fallback_state,
    _fqns,
    _fsdp_module,
    _heap,
    _replaced_functions,
    _same_model,
    _shared_params,
    _status,
    _step_messages,
    _verify,
    _visibility,
)
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._param_group_attributes import partial_sums_hidden
from fsdp_c._fully_shard._training_state import training_state
from fsdp_c._native import _C


class FSDPStateContext(_C.Context, _fsdp_state.FSDPStateContext):
    """What a root and the units below it share; its flags are the core's."""

    _root: _C.Root | None = None  # while the core runs it

    @property
    def iter_forward_root(self) -> Any:
        return self._forward_root if self._root is None else self._root.iteration_root

    @iter_forward_root.setter
    def iter_forward_root(self, state: Any) -> None:
        self._forward_root = state

    def renewed(self) -> FSDPStateContext:
        """Another one with what the user has set."""
        context = type(self)()
        context.is_last_backward = self.is_last_backward
        context.manual_backward_finalization = self.manual_backward_finalization
        context.post_optim_event = self.post_optim_event
        return context


class FSDPState(_C.State, _fallback_state.FallbackState):
    """Hooks, root and units of one call.

    The module's hooks are functions of the core. In the first forward of a root its
    implementation is chosen: the core, or torch's own if one unit needs that.
    """

    _fsdp_param_groups: list[FSDPParamGroup]
    _state_ctx: FSDPStateContext
    call: Any = None  # of fully_shard: see _fully_shard.Call
    offloaded: Any = None  # while the memory is away: see _memory/_offload

    def __init__(self) -> None:
        super().__init__()
        self._state_ctx = FSDPStateContext()

    # ---- whom to prefetch; over shared memory there is nothing to do ahead of time ----

    @property
    def _states_to_forward_prefetch(self) -> list[Any]:
        return self._prefetched[False]

    @_states_to_forward_prefetch.setter
    def _states_to_forward_prefetch(self, states: list[Any]) -> None:
        self._set_prefetched(False, states)

    @property
    def _states_to_backward_prefetch(self) -> list[Any]:
        return self._prefetched[True]

    @_states_to_backward_prefetch.setter
    def _states_to_backward_prefetch(self, states: list[Any]) -> None:
        self._set_prefetched(True, states)

    def _set_prefetched(self, in_backward: bool, states: list[Any]) -> None:
        self.__dict__.setdefault("_prefetched", {})[in_backward] = states
        self._pass_prefetches()

    def _pass_prefetches(self) -> None:
        """Tells the schedule of a device; it forgets units that are bound anew."""
        for group in self._fsdp_param_groups if self._root is not None else ():
            for in_backward, states in self._prefetched.items():
                order = slice(None, None, -1 if in_backward else 1)
                groups = [other for state in states for other in state._fsdp_param_groups[order]]
                group._core_set_prefetch(in_backward=in_backward, groups=groups)
                named = list(group.named_prefetches)
                named[in_backward] = groups
                group.named_prefetches = (named[False], named[True])

    _training_state = training_state

    # ---- set-up ----

    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
    ) -> None:
        super().init(modules, device, mp_policy, auto_reshard_after_forward)
        self._pre_forward_hook_handle.remove()
        self._post_forward_hook_handle.remove()
        is_grouped = len(modules) > 1
        pre = [
            module.register_forward_pre_hook(self._hook_pre_forward, prepend=True, with_kwargs=True)
            for module in modules
        ]
        post = [
            module.register_forward_hook(self._hook_post_forward, always_call=is_grouped)
            for module in modules
        ]
        if is_grouped:
            handle = _MultiHandle((*pre, *post))
            self._pre_forward_hook_handle = self._post_forward_hook_handle = handle
        else:
            self._pre_forward_hook_handle, self._post_forward_hook_handle = pre[0], post[0]
        policy = self._mp_policy
        self._set_casts(
            cast_inputs=policy.cast_forward_inputs,
            param_dtype=policy.param_dtype,
            output_dtype=policy.output_dtype,
        )
        self._is_strict = _env.is_strict()

    def _choose_implementation(self) -> None:
        """Called by the first forward. Collective if the root runs on the core."""
        self._refuse_if_offloaded()
        was_root = self._is_root
        try:
            _shared_params.check(self._modules[0])
            _fsdp_module.warn_of_empty_buffers(self._modules[0])
            self._lazy_init()
            states = self._state_ctx.all_states
            groups = [group for state in states for group in state._fsdp_param_groups]
            _fsdp_module.warn_of_lost_settings(groups, [_fqns.unit_name(group) for group in groups])
            reason = self._why_torch(states, groups)
            if reason:
                self._fall_back(states, groups, reason)
                if self._is_root and all(isinstance(group, FSDPParamGroup) for group in groups):
                    _same_model.check_origins(groups)
            else:
                _visibility.choose(groups)
                self._join_core(states, groups)
                _verify.begin(self, groups)
            _status.note(self, reason)
        except BaseException:
            if was_root is None:
                self._undo_lazy_init([*self._state_ctx.all_states, self])
            raise

    def _why_torch(self, states: list[Any], groups: list[Any]) -> str:
        """What keeps the root from the core, on this rank or another; empty if nothing does."""
        if self._is_root is not True:
            return "its units ran forward without their root"
        if not all(isinstance(part, FSDPState | FSDPParamGroup) for part in (*states, *groups)):
            return "some of its units were sharded by torch's fully_shard"
        for group in groups:
            if not group._is_bound and (reason := _fallback_reason.why_torch_everywhere(group)):
                return f"unit {_fqns.unit_name(group)}: {reason}"
        return _fallback_reason.agreed_reason(groups, self._why_torch_here(states, groups))

    def _why_torch_here(self, states: list[Any], groups: list[Any]) -> str:
        if reason := self._what_was_replaced(states):
            return reason
        for group in groups:
            reason = group.fallback_reason
            if not reason and not group._is_bound:
                reason = _fallback_reason.why_torch_here(group)
            if reason:
                return f"unit {_fqns.unit_name(group)}: {reason}"
        return ""

    def _what_was_replaced(self, states: list[Any]) -> str:
        if reason := _replaced_functions.replaced():
            return reason
        for state in states:
            if reason := _replaced_functions.replaced_on(state):
                return f"state of {type(state._modules[0]).__name__}: {reason}"
        return ""

    def _join_core(self, states: list[FSDPState], groups: list[FSDPParamGroup]) -> None:
        restore = [] if self._root is not None else [g.leave_early_binding() for g in groups]
        domains = []
        for group in groups:
            # Units that were unsharded before the first forward have a domain already.
            for domain in group._binding or ():
                if isinstance(domain, _C.Domain) and domain not in domains:
                    domains.append(domain)
        streams = domains[0].streams if domains else None
        unbound = [group for group in groups if not group._is_bound]
        _engine_bind.bind_units(
            unbound, streams, lambda made: self._make_root(states, groups, [*domains, *made])
        )
        for restore_group in restore:
            restore_group()

    def _make_root(
        self, states: list[FSDPState], groups: list[FSDPParamGroup], domains: list[_C.Domain]
    ) -> None:
        names = [_fqns.state_name(state) for state in states]
        for domain in domains:
            domain.name_openers(names)
        root = _C.Root(states=list(states), domains=domains, context=self._state_ctx)
        self._state_ctx._root = root
        for state in states:
            for group in state._fsdp_param_groups:
                group._root = root
            state._join(root=root, groups=tuple(state._fsdp_param_groups), uses_fallback=False)
        for state in states:
            state._pass_prefetches()
        root.calls_methods = any([group.find_replaced() for group in groups])

    def _fall_back(self, states: list[Any], groups: list[Any], reason: str) -> None:
        for group in groups:
            if isinstance(group, FSDPParamGroup):
                group.check_fallback()
        for group in groups:
            if isinstance(group, FSDPParamGroup):
                group.leave_core(reason)
        _heap.HEAP.prepare_for_fallback()
        for context in {id(state._state_ctx): state._state_ctx for state in states}.values():
            context.__dict__.pop("_root", None)
        for state in states:
            if isinstance(state, FSDPState):
                state._join(root=None, groups=(), uses_fallback=True)

    def _leave_replaced(self) -> None:
        """Called by a forward, after a function of torch's implementation was replaced."""
        assert self._root is not None
        states = list(self._root.states)
        reason = self._what_was_replaced(states)
        groups = [group for state in states for group in state._fsdp_param_groups]
        if not reason and _visibility.has_changed(groups):
            self._change_collectives(states, groups)
        if not reason:  # it was put back, or is called, or collectives are in sight now
            self._root.calls_methods = any([group.find_replaced() for group in groups])
            return
        self._fall_back(states, groups, reason)
        _status.note(states[0], reason)

    def _change_collectives(self, states: list[FSDPState], groups: list[FSDPParamGroup]) -> None:
        """Binds all units anew; collective, and noticed by ranks that do not come along."""
        assert self._root is not None
        for group in groups:
            group.check_partial_sums()
        restore = [group.remember_unsharded() for group in groups]
        for group in groups:
            group.adopt_shards()
        domains = self._root.domains
        for domain in domains:
            domain.leave()
        for domain in domains:
            domain.await_left()
        for group in groups:
            group._set_aside()
            group._binding = None
        _visibility.choose(groups)
        self._join_core(states, groups)
        for restore_group in restore:
            restore_group()

    def leave_core(self, reason: str) -> None:
        """From now on torch's implementation runs this state; between two steps only."""
        groups = [group for group in self._fsdp_param_groups if group._is_bound]
        self._fall_back([self], groups, reason)

    def _init_shared_state(self) -> None:
        """What was set below the root before the units came together counts for all of them."""
        context = self._state_ctx
        for other in (state._state_ctx for state in context.all_states):
            context.is_last_backward = context.is_last_backward and other.is_last_backward
            context.post_optim_event = context.post_optim_event or other.post_optim_event
        super()._init_shared_state()

    def _undo_lazy_init(self, states: list[FSDPState]) -> None:
        """After a failed set-up: the next forward tries again."""
        for state in states:
            if isinstance(state, FSDPState):  # it may have joined before another rank failed
                state._join(root=None, groups=(), uses_fallback=False)
            state._is_root = None
            state._state_ctx = state._state_ctx.renewed()
            state._comm_ctx = _fsdp_state.FSDPCommContext()
            for group in state._fsdp_param_groups:
                group.comm_ctx = state._comm_ctx

    def _rebuild_units(self) -> None:
        """Called when a shard is not where set-up put it. Collective if a layout changed."""
        assert self._root is not None
        states = self._root.states
        groups = [group for state in states for group in state._fsdp_param_groups]
        rebuilt = [group for group in groups if not group.is_summoned]
        for group in rebuilt:  # before any of them changes, since this may raise
            group.adopt_shards()
        if any([group.rebind() for group in rebuilt]):
            self._join_core(states, groups)
        else:
            for state in states:
                state._pass_prefetches()

    # ---- entered from Python: register_fsdp_forward_method, pipelines, tools ----

    def _root_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        result = super()._root_pre_forward(module, args, kwargs)
        if self._state_ctx.iter_forward_root is self:
            # A forward that no backward follows has no place in the order of prefetches.
            self._comm_ctx.is_backward_expected = torch.is_grad_enabled()
        return result

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._takes_core():
            return self._enter(args, kwargs)
        self._refuse_if_offloaded()
        return super()._pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if self._root is None:
            return super()._post_forward(module, input, output)
        return self._leave(output)

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if self._root is None:
            if torch.is_grad_enabled():
                self._tell_of_double_backward()
            return super()._pre_backward(grad)
        self._core_pre_backward()
        return grad

    def _root_post_backward_final_callback(self) -> None:
        if self._root is None:
            super()._root_post_backward_final_callback()
        else:
            self._root.end_backward()

    def finalize_backward(self, *, wait_for_gradient_reduction: bool = True) -> None:
        if self._root is None:
            super().finalize_backward(wait_for_gradient_reduction=wait_for_gradient_reduction)
        else:
            self._validate_finalize_backward()
            self._root.finalize_backward()
            if wait_for_gradient_reduction:
                self.wait_for_gradient_reduction()

    def _validate_finalize_backward(self) -> None:
        groups = [g for state in self._state_ctx.all_states for g in state._fsdp_param_groups]
        # Torch's own cannot end a backward whose sums wait for replicas.
        with partial_sums_hidden([] if _env.is_strict() else groups):
            super()._validate_finalize_backward()
        if torch._C._current_graph_task_id() != -1:  # the first hook is still to come
            raise RuntimeError("FSDP finalize_backward must be called after backward completes")

    def _reset_iter_state(self) -> None:
        if self._is_root is None:  # nothing has run
            return
        super()._reset_iter_state()
        if self._root is not None:
            self._root.reset()

    # ---- entered from the core ----

    def _tell_of_double_backward(self) -> None:
        names = [_fqns.unit_name(group) for group in self._fsdp_param_groups]
        if names:
            _step_messages.warn_of_double_backward(names[0])

    def _warn_of_view(self) -> None:
        _step_messages.warn_of_view([type(module).__name__ for module in self._modules])

    def _refuse_unless_waited(self) -> None:
        """Called by a forward while any root of this process has a handle to be waited for."""
        in_shared_context = getattr(self._comm_ctx, "active_gradient_reduction", None)
        if self._state_ctx.gradient_reduction_pending or in_shared_context is not None:
            raise RuntimeError("The previous gradient reduction must be waited on before forward")

    def _refuse_if_offloaded(self) -> None:
        if self.offloaded is not None:
            raise RuntimeError(
                f"forward of {type(self._modules[0]).__name__}: {_fsdp_module.OFFLOADED}"
            )

    def _torch_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._refuse_if_offloaded()
        if len(self._modules) > 1 and not self._modules_to_run_forward:
            self._modules_to_run_forward.update(self._modules)
        return _fallback_state.FallbackState._pre_forward(self, module, args, kwargs)

    def _torch_post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if len(self._modules) > 1:
            if module not in self._modules_to_run_forward:
                return self._cast_output_dtype(output)
            self._modules_to_run_forward.remove(module)
            if self._modules_to_run_forward:
                if (
                    self._training_state == TrainingState.FORWARD
                    and not _fallback_state.in_backward()
                ):
                    # The others may never run, and the root need not return what this computed.
                    # In a backward (a reentrant checkpoint) the end of it is known already.
                    output = self._register_pre_backward_hook(output)
                return self._cast_output_dtype(output)
        return _fallback_state.FallbackState._post_forward(self, module, input, output)

    def _cast_any_input(self, value: Any) -> Any:
        cast = functools.partial(_cast_fp_tensor, self._mp_policy.param_dtype)
        return _containers.apply_to_tensors(cast, value)

    def _cast_any_output(self, value: Any) -> Any:
        cast = functools.partial(_cast_fp_tensor, self._mp_policy.output_dtype)
        return _containers.apply_to_tensors(cast, value)


_replaced_functions.watch(FSDPState, _replaced_functions.STATE_METHODS)
