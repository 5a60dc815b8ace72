"""summon_full_params: full parameters in the place of shards for a while."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as _torch
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.utils import _cast_forward_inputs
from torch.utils import _pytree

from fsdp_c._checkpoint import _full, _iter_full_params
from fsdp_c._fully_shard import _param_attributes


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Full parameters (and gradients) while the context lasts; collective on both ends."""
    _check(writeback, rank0_only, offload_to_cpu, with_grads)
    units: list[Any] = _torch.FullyShardedDataParallel.fsdp_modules(module)
    if not recurse:
        units = [unit for unit in units if unit is module]
    with summoned(units, writeback, rank0_only, with_grads):
        yield


def _check(writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    if with_grads and offload_to_cpu:
        raise NotImplementedError("with_grads=True and offload_to_cpu=True is not supported")
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported: what rank 0 writes cannot be"
            " told from what the other ranks keep; pass writeback=False"
        )
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True without rank0_only=True makes a copy of all parameters for each"
            " rank of a host",
            stacklevel=5,
        )


@contextlib.contextmanager
def summoned(
    units: Sequence[Any], writeback: bool, rank0_only: bool = False, with_grads: bool = False
) -> Iterator[None]:
    """Full parameters in the modules of the units (wrappers); collective."""
    for unit in units:
        _check_idle(unit)
    _refuse_torchs(units)
    _reshard(units)
    by_unit = [[_SummonedParam(fsdp_param) for fsdp_param in _params_of(unit)] for unit in units]
    for unit in units:
        for module in unit._unit_modules:
            module.unshard()
        unit.training_state = TrainingState.SUMMON_FULL_PARAMS
    _fetch([param for params in by_unit for param in params], with_grads)
    groups = [group for unit in units for group in unit._groups]
    is_shown = not rank0_only or all(unit.rank == 0 for unit in units)
    try:
        with contextlib.ExitStack() as stack:
            if is_shown:
                stack.enter_context(_marked_summoned(groups))
                for unit in units:
                    for module in unit._unit_modules:
                        stack.enter_context(_without_hooks(module, unit._unit))
                for unit, params in zip(units, by_unit, strict=True):
                    for param in params:
                        stack.enter_context(param.shown(writeback))
                    unit._summoned_params = params
            else:
                _reshard(units)
            yield
    finally:
        _reshard(units)
        for unit in units:
            unit.training_state = TrainingState.IDLE
            unit._summoned_params = []


def forward(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a summoned wrapper: in the dtype that it computes in, if its inputs have or get that."""
    module, dtype = wrapper._fsdp_wrapped_module, wrapper.mixed_precision.param_dtype
    with contextlib.ExitStack() as stack:
        if dtype is not None and wrapper._summoned_params:
            if wrapper._unit._mp_policy.cast_forward_inputs:
                args, kwargs = _cast_forward_inputs(dtype, *args, **kwargs)
            inputs = _pytree.tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.dtype == dtype for leaf in inputs):
                for param in wrapper._summoned_params:
                    stack.enter_context(param.cast(dtype))
        return module(*args, **kwargs)


@contextlib.contextmanager
def _marked_summoned(groups: Sequence[Any]) -> Iterator[None]:
    """A forward of units that are not summoned takes nothing here for a shard that was replaced."""
    for group in groups:
        group.is_summoned = True
    try:
        yield
    finally:
        for group in groups:
            group.is_summoned = False


def _refuse_torchs(units: Sequence[Any]) -> None:
    for group in (group for unit in units for group in unit._groups):
        if reason := getattr(group, "why_torchs", ""):
            raise NotImplementedError(
                f"summon_full_params: torch's implementation runs the model ({reason}), whose units"
                " would put shards in the places of whole parameters: read these with"
                " fsdp_c.iter_full_params(), or gather a state dict"
            )


def _check_idle(unit: Any) -> None:
    if unit.training_state is not TrainingState.IDLE:
        raise AssertionError(
            "Cannot manually unshard parameters when already unsharding parameters"
        )
    if any(group._training_state.name != "IDLE" for group in unit._groups):
        raise AssertionError("Cannot manually unshard parameters during forward/backward")


def _reshard(units: Sequence[Any]) -> None:
    for unit in units:
        for module in unit._unit_modules:
            module.reshard()


class _SummonedParam:
    """A parameter that is unsharded for a while."""

    def __init__(self, fsdp_param: Any) -> None:
        self.places = _param_attributes.registrations(fsdp_param)
        self.shard = self.registered
        self.full: torch.Tensor | None = None  # where the unit's own is of another dtype
        self.grad: torch.Tensor | None = None

    @property
    def registered(self) -> Any:
        module, name = self.places[0]
        return module._parameters[name]

    @contextlib.contextmanager
    def shown(self, writeback: bool) -> Iterator[None]:
        """The unit is unsharded."""
        unsharded = self.registered
        if self.full is not None or self.grad is not None:
            # Of its own: the unit's may accept gradients of another dtype only.
            data = unsharded.detach() if self.full is None else self.full
            param = nn.Parameter(data, requires_grad=self.shard.requires_grad)
            param.grad = self.grad
            self._register(param)
        try:
            yield
        finally:
            if writeback:
                self._write(self.registered)
            self._register(unsharded)

    @contextlib.contextmanager
    def cast(self, dtype: torch.dtype) -> Iterator[None]:
        """What is shown, in another dtype."""
        shown = self.registered
        self._register(nn.Parameter(shown.detach().to(dtype), requires_grad=False))
        try:
            yield
        finally:
            self._register(shown)

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = param

    @torch.no_grad()
    def _write(self, full: Any) -> None:
        _full.copy_into(self.shard, _full.Stored.of(full.detach()))
        if self.grad is not None and full.grad is not None:
            _full.copy_into(self.shard.grad, _full.Stored.of(full.grad))


def _params_of(unit: Any) -> Iterator[Any]:
    for group in unit._groups:
        yield from group.fsdp_params


def _fetch(params: Sequence[_SummonedParam], with_grads: bool) -> None:
    """Gathers what unsharding the units does not bring."""
    cast = [
        (param, param.shard.detach())
        for param in params
        if param.registered.dtype != param.shard.dtype
    ]
    for param, full in _iter_full_params.full_tensors_of(cast):
        param.full = full.clone()
    grads = [(param, param.shard.grad) for param in params if param.shard.grad is not None]
    for param, full in _iter_full_params.full_tensors_of(grads if with_grads else []):
        param.grad = full.clone()


@contextlib.contextmanager
def _without_hooks(module: nn.Module, unit: Any) -> Iterator[None]:
    """The wrapped module runs as it is: there is nothing to gather."""
    own = unit._pre_forward_hook_handle.id, unit._post_forward_hook_handle.id
    kinds = module._forward_pre_hooks, module._forward_hooks
    before = [list(hooks.items()) for hooks in kinds]
    for hooks, key in zip(kinds, own, strict=True):
        del hooks[key]
    try:
        yield
    finally:
        for hooks, key, kept in zip(kinds, own, before, strict=True):
            there = dict(hooks)
            hooks.clear()
            hooks.update((k, hook) for k, hook in kept if k in there or k == key)
            hooks.update(there)
