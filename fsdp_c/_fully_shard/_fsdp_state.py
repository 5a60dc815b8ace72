"""The state of one fully_shard call: torch's FSDPState whose hooks run in the core."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _MultiHandle
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor

from fsdp_c import _env
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _async_inputs,
    _containers,
    _engine_bind,
    _fqns,
    _fsdp_module,
    _replaced_functions,
    _same_model,
    _shared_params,
    _status,
    _step_messages,
    _torchs_own,
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


class FSDPState(_C.State, _versions.TorchState):
    """Hooks, root and units of one call.

    The module's hooks are functions of the core. What the core cannot run is handed over to a state
    of torch's own class, which takes this one's place: at set-up, or by a forward of the root.
    """

    _fsdp_param_groups: list[FSDPParamGroup]
    _state_ctx: FSDPStateContext
    call: Any = None  # of fully_shard: see _fully_shard.Call
    offloaded: Any = None  # while the memory is away: see _memory/_offload
    torchs: Any = None  # what stands in its place
    # States that have left the core, why, and whom that still waits for.
    leaving: tuple[Sequence[Any], str, Sequence[_C.Domain]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._state_ctx = FSDPStateContext()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _replaced_functions.STATE_METHODS:
            what = f"the FSDP state of {type(self._modules[0]).__name__}"
            _replaced_functions.refuse(name, what)
        super().__setattr__(name, value)

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
        self._is_compiled = any(_async_inputs.is_compiled(module) for module in self._modules)
        self._is_strict = _env.is_strict()
        self._fills_in_gradients = True

    def settle(self) -> None:
        """At the end of set-up: hands over what the core will never run."""
        if reason := _torchs_own.why_from_the_start(self):
            self._hand_over([self], reason)

    def _join_root(self) -> None:
        """Called by the first forward. Collective if the root runs on the core."""
        root = self._state_ctx.all_states[0] if self._is_root is False else self
        if isinstance(root, FSDPState) and root.leaving is not None:
            root._await_others()
        if self.torchs is not None:
            return
        self._refuse_if_offloaded()
        was_root = self._is_root
        try:
            if was_root is False:
                reason = "some of the units around it are torch's own"
                self._hand_over([self], reason)
                return
            _shared_params.check(self._modules[0])
            _fsdp_module.warn_of_empty_buffers(self._modules[0])
            self._lazy_init()
            states = self._state_ctx.all_states
            groups = [group for state in states for group in state._fsdp_param_groups]
            _fsdp_module.warn_of_lost_settings(groups, [_fqns.unit_name(group) for group in groups])
            if reason := _torchs_own.why_of_root(states, groups):
                if all(isinstance(group, FSDPParamGroup) for group in groups):
                    _same_model.check_origins(groups)
                self._hand_over(states, reason)
                return
            _visibility.choose(groups)
            self._join_core(states, groups)
            _verify.begin(self, groups)
            _status.note(self, "")
        except BaseException:
            if was_root is None and self.torchs is None:
                self._undo_lazy_init([*self._state_ctx.all_states, self])
            raise

    def _hand_over(self, states: Sequence[Any], reason: str) -> None:
        """The states below this one, and its own, become torch's."""
        self.leaving = (states, reason, _torchs_own.leave_core(states, reason))
        self._await_others()

    def _await_others(self) -> None:
        assert self.leaving is not None
        states, reason, domains = self.leaving
        for domain in domains:
            domain.await_left()
        is_root, self.leaving = self._is_root, None
        _torchs_own.hand_over(states, reason)
        if is_root:
            self.torchs._lazy_init()
        _status.note(self.torchs, reason)

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
            state._join(root=root, groups=tuple(state._fsdp_param_groups))
        for state in states:
            state._pass_prefetches()
        root.calls_methods = any([group.find_replaced() for group in groups])

    def _look_around(self) -> None:
        """Called by a forward, after functions, methods or collectives were replaced."""
        assert self._root is not None
        states = list(self._root.states)
        groups = [group for state in states for group in state._fsdp_param_groups]
        if reason := _torchs_own.why_here(groups):
            states[0]._hand_over(states, reason)
            return
        if _visibility.has_changed(groups):
            self._change_collectives(states, groups)
        self._root.calls_methods = any([group.find_replaced() for group in groups])

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

    def _init_shared_state(self) -> None:
        """What was set below the root before the units came together counts for all of them."""
        context = self._state_ctx
        for other in (state._state_ctx for state in context.all_states):
            context.is_last_backward = context.is_last_backward and other.is_last_backward
            context.post_optim_event = context.post_optim_event or other.post_optim_event
        comm = self._comm_ctx
        is_live = hasattr(comm, "all_gather_stream")  # shared with a root that has run already
        kept = dict(vars(comm)) if is_live else {}
        super()._init_shared_state()
        kept["reduce_scatter_max_input_buffers"] = max(
            comm.reduce_scatter_max_input_buffers, kept.get("reduce_scatter_max_input_buffers", 1)
        )
        vars(comm).update(kept)

    def _undo_lazy_init(self, states: list[FSDPState]) -> None:
        """After a failed set-up: the next forward tries again."""
        for state in states:
            if isinstance(state, FSDPState):  # it may have joined before another rank failed
                state._join(root=None, groups=())
            state._is_root = None
            # What was set is the root's by now.
            is_self = state is self
            state._state_ctx = self._state_ctx.renewed() if is_self else FSDPStateContext()
            state._comm_ctx = _fsdp_state.FSDPCommContext()
            for group in state._fsdp_param_groups:
                group.comm_ctx = state._comm_ctx
                group._module_fqn = None  # torch's set-up adds to a name that is there

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

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._takes_core():
            return self._enter(args, kwargs)
        return self._torchs_pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if self._root is None:
            return self._torchs_post_forward(module, input, output)
        return self._leave(output)

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if self._root is not None:
            self._core_pre_backward()
        return grad

    def _root_post_backward_final_callback(self) -> None:
        if self._root is not None:
            self._root.end_backward()

    def finalize_backward(self, *, wait_for_gradient_reduction: bool = True) -> None:
        if self._root is None:  # nothing has run
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

    def _warn_of_hidden_output(self) -> None:
        unit = _fqns.unit_name(self._fsdp_param_groups[0])
        _step_messages.warn_of_hidden_output(unit, stacklevel=2)

    def _warn_of_failed_backward(self) -> None:
        _step_messages.warn_of_failed_backward(stacklevel=2)

    # ---- a forward that had begun when the state was handed over ----

    def _torchs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torchs = self.torchs
        if len(self._modules) > 1 and not torchs._modules_to_run_forward:
            torchs._modules_to_run_forward.update(self._modules)
        return torchs._pre_forward(module, args, kwargs)

    def _torchs_post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if self.torchs is None:  # no forward has begun
            return output
        return self.torchs._post_forward(module, input, output)

    # ---- containers that the core does not open ----

    def _cast_any_input(self, value: Any) -> Any:
        cast = functools.partial(_cast_fp_tensor, self._mp_policy.param_dtype)
        return _containers.apply_to_tensors(cast, value)

    def _cast_any_output(self, value: Any) -> Any:
        cast = functools.partial(_cast_fp_tensor, self._mp_policy.output_dtype)
        return _containers.apply_to_tensors(cast, value)


_replaced_functions.watch(FSDPState, _replaced_functions.STATE_METHODS)
