"""Roots that torch's implementation runs: classes between torch's and fsdp_c's that mend it.

torch's code fails, or goes on with wrong gradients, after a failed step, where dtypes or
`requires_grad` change and in a few more places. What the core does there is done here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    TrainingState,
    _cast_fp_tensor,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils._pytree import tree_leaves

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _containers
from fsdp_c._native import _C


class FallbackParam(_versions.TorchParam):
    """One parameter."""

    _was_trained = False  # the unsharded parameter, when it was registered
    _known_local: Tensor | None = None  # the shard that the last gather has read

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        with _outside_of_inference():
            super().init_all_gather_outputs(*args, **kwargs)

    def init_unsharded_param(self) -> None:
        with _outside_of_inference():
            super().init_unsharded_param()

    def is_replaced(self) -> bool:
        """Whether the shard is not the one that was registered, or lies elsewhere."""
        info, known = self._module_info, self._known_local
        registered = info.module._parameters.get(info.param_name, self.sharded_param)
        self._known_local = local = getattr(registered, "_local_tensor", None)
        return registered is not self.sharded_param or (known is not None and local is not known)

    def to_unsharded(self) -> None:
        super().to_unsharded()
        self._was_trained = self._unsharded_param.requires_grad

    def to_sharded(self) -> None:
        self._carry_requires_grad()
        super().to_sharded()

    def to_sharded_post_forward(self) -> None:
        self._carry_requires_grad()
        super().to_sharded_post_forward()

    def _carry_requires_grad(self) -> None:
        """What was changed on the unsharded parameter counts for the shard."""
        if self.sharded_state == ShardedState.UNSHARDED:
            is_trained = self._unsharded_param.requires_grad
            if is_trained != self._was_trained:
                self.sharded_param.requires_grad_(is_trained)


@contextlib.contextmanager
def _outside_of_inference() -> Iterator[None]:
    """What is made here is trained later, also if the first forward is in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class FallbackGroup(_versions.TorchGroup):
    """One unit."""

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
                self._take_over_changes()
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

    def _take_over_changes(self) -> None:
        """Shards that were replaced, cast, or are trained now count from here on."""
        for fsdp_param in self.fsdp_params:
            if fsdp_param.is_replaced():
                fsdp_param.reset_sharded_param()
        recast = [p for p in self.fsdp_params if p.is_recast]
        if recast or _versions.lacks_dtypes(self):
            self._init_mp_dtypes()
        for fsdp_param in recast:
            fsdp_param.forget_gathered()

    def _backward_prefetch(self) -> None:
        indices = self._post_forward_indices
        if indices and indices[-1] > len(self.comm_ctx.post_forward_order):
            indices.pop()  # the backward of another root in a shared context has ended the order
        else:
            super()._backward_prefetch()

    # ---- gradients ----

    def post_backward(self, *unused: Any) -> None:
        self._refuse_sparse()
        _versions.even_out_gradients(self)
        with self._by_parameter():
            super().post_backward(*unused)

    def _refuse_sparse(self) -> None:
        for fsdp_param in self.fsdp_params:
            grad = getattr(getattr(fsdp_param, "_unsharded_param", None), "grad", None)
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of parameter '{fsdp_param._param_fqn}' is sparse, which cannot"
                    " be reduced: build the module with sparse=False"
                )

    @contextlib.contextmanager
    def _by_parameter(self) -> Iterator[None]:
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
        _versions.drop_held_gradients(self)
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


class FallbackState(_versions.TorchState):
    """One call of fully_shard."""

    def _init_shared_state(self) -> None:
        comm = self._comm_ctx
        is_live = hasattr(comm, "all_gather_stream")  # shared with a root that has run already
        kept = dict(vars(comm)) if is_live else {}
        super()._init_shared_state()
        kept["reduce_scatter_max_input_buffers"] = max(
            comm.reduce_scatter_max_input_buffers, kept.get("reduce_scatter_max_input_buffers", 1)
        )
        vars(comm).update(kept)

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self._state_ctx
        if context.post_backward_final_callback_queued and not in_backward():
            self._recover()
        return super()._pre_forward(module, args, kwargs)

    def _recover(self) -> None:
        """The engine does not call back after an exception: the previous backward has failed."""
        warnings.warn(
            "the previous backward ended in an exception: its gradients, and those kept from"
            " earlier backwards without synchronisation, are dropped",
            stacklevel=4,
        )
        states = self._state_ctx.all_states
        params = [p for s in states for g in s._fsdp_param_groups for p in g.fsdp_params]
        grads = [p.sharded_param.grad for p in params]
        states[0]._reset_iter_state()
        for fsdp_param, grad in zip(params, grads, strict=True):
            fsdp_param.sharded_param.grad = grad  # reduced ones stay

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if not self._is_hidden(output):
            return super()._post_forward(module, input, output)
        self._hook_params()
        groups = self._fsdp_param_groups
        infos = [group.post_forward_mesh_info for group in groups]
        for group in groups:
            group.post_forward_mesh_info = None  # kept for the backward, which nothing announces
        try:
            return super()._post_forward(module, input, output)
        finally:
            for group, info in zip(groups, infos, strict=True):
                group.post_forward_mesh_info = info

    def _is_hidden(self, output: Any) -> bool:
        """Whether tensors that need gradients may be where torch's code does not look."""
        return (
            self._training_state == TrainingState.FORWARD
            and torch.is_grad_enabled()
            and not in_backward()
            and any(p._unsharded_param.requires_grad for p in self._gathered_params())
            and not any(isinstance(x, Tensor) and x.requires_grad for x in _leaves(output))
            and not all(_is_transparent(x) for x in _leaves(output))
        )

    def _gathered_params(self) -> Iterator[Any]:
        for group in self._fsdp_param_groups:
            if group.is_unsharded:
                yield from group.fsdp_params

    def _hook_params(self) -> None:
        """Backward begins for this unit when the first of its parameters gets a gradient."""
        new = [
            p._unsharded_param
            for p in self._gathered_params()
            if p._unsharded_param.requires_grad and "_fsdp_c_hook" not in vars(p._unsharded_param)
        ]
        if not new:
            return
        for param in new:
            param._fsdp_c_hook = param.register_hook(self._on_hidden_gradient)
        name = self._fsdp_param_groups[0]._module_fqn or "(root)"
        warnings.warn(
            f"FSDP unit '{name}' has no tensor in its output that needs a gradient and that FSDP"
            " can find (it looks into tuples, lists, dicts and dataclasses). If one is hidden"
            " there, return it in one of these; until then the unit keeps its full parameters from"
            " forward to backward",
            stacklevel=4,
        )

    def _on_hidden_gradient(self, grad: Tensor) -> None:
        if self._training_state == TrainingState.IDLE:
            self._pre_backward(grad)

    def _cast_forward_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (self._mp_policy.cast_forward_inputs and self._mp_policy.param_dtype):
            return args, kwargs
        with torch.profiler.record_function("FSDP::cast_forward_inputs"):
            cast = functools.partial(_cast_fp_tensor, self._mp_policy.param_dtype)
            return (
                _containers.apply_to_tensors(cast, args),
                _containers.apply_to_tensors(cast, kwargs),
            )

    def _cast_output_dtype(self, output: Any) -> Any:
        if self._mp_policy.output_dtype is None:
            return output
        with torch.profiler.record_function("FSDP::cast_forward_outputs"):
            cast = functools.partial(_cast_fp_tensor, self._mp_policy.output_dtype)
            return _containers.apply_to_tensors(cast, output)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _leaves(value: Any) -> Iterable[Any]:
    """What containers hold, dataclasses among them."""
    for leaf in tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def _is_transparent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | int | float | complex | str | bytes | torch.dtype)
