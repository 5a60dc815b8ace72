"""One call of fully_shard on the fallback: torch's FSDPState, mended.

torch's code fails, or goes on with wrong gradients, after a failed step, where dtypes or
`requires_grad` change and in a few more places. What the core does there is done by the classes
of the fallback too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.utils._pytree import tree_leaves

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _containers, _fqns, _step_messages


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
        _step_messages.warn_of_failed_backward(stacklevel=4)
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
        unit = self._fsdp_param_groups[0]._module_fqn or "(root)"
        _step_messages.warn_of_hidden_output(unit, stacklevel=4)

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

    # ---- called by the core ----

    def _warn_of_hidden_output(self) -> None:
        unit = _fqns.unit_name(self._fsdp_param_groups[0])
        _step_messages.warn_of_hidden_output(unit, stacklevel=2)

    def _warn_of_failed_backward(self) -> None:
        _step_messages.warn_of_failed_backward(stacklevel=2)


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
