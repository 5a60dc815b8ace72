"""One unit: torch's FSDPParamGroup whose transitions and reductions run in the core."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_c import _env
from fsdp_c._comm import _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _fsdp_module, _replaced_functions
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c._fully_shard._param_group_state_dict import StateDictGroup


class FSDPParamGroup(StateDictGroup):
    """The parameters of one ``fully_shard`` call on one mesh.

    From the first forward, or unshard, on its methods are those of the core's unit. Flags such as
    ``reduce_grads`` are the core's; they take effect at the next hook.
    """

    fsdp_params: list[FSDPParam]
    is_offloaded = False

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
        self._post_save_state_dict_hook_handles: list[Any] = []
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

    def _init_mp_dtypes(self) -> None:
        dtypes = {p.sharded_param.dtype for p in self.fsdp_params if p.sharded_param.requires_grad}
        if len(dtypes) <= 1 or _env.is_strict():
            super()._init_mp_dtypes()
            self._refuse_real_sums()
        else:
            for fsdp_param in self.fsdp_params:
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
            _versions.allow_mixed_dtypes(self)
        _versions.set_sum_dtypes(self.fsdp_params)

    def _refuse_real_sums(self) -> None:
        """Of complex gradients, where torch does."""
        for fsdp_param in self.fsdp_params if _env.is_strict() else ():
            reduce = fsdp_param.mp_policy.reduce_dtype
            if fsdp_param.orig_dtype.is_complex and reduce is not None and not reduce.is_complex:
                raise TypeError(
                    f"FSDP unit '{_fqns.unit_name(self)}' has a complex parameter"
                    f" '{fsdp_param._module_info.param_name}', whose gradients torch cannot sum in"
                    f" {reduce}. Without FSDP_C_STRICT=1 they are summed as complex numbers"
                )

    def lazy_init(self) -> None:
        super().lazy_init()
        if self.post_forward_mesh_info not in (None, self.mesh_info):
            for fsdp_param in self.fsdp_params:
                fsdp_param.check_post_forward()

    def keep_storage(self) -> None:
        """Passes on whether the memory of a parameter is to stay over reshards: then all of it."""
        keeps = any(p.keep_unsharded_storage for p in self.fsdp_params)
        if keeps and _device.is_taken(self):
            raise NotImplementedError(
                f"keep_unsharded_storage of a parameter of FSDP unit '{_fqns.unit_name(self)}' was"
                f" set after the first forward on {self.device.type}: set it before"
            )
        self._core_keep_storage(keeps)

    # ---- transitions ----

    def unshard(self, async_op: bool = False) -> None:
        if self.is_offloaded:
            raise RuntimeError(
                f"unshard of unit '{_fqns.unit_name(self)}': {_fsdp_module.OFFLOADED}"
            )
        if not self._is_bound:
            self._bind_early()
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return None
        self._adopt_replaced_shards()
        self.gathers_async = async_op
        try:
            self._core_unshard_async()
        finally:
            self.gathers_async = False
        return None

    def keep_unsharded(self) -> None:
        """From an explicit unshard on forward leaves the unit alone, until it is resharded."""
        self._core_keep_after_forward()

    def wait_for_unshard(self) -> None:
        if self._is_bound and self._core_is_pending:
            self._core_unshard()

    def reshard(self) -> None:
        is_kept = self._training_state == TrainingState.FORWARD and not self._reshard_after_forward
        if is_kept or not self._is_bound:
            return
        self._core_reshard()
        if not self._core_in_phase:
            # nn.Module._apply reshards first and then swaps parameters and gradients.
            self._core_release_gradients()

    def _to_sharded(self) -> None:
        if not self._is_bound:
            return
        if self._root is not None:
            self._root.drop_raised_forward()
        if not self._core_in_phase:  # else a forward or backward still needs the parameters
            self._core_reshard()

    def _to_unsharded(self) -> None:
        self._core_unshard()

    # ---- what hooks call where a method was replaced; the core goes on in it ----

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._core_go_on():
            return args, kwargs
        return super().pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if self._core_go_on():
            return output
        return super().post_forward(module, input, output)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if not self._core_go_on():
            super().pre_backward(default_prefetch, *unused)

    # ---- the end of backward ----

    def post_backward(self, *unused: Any) -> None:
        """Called by pipelines too, after their last micro-batch."""
        if self._core_go_on():
            return
        if self._is_bound and self._root is not None:
            self._root.post_backward(self)
            if self.reduce_grads and self._core_awaits_gradients:
                self._warn_of_missing_gradients()

    def _warn_of_missing_gradients(self) -> None:
        if any(p.sharded_param.requires_grad for p in self.fsdp_params):
            warnings.warn(
                f"backward went through FSDP unit '{_fqns.unit_name(self)}', but none of its"
                " parameters got a gradient. Schedules that split backward in two ask for"
                " parameters before it, when a unit that was resharded shows its shards: call"
                " set_reshard_after_forward(False) on the stage's units",
                stacklevel=3,
            )

    def finalize_backward(self) -> None:
        """Not called by the core, but by who calls post_backward() himself."""
        if self._root is not None and self._root.awaits_end:
            self._root.end_backward()  # of all units: a phase ends for all of them at once

    def _reset_iter_state(self) -> None:
        if _versions.RESET_DROPS_GRADIENTS:  # the core drops those that were not reduced
            for fsdp_param in self.fsdp_params:
                fsdp_param.sharded_param.grad = None


_replaced_functions.watch(FSDPParamGroup, _replaced_functions.GROUP_METHODS)
