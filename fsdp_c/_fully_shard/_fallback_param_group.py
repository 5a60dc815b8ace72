"""One unit on the fallback: torch's FSDPParamGroup, mended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_c._compat import _versions
from fsdp_c._native import _C


class FallbackGroup(_versions.TorchGroup):
    """What torch's own class leaves undone where its implementation runs the unit."""

    fsdp_params: list[Any]
    _gathered_at = 0  # the number of optimizer steps until then
    # The shards are registered, but what was gathered is still there: after a state_dict.
    _shows_shards = False
    _is_kept_after_forward = False  # see keep_unsharded of FSDPParamGroup
    # Indices of parameters that have a part in the sum that replicas have not seen yet.
    _in_partial_sum: frozenset[int] = frozenset()

    # ---- gathers ----

    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is None:
            if self.is_unsharded:
                self._show_gathered()
                if self._training_state == TrainingState.FORWARD and self._is_outdated():
                    super()._to_sharded()
            if self._sharded_state == ShardedState.SHARDED:
                self._adopt_changed_shards()
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._all_gather_result is not None:
            super().wait_for_unshard()
            self._gathered_at = _C.n_steps()
            self._versions = [p._unsharded_param._version for p in self.fsdp_params]

    def _is_outdated(self) -> bool:
        """Whether an optimizer has stepped since; who wrote to the parameters keeps that."""
        return self._gathered_at != _C.n_steps() and self._versions == [
            p._unsharded_param._version for p in self.fsdp_params
        ]

    def _adopt_changed_shards(self) -> None:
        """Shards that were replaced, cast, or are trained now count from here on."""
        for fsdp_param in self.fsdp_params:
            if fsdp_param.is_replaced():
                fsdp_param.reset_sharded_param()
        recast = [p for p in self.fsdp_params if p.is_recast]
        if recast or _versions.lacks_dtypes(self):
            self._init_mp_dtypes()
        for fsdp_param in recast:
            fsdp_param.forget_gathered()

    def _record_post_forward(self) -> None:
        if getattr(self.comm_ctx, "is_backward_expected", True):
            super()._record_post_forward()

    def _backward_prefetch(self) -> None:
        indices = self._post_forward_indices
        if indices and indices[-1] > len(self.comm_ctx.post_forward_order):
            indices.pop()  # the backward of another root in a shared context has ended the order
        else:
            super()._backward_prefetch()

    # ---- gradients ----

    def post_backward(self, *unused: Any) -> None:
        self._refuse_sparse()
        _versions.accumulate_before_reduction(self)
        with self._scaled_as_backend_can(), self._summed_by_parameter():
            super().post_backward(*unused)

    def _refuse_sparse(self) -> None:
        for fsdp_param in self.fsdp_params:
            grad = getattr(getattr(fsdp_param, "_unsharded_param", None), "grad", None)
            if grad is not None and grad.layout != torch.strided:
                fsdp_param._refuse_sparse_gradient()

    @contextlib.contextmanager
    def _scaled_as_backend_can(self) -> Iterator[None]:
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

    @contextlib.contextmanager
    def _summed_by_parameter(self) -> Iterator[None]:
        """Sums that wait for replicas hold all parameters: torch's class adds by position."""
        waits = not self.all_reduce_grads or self._partial_reduce_output is not None
        waits = waits and isinstance(self.mesh_info, DDPMeshInfo)  # else there is no such sum
        if _versions.REPACKS_PARTIAL_SUMS or not self.reduce_grads or not waits:
            yield
            return
        used = {i for i, p in enumerate(self.fsdp_params) if _versions.has_gradient(p)}
        self._in_partial_sum |= used
        with_unused = self.reduce_scatter_unused_params
        had_none = [p.sharded_param.grad is None for p in self.fsdp_params]
        self.reduce_scatter_unused_params = True
        try:
            yield
        finally:
            self.reduce_scatter_unused_params = with_unused
        if self.all_reduce_grads:
            for i, fsdp_param in enumerate(self.fsdp_params):
                if had_none[i] and not with_unused and i not in self._in_partial_sum:
                    fsdp_param.sharded_param.grad = None
            self._in_partial_sum = frozenset()

    def _reset_iter_state(self) -> None:
        _versions.drop_accumulated_gradients(self)
        self._in_partial_sum = frozenset()
        super()._reset_iter_state()

    # ---- state dicts ----

    def show_shards(self) -> None:
        """For a state_dict: without giving up what was gathered, which other ranks may keep."""
        if not self.is_unsharded or self._training_state != TrainingState.IDLE:
            return
        self._shows_shards = True
        for fsdp_param in self.fsdp_params:
            fsdp_param._carry_requires_grad()
            fsdp_param._setattr_on_modules(fsdp_param.sharded_param)

    def _show_gathered(self) -> None:
        if self._shows_shards:
            self._shows_shards = False
            for fsdp_param in self.fsdp_params:
                fsdp_param.to_unsharded()

    def reshard(self) -> None:
        if not (self._is_kept_after_forward and self._training_state == TrainingState.FORWARD):
            super().reshard()

    def _to_sharded(self) -> None:
        self._shows_shards = self._is_kept_after_forward = False
        super()._to_sharded()
