"""One unit: torch's FSDPParamGroup whose transitions and reductions run in the core."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_c import _env
from fsdp_c._comm import _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _engine_bind,
    _fallback,
    _fallback_reason,
    _fqns,
    _fsdp_module,
    _fsdp_param,
    _param_spec,
    _replaced_functions,
    _status,
    _visibility,
)
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c._native import _C

# In the order of the core's enum Training.
TRAINING_STATES = (
    TrainingState.FORWARD,
    TrainingState.PRE_BACKWARD,
    TrainingState.POST_BACKWARD,
    TrainingState.IDLE,
)


# Attributes that hold collectives; in the order of _compat.default_comms().
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")
_SEEN = {"_all_reduce_hook", *_COMMS}  # what may look at the unit's collectives
_TORCH_ONLY = {*_replaced_functions.GROUP_METHODS, *_versions.LAYOUT_FUNCTIONS}


@contextmanager
def hidden_sums(groups: list[FSDPParamGroup]) -> Iterator[None]:
    """Inside, `_partial_reduce_output` of the units is None."""
    for group in groups:
        group._hides_sums = True
    try:
        yield
    finally:
        for group in groups:
            group._hides_sums = False


class FSDPParamGroup(_C.Group, _fallback.FallbackGroup):
    """The parameters of one ``fully_shard`` call on one mesh.

    Bound to the core, its methods are those of the core's unit; otherwise it behaves as torch's
    class does. Flags such as ``reduce_grads`` are the core's; they take effect at the next hook.
    """

    fsdp_params: list[FSDPParam]
    is_offloaded = False
    # Who looks at its collectives, as it is bound and as it is wanted; see _visibility.
    visible_because = wants_visible = ""
    is_watched = False
    gathers_async = False  # the gather that is being made was asked for by unshard(async_op=True)
    is_lent = False  # unsharded, and other tensors stand where its parameters were
    _hides_sums = False

    def __init__(
        self,
        params: list[nn.Parameter],
        modules: tuple[nn.Module, ...],
        mesh_info: Any,
        post_forward_mesh_info: Any,
        device: torch.device,
        shard_placement_fn: Any,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        # (domain, index in it, domain of the replicas) once bound.
        self._binding: tuple[_C.Domain, int, _C.Domain | None] | None = None
        self._bound_specs: list[_param_spec.ParamSpec] | None = None
        self._root: _C.Root | None = None
        self._uses_fallback = False
        self.left_because = ""  # what took the unit to the fallback
        self._left: list[_C.Domain] = []  # on the way there, until all ranks have
        self._separate_group: Any = None  # that reductions had of their own
        self._put_shards_handles: list[Any] = []
        self.prefetched: dict[bool, list[Any]] = {}  # in backward, or in forward: named by the user
        # Without parameters: torch's class would make them of its own kind.
        super().__init__(
            [],
            modules,
            mesh_info,
            post_forward_mesh_info,
            device,
            shard_placement_fn,
            mp_policy,
            offload_policy,
        )
        infos = _fsdp_param_group._get_param_module_infos(params, modules)
        self.fsdp_params = [
            FSDPParam(
                param,
                info,
                mesh_info,
                post_forward_mesh_info,
                device,
                shard_placement_fn,
                _versions.policy_for(mp_policy, param),
                offload_policy,
            )
            for param, info in zip(params, infos, strict=True)
        ]

    # ---- state, as torch spells it ----

    @property
    def _training_state(self) -> TrainingState:
        return TRAINING_STATES[self._training]

    @_training_state.setter
    def _training_state(self, state: TrainingState) -> None:
        self._training = TRAINING_STATES.index(state)

    @property
    def _sharded_state(self) -> ShardedState:
        if self._is_bound:
            return ShardedState.UNSHARDED if self._core_is_unsharded else ShardedState.SHARDED
        return self.__dict__["_sharded_state"]

    @_sharded_state.setter
    def _sharded_state(self, state: ShardedState) -> None:
        self.__dict__["_sharded_state"] = state

    @property
    def _all_gather_result(self) -> Any:
        """Not None while an unshard waits to be waited for."""
        if self._is_bound:
            return self if self._core_is_pending else None
        return self.__dict__["_all_gather_result"]

    @_all_gather_result.setter
    def _all_gather_result(self, result: Any) -> None:
        self.__dict__["_all_gather_result"] = result

    @property
    def _partial_reduce_output(self) -> Any:
        """Averages over shards that the replicas have not seen: a copy, laid out as torch's.

        On a device only whether there are any can be seen. None drops them.
        """
        if not self._is_bound:
            return self.__dict__["_partial_reduce_output"]
        if self._hides_sums or not self._core_has_partial_sums:
            return None
        parts = [
            torch.nn.functional.pad(part, (0, p.padded_sharded_param_size.numel() - part.numel()))
            for p, part in zip(self.fsdp_params, self._core_partial_sums(), strict=True)
            if part is not None
        ]
        divisor = self.gradient_divide_factor or self.mesh_info.shard_mesh_size
        return torch.cat(parts) / divisor if parts else self

    @_partial_reduce_output.setter
    def _partial_reduce_output(self, output: Any) -> None:
        if not self._is_bound:
            self.__dict__["_partial_reduce_output"] = output
        elif output is None:
            self._core_drop_partial_sums()
        else:
            raise NotImplementedError(
                f"_partial_reduce_output of FSDP unit '{_fqns.unit_name(self)}' can be read, and"
                " set to None"
            )

    # ---- what only torch's implementation knows: setting it later takes the root there ----

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (_TORCH_ONLY | _SEEN) and self._core_has_accumulated:
            raise RuntimeError(
                f"{name} of FSDP unit '{_fqns.unit_name(self)}' was set while gradients of"
                " backward passes without synchronization are held: set it before the first of"
                " them, or after the backward that synchronizes"
            )
        if name in _COMMS:
            value = self._checked_comm(name, value)
        was_set, old = name in self.__dict__, self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in _SEEN and self._root is not None:
            self._root.look_again()
        if name in _TORCH_ONLY and self._is_bound and (reason := _fallback_reason.why_torch(self)):
            try:
                self.take_root_to_fallback(reason)
            except BaseException:
                if was_set:
                    super().__setattr__(name, old)
                else:
                    super().__delattr__(name)
                raise

    def _checked_comm(self, name: str, comm: Any) -> Any:
        """A user's collective, or torch's own for None."""
        if comm is None:
            return _versions.default_comms()[_COMMS.index(name)]()
        if not (callable(comm) and callable(getattr(comm, "allocate", None))) and (
            not _env.is_strict()
        ):
            raise TypeError(
                f"{name} of FSDP unit '{_fqns.unit_name(self)}' needs an object with allocate() and"
                f" __call__(), such as a subclass of AllGather or ReduceScatter, not"
                f" {type(comm).__name__}"
            )
        return comm

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        gather = self._all_gather_comm
        try:
            super().set_allocate_memory_from_process_group(enable)
        except AssertionError:
            self._all_gather_comm = gather  # torch's class has switched that one already
            raise

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: Any) -> None:
        """Switched off and on again, the process group is that of before."""
        mesh_info = self.mesh_info
        if enable and self._separate_group is not None:
            mesh_info.reduce_scatter_process_group = self._separate_group
        super()._set_separate_reduce_scatter_group(enable, new_groups)
        if enable:
            self._separate_group = mesh_info.reduce_scatter_process_group
        self.choose_reduce_group()

    def choose_reduce_group(self) -> None:
        """Tells the schedule of a device which process group sums gradients; collective there."""
        if _device.is_taken(self):
            assert self._binding is not None
            process_group = _device.reduce_group(self)
            _device.connect(self._binding[0].streams, process_group, self.device)
            self._core_set_reduce_group(str(process_group.group_name))

    def take_root_to_fallback(self, reason: str) -> None:
        """From now on torch's implementation runs the whole root; between two steps only."""
        root = self._root
        states = root.states if root is not None else []
        for group in (self, *(group for state in states for group in state._fsdp_param_groups)):
            group.check_fallback()
        self.leave_core(reason)
        for state in states:
            state.leave_core(reason)
        if states:
            _status.note(states[0], f"unit {_fqns.unit_name(self)}: {reason}")

    # ---- set-up ----

    def _init_mp_dtypes(self) -> None:
        dtypes = {p.sharded_param.dtype for p in self.fsdp_params if p.sharded_param.requires_grad}
        if len(dtypes) <= 1 or self._uses_fallback or _env.is_strict():
            super()._init_mp_dtypes()
        else:
            for fsdp_param in self.fsdp_params:
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
            _versions.allow_mixed_dtypes(self)
        _versions.settle_reduce_dtypes(self.fsdp_params)

    def lazy_init(self) -> None:
        super().lazy_init()
        if self.post_forward_mesh_info not in (None, self.mesh_info):
            for fsdp_param in self.fsdp_params:
                fsdp_param.check_post_forward()

    def check_fallback(self) -> None:
        """Raises if the unit holds what only the core can run."""
        for fsdp_param in self.fsdp_params:
            if fsdp_param.is_special:
                raise NotImplementedError(
                    f"parameter '{fsdp_param._param_fqn}' of FSDP unit '{self._module_fqn}', with"
                    f" size {tuple(fsdp_param._orig_size)}, strides {fsdp_param.unsharded_stride}"
                    f" and placement {fsdp_param.fsdp_placement}, can only be run by the core, but"
                    " its model also needs what only torch's implementation has (README, Not"
                    " supported). Use a contiguous parameter with at least one dim that the ranks"
                    " divide evenly, or put it into ignored_params"
                )
        super()._init_mp_dtypes()  # its own error for mixed dtypes

    def leave_core(self, reason: str) -> None:
        """Goes back to torch's implementation, sharded; local."""
        if self._uses_fallback:  # it may be unsharded there, for instance by an early unshard()
            return
        self._is_kept_after_forward = self._core_is_kept_after_forward
        self._unbind()
        self._left = [part for part in self._binding or () if isinstance(part, _C.Domain)]
        for domain in self._left:
            domain.leave()
        self._binding = self._root = None
        self._uses_fallback = True
        self.left_because = self.left_because or reason
        for fsdp_param in self.fsdp_params:
            fsdp_param.__dict__.pop("_unsharded_param", None)
            fsdp_param.unit = None
            fsdp_param.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED

    def leave_early_streams(self) -> Callable[[], None]:
        """A unit that was unsharded before the first forward joins the schedule of its root.

        What is returned brings it there as it was.
        """
        if not _device.is_taken(self):
            return lambda: None
        is_unsharded, outlasts = self._core_is_unsharded, self._core_is_kept_after_forward
        is_asked = is_unsharded or self._core_is_pending
        before = [p._unsharded_param for p in self.fsdp_params]
        # Perhaps written since.
        values = [old.detach().clone() for old in before] if is_unsharded else []
        self._unbind()
        self._binding = self._root = None

        def come_back() -> None:
            if is_asked:
                self._core_unshard_async()
            if is_unsharded:
                self._core_unshard()
            now = [p._unsharded_param for p in self.fsdp_params]
            for param, old in zip(now, before, strict=True):
                _fsdp_param.share_hooks(old, param)
            for param, value in zip(now, values, strict=False):
                if not torch.equal(param.detach(), value):
                    param.detach().copy_(value)
            before.clear()
            values.clear()
            if outlasts:
                self._core_keep_after_forward()

        return come_back

    def keep_storage(self) -> None:
        """Passes on whether the memory of a parameter is to stay over reshards: then all of it."""
        keeps = any(p.keep_unsharded_storage for p in self.fsdp_params)
        if keeps and _device.is_taken(self):
            self.take_root_to_fallback(_device.KEEPS_STORAGE)
            return
        self._core_keep_storage(keeps)

    def adopt_shards(self) -> None:
        """Finds shards that were replaced, moved or cast since set-up; the unit is bound still."""
        self._core_reshard()
        for fsdp_param in self.fsdp_params:
            info = fsdp_param._module_info
            registered = info.module._parameters.get(info.param_name)
            if not hasattr(registered, "_local_tensor"):
                raise ValueError(
                    f"parameter '{fsdp_param._param_fqn}' of FSDP unit '{self._module_fqn}' was"
                    f" replaced by a {type(registered).__name__} that is not sharded: assign a"
                    " DTensor with the parameter's mesh and placements (distribute_tensor), or"
                    " copy into the parameter in place"
                )
            fsdp_param.reset_sharded_param()
        self._init_mp_dtypes()
        if self._core_has_partial_sums and _device.is_taken(self) and self._has_other_layout():
            raise RuntimeError(
                f"shards of FSDP unit '{_fqns.unit_name(self)}' were cast, frozen or are trained"
                " now, while sums of their gradients wait on the device for the replicas: do that"
                " before the first of them, or after the backward that brings replicas together"
            )

    def _has_other_layout(self) -> bool:
        return [_param_spec.spec_of(p) for p in self.fsdp_params] != self._bound_specs

    def rebind(self) -> bool:
        """Binds the unit anew to what `adopt_shards` has found; held gradients go along.

        Returns whether the layout changed, in which case the unit is left unbound.
        """
        if self._has_other_layout():
            self._set_aside()
            return True
        assert self._binding is not None
        _engine_bind.bind_unit(self, *self._binding)
        return False

    def _register_state_dict_hooks(self) -> None:
        is_new = not self._module_to_pre_save_state_dict_hook_handle
        super()._register_state_dict_hooks()
        if is_new:
            for module, handle in self._module_to_pre_save_state_dict_hook_handle.items():
                handle.remove()
                self._module_to_pre_save_state_dict_hook_handle[module] = (
                    module.register_state_dict_pre_hook(self._before_state_dict)
                )
                self._put_shards_handles.append(module._register_state_dict_hook(self._put_shards))
            for module, handle in self._module_to_pre_load_state_dict_hook_handle.items():
                handle.remove()
                self._module_to_pre_load_state_dict_hook_handle[module] = (
                    module._register_load_state_dict_pre_hook(self._before_load)
                )

    def _before_state_dict(self, *_: Any) -> None:
        if self.is_lent:  # what stands in the modules now is to be saved
            return
        if self._is_bound:
            self._to_sharded()
        else:
            self.show_shards()

    def _before_load(self, *_: Any) -> None:
        self._core_count_load()  # all ranks load: what was gathered is out of date
        self._to_sharded()

    def _put_shards(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """After a module's state_dict: shards in place of parameters that are unsharded now.

        Copies in place of those that are lent, since their memory is the unit's.
        """
        if not self.is_unsharded:
            return
        for fsdp_param in self.fsdp_params:
            for owner, name in _fsdp_param.registrations(fsdp_param):
                if owner is not module or (found := state.get(prefix + name)) is None:
                    continue
                if not self.is_lent:
                    shard = fsdp_param.sharded_param
                    state[prefix + name] = shard if found.requires_grad else shard.detach()
                elif not found.requires_grad:
                    state[prefix + name] = found.clone()

    # ---- transitions ----

    def unshard(self, async_op: bool = False) -> None:
        if self.is_offloaded:
            raise RuntimeError(
                f"unshard of unit '{_fqns.unit_name(self)}': {_fsdp_module.OFFLOADED}"
            )
        if not self._is_bound and not self._uses_fallback and not self._in_slow_context():
            self._choose_alone()
        if not self._is_bound:
            for domain in self._left:  # who left alone would wait in collectives nobody joins
                domain.await_left()
            self._left = []
            return super().unshard(async_op)
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return None
        self._take_over_shards()
        self.gathers_async = async_op
        try:
            self._core_unshard_async()
        finally:
            self.gathers_async = False
        return None

    # ---- what a unit whose collectives others see gathers ahead, as torch's does ----

    def _note_forward(self) -> None:
        """The unit's forward has ended; a backward gathers units in the opposite order."""
        assert self._root is not None
        order = self.comm_ctx.__dict__.setdefault("forwards_of", [0, []])
        if order[0] != self._root.backward:
            order[:] = self._root.backward, []
        order[1].append(self)

    def _prefetch_in_forward(self) -> None:
        for group in self.prefetched.get(False, ()):
            group._core_unshard_async()

    def _prefetch_in_backward(self) -> None:
        named = self.prefetched.get(True)
        if not named:
            of, order = self.comm_ctx.__dict__.get("forwards_of", (0, []))
            while order and order.pop() is not self:
                pass
            named = order[-1:] if self._root is not None and of == self._root.backward else []
        for group in named:
            group._core_unshard_async()

    def _choose_alone(self) -> None:
        """Before the first forward a unit is in no root; collective."""
        self.left_because = _fallback_reason.why_torch_everywhere(self)
        _visibility.choose([self])
        if not self.left_because:
            mine = _fallback_reason.why_torch_here(self)
            self.left_because = _fallback_reason.agreed_reason([self], mine)
        if self.left_because:
            self.check_fallback()
            self._uses_fallback = True
        else:
            self._bind_alone()

    def _bind_alone(self) -> None:
        self._root = _C.Root([], _engine_bind.bind_units([self]), _C.Context())

    def keep_unsharded(self) -> None:
        """From an explicit unshard on forward leaves the unit alone, until it is resharded."""
        if self._is_bound:
            self._core_keep_after_forward()
        else:
            self._is_kept_after_forward = True

    def _take_over_shards(self) -> None:
        """Outside of a step shards that were replaced since set-up count from here on."""
        if self._core_in_phase or self._core_is_unsharded or self._core_is_intact:
            return
        assert self._root is not None
        root = next((state for state in self._root.states if state._is_root), None)
        if root is not None:
            root._rebuild_units()
            return
        self.adopt_shards()
        if self.rebind():  # before the first forward a unit stands alone
            self._bind_alone()

    def _in_slow_context(self) -> bool:
        return torch._C._are_functorch_transforms_active()

    def wait_for_unshard(self) -> None:
        if not self._is_bound:
            return super().wait_for_unshard()
        if self._core_is_pending:
            self._core_unshard()
        return None

    def reshard(self) -> None:
        if not self._is_bound:
            return super().reshard()
        if self._training_state == TrainingState.FORWARD and not self._reshard_after_forward:
            return None
        self._core_reshard()
        if not self._core_in_phase:
            # nn.Module._apply reshards first and then swaps parameters and gradients.
            self._core_release_gradients()
        return None

    def _to_sharded(self) -> None:
        if not self._is_bound:
            return super()._to_sharded()
        if self._root is not None:
            self._root.drop_raised_forward()
        if not self._core_in_phase:  # else a forward or backward still needs the parameters
            self._core_reshard()
        return None

    def _to_unsharded(self) -> None:
        if not self._is_bound:
            return super()._to_unsharded()
        self._core_unshard()
        return None

    def post_backward(self, *unused: Any) -> None:
        """Not called by autograd, but by pipelines, after their last micro-batch."""
        if not self._is_bound:
            with self._summed_as_backend_can():
                super().post_backward(*unused)
            return
        if self._root is not None:
            self._root.post_backward(self)
            if self.reduce_grads and self._core_awaits_gradients:
                self._tell_of_missing_gradients()

    def _tell_of_missing_gradients(self) -> None:
        if any(p.sharded_param.requires_grad for p in self.fsdp_params):
            warnings.warn(
                f"backward went through FSDP unit '{_fqns.unit_name(self)}', but none of its"
                " parameters got a gradient. Schedules that split backward in two ask for"
                " parameters before it, when a unit that was resharded shows its shards: call"
                " set_reshard_after_forward(False) on the stage's units",
                stacklevel=3,
            )

    def _record_post_forward(self) -> None:
        if getattr(self.comm_ctx, "is_backward_expected", True):
            super()._record_post_forward()

    @contextmanager
    def _summed_as_backend_can(self) -> Iterator[None]:
        """Only NCCL can scale while it sums; elsewhere a gradient divide factor comes after."""
        forced = self.force_sum_reduction_for_comms
        shards = getattr(self.mesh_info, "shard_process_group", None)
        if (
            self.gradient_divide_factor is not None
            and shards is not None
            and dist.get_backend(shards) != "nccl"
        ):
            # With one rank there is nothing to scatter, and torch's code divides on its own.
            self.force_sum_reduction_for_comms = shards.size() > 1
        try:
            yield
        finally:
            self.force_sum_reduction_for_comms = forced

    def finalize_backward(self) -> None:
        """Not called by the core, but by who calls post_backward() himself."""
        if not self._is_bound:
            super().finalize_backward()
        elif self._root is not None and self._root.awaits_end:
            self._root.end_backward()  # of all units: a phase ends for all of them at once

    def _reset_iter_state(self) -> None:
        if not self._is_bound:
            super()._reset_iter_state()
        elif _versions.RESET_DROPS_GRADIENTS:  # the core drops those that were not reduced
            for fsdp_param in self.fsdp_params:
                fsdp_param.sharded_param.grad = None


_replaced_functions.watch(FSDPParamGroup, _replaced_functions.GROUP_METHODS)
