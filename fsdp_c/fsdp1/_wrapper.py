"""FullyShardedDataParallel: the class of FSDP1 whose wrapped modules are units of fully_shard."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from enum import EnumMeta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    _init_utils,
    _runtime_utils,
)
from torch.distributed.fsdp import fully_sharded_data_parallel as _torch
from torch.distributed.fsdp._common_utils import (
    TrainingState,
    _is_fsdp_flattened,
    _set_fsdp_flattened,
)
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from fsdp_c._fully_shard import _param_group_state_dict
from fsdp_c._fully_shard._fully_shard import fully_shard
from fsdp_c._native import _C
from fsdp_c.fsdp1 import (
    _bridge,
    _clip,
    _hooks,
    _materialize,
    _meshes,
    _state_dicts,
    _summon,
)

if TYPE_CHECKING:  # a class to derive from, which a variable is not
    from torch.distributed.fsdp import FullyShardedDataParallel as _TORCHS
else:
    _TORCHS = _torch.FullyShardedDataParallel
_FLAT = ("_flat_param", "flat_param", "flat_params", "_flat_params")  # not there
_KEEPS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class _InTorchsPlace(type):
    """While names of torch's class are bound to ours, torch's own objects are found by them."""

    stands_for_torchs = False

    def __instancecheck__(cls, module: Any) -> bool:
        is_for_all = cls.stands_for_torchs and cls is FullyShardedDataParallel
        return type.__instancecheck__(_TORCHS if is_for_all else cls, module)


class FullyShardedDataParallel(_TORCHS, metaclass=_InTorchsPlace):
    """FSDP1's wrapper, with the arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``.

    The wrapped module becomes a unit of ``fully_shard`` and runs where that runs. Parameters have
    the names that FSDP1 gives them under ``use_orig_params=True``, whatever that argument is, and
    are DTensors: each keeps its own shape and is sharded on dim 0, where FSDP1 cuts a flat
    parameter into 1-D pieces. So local shapes differ from FSDP1's, state dicts do not. Works on CPU
    ranks without ``device_id``. ``backward_prefetch``, ``forward_prefetch`` and
    ``limit_all_gathers`` are taken and have nothing to order over shared memory.

    Examples:
        >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
        >>> wrapped(x).sum().backward()
        >>> wrapped.clip_grad_norm_(1.0)
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        nn.Module.__init__(self)
        _bridge.connect(FullyShardedDataParallel)
        _check_types(
            module=(module, nn.Module),
            process_group=(process_group, dist.ProcessGroup | tuple),
            sharding_strategy=(sharding_strategy, ShardingStrategy),
            cpu_offload=(cpu_offload, CPUOffload),
            backward_prefetch=(backward_prefetch, BackwardPrefetch),
            mixed_precision=(mixed_precision, MixedPrecision),
            param_init_fn=(param_init_fn, Callable),
            device_mesh=(device_mesh, DeviceMesh),
        )
        _check(module, mixed_precision)
        _init_utils._init_ignored_module_states(self, module, ignored_modules, ignored_states)
        device = _materialize.device_of(module, self._ignored_params, device_id)
        _init_utils._init_device_handle(self, module, self._ignored_params, device)
        self._init_groups(process_group, sharding_strategy, auto_wrap_policy, device_mesh, device)
        if auto_wrap_policy is not None:
            options = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": True,  # frozen and trainable parameters may share a unit
                "ignored_states": self._ignored_params,
                "device_mesh": device_mesh,
            }
            if self._inter_node_pg is not None and device_mesh is None:
                options["process_group"] = (self.process_group, self._inter_node_pg)
            _auto_wrap(
                module,
                auto_wrap_policy,
                self._ignored_modules,
                self._ignored_params,
                options,
                FullyShardedDataParallel,
            )
        _init_utils._init_core_state(
            self, sharding_strategy, mixed_precision, cpu_offload, limit_all_gathers, True, 1, 1
        )
        _init_utils._init_runtime_state(self)
        _init_utils._init_prefetching_state(self, backward_prefetch, forward_prefetch)
        _init_utils._init_buffer_state(self, module)
        self.compute_device = device
        _check_container(self, module)
        for unit in self.fsdp_modules(module):
            unit._become_nested()
        _materialize.prepare(self, module, device, param_init_fn, sync_module_states)
        self._fsdp_wrapped_module = module
        self._made_unit: Any = None
        self._summoned_params: list[Any] = []  # while its parameters are summoned
        if not (_is_container(module) or isinstance(module, FullyShardedDataParallel)):
            self._shard(device_mesh)
        self._is_root = True
        self._has_cast_buffers = False
        _init_utils._init_state_dict_state(self)
        _state_dicts.register(self)

    # ---- set-up ----

    def _init_groups(
        self,
        process_group: Any,
        strategy: ShardingStrategy | None,
        policy: Any,
        mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self._device_mesh = mesh
        self._inter_node_pg: dist.ProcessGroup | None = None
        if (
            strategy is not None
            and _meshes.is_hybrid(strategy)
            and policy is not None
            and process_group is None
            and mesh is None
        ):
            process_group = _meshes.host_groups(device.type)
        _init_utils._init_process_group_state(self, process_group, strategy, policy, mesh)

    def _shard(self, given: DeviceMesh | None) -> None:
        """Makes the wrapped module a unit."""
        module, strategy, device = (
            self._fsdp_wrapped_module,
            self.sharding_strategy,
            self.compute_device,
        )
        mesh = _meshes.mesh_for(
            strategy, self.process_group, self._inter_node_pg, given, device.type
        )
        precision = self.mixed_precision
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False if strategy in _KEEPS else None,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype or precision.param_dtype,
                cast_forward_inputs=(
                    precision.cast_root_forward_inputs or precision.cast_forward_inputs
                ),
            ),
            offload_policy=(
                CPUOffloadPolicy(pin_memory=device.type != "cpu")
                if self.cpu_offload.offload_params
                else OffloadPolicy()
            ),
            ignored_params=self._ignored_params,
        )
        self._made_unit = module._get_fsdp_state()
        self._made_unit._fills_in_gradients = False  # FSDP1 has no autograd.Function on inputs
        module.set_reduce_scatter_unused_params(True)  # the flat gradient has zeros there
        for group in self._groups:
            for fsdp_param in group.fsdp_params:
                _set_fsdp_flattened(fsdp_param.sharded_param)

    @property
    def _unit(self) -> Any:
        """The state of the wrapped module, which the first forward may hand over to torch's."""
        return getattr(self._made_unit, "torchs", None) or self._made_unit

    @property
    def _groups(self) -> list[Any]:
        return self._unit._fsdp_param_groups if self._unit is not None else []

    @property
    def _unit_modules(self) -> tuple[Any, ...]:
        """The module that was sharded; activation checkpointing may stand before it now."""
        return self._unit._modules if self._unit is not None else ()

    def _become_nested(self) -> None:
        """A wrapper around this one casts the inputs of the root."""
        was_root, self._is_root = self._is_root, False
        if was_root and self._unit is not None:
            unit, policy = self._unit, self._unit._mp_policy
            is_cast = self.mixed_precision.cast_forward_inputs
            unit._mp_policy = dataclasses.replace(policy, cast_forward_inputs=is_cast)
            if isinstance(unit, _C.State):
                unit._set_casts(
                    cast_inputs=is_cast,
                    param_dtype=policy.param_dtype,
                    output_dtype=policy.output_dtype,
                )

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training_state is not TrainingState.IDLE and torch.is_grad_enabled():
            raise RuntimeError(
                "training inside of summon_full_params: gradients of whole parameters would be lost"
                " with them; leave the context before, or run forward under torch.no_grad()"
            )
        if self._is_root and not self._has_cast_buffers:
            self._cast_buffers()
        if self.training_state is not TrainingState.IDLE:
            return _summon.forward(self, args, kwargs)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def _cast_buffers(self) -> None:
        buffers, dtypes = _runtime_utils._get_buffers_and_dtypes_for_computation(self, self)
        _runtime_utils._cast_buffers_to_dtype_and_device(buffers, dtypes, self.compute_device)
        self._has_cast_buffers = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave gradients on this rank; the first one after adds them up.

        Examples:
            >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
            >>> with wrapped.no_sync():
            ...     wrapped(x).sum().backward()
            >>> wrapped(x).sum().backward()
        """
        if not self._is_root:
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on"
                " root FSDP module."
            )
        units = [unit for unit in self.fsdp_modules(self) if unit._sync_gradients]
        for unit in units:
            unit._set_sync(False)
        try:
            yield
        finally:
            for unit in units:
                unit._set_sync(True)

    def _set_sync(self, is_on: bool) -> None:
        self._sync_gradients = is_on
        for module in self._unit_modules:
            module.set_requires_gradient_sync(is_on, recurse=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all parameters; returns their norm before, a plain tensor.

        Examples:
            >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
            >>> wrapped(x).sum().backward()
            >>> norm = wrapped.clip_grad_norm_(1.0)
        """
        if not self._is_root:
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance"
            )
        return _clip.clip(list(self.parameters()), float(max_norm), float(norm_type))

    def check_is_root(self) -> bool:
        return self._is_root

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Calls the function on all modules, whose parameters are whole meanwhile.

        Examples:
            >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
            >>> wrapped.apply(lambda m: print(type(m).__name__, sum(1 for _ in m.parameters())))
        """
        with _summon.summoned([self], writeback=True):
            return nn.Module.apply(self, fn)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._apply(self, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Shards, also of units that the last forward has left whole; whole ones if summoned.

        Examples:
            >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
            >>> shards = {name: param.to_local() for name, param in wrapped.named_parameters()}
        """
        for wrapper in self.fsdp_modules(self):
            if wrapper.training_state is TrainingState.IDLE:
                for group in wrapper._groups:
                    _param_group_state_dict.show_shards(group)
        yield from super().named_parameters(*args, **kwargs)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Lets the hook add gradients up, for all units; see `_hooks.register`.

        Examples:
            >>> from torch.distributed.algorithms._comm_hooks import default_hooks
            >>> wrapped = fsdp_c.FullyShardedDataParallel(model)
            >>> state = default_hooks.LowPrecisionState(torch.distributed.group.WORLD)
            >>> wrapped.register_comm_hook(state, default_hooks.bf16_compress_hook)
        """
        if not self._is_root:
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        _hooks.register(self.fsdp_modules(self), state, hook)

    @property
    def _flat_param(self) -> Any:
        raise AttributeError

    def __getattr__(self, name: str) -> Any:
        if name in _FLAT:
            raise AttributeError(
                f"{type(self).__name__} has no '{name}': there are no flat parameters. Each"
                " parameter keeps its name and shape and is a DTensor: use named_parameters()"
            )
        return super().__getattr__(name)


def _check_types(**given: tuple[Any, Any]) -> None:
    """Before anything is made: torch says of most of these that some object lacks an attribute."""
    for name, (value, kind) in given.items():
        if not (isinstance(value, kind) or (value is None and name != "module")):
            wanted = "a function" if kind is Callable else getattr(kind, "__name__", str(kind))
            raise TypeError(
                f"FullyShardedDataParallel: {name}={value!r}: pass {wanted}"
                f"{', such as ' + str(next(iter(kind))) if isinstance(kind, EnumMeta) else ''}"
            )


def _check(module: nn.Module, precision: MixedPrecision | None) -> None:
    if isinstance(module, _TORCHS) and not isinstance(module, FullyShardedDataParallel):
        raise ValueError("the module is one of torch's FullyShardedDataParallel already")
    if precision is not None and precision.keep_low_precision_grads:
        warnings.warn(
            "keep_low_precision_grads=True has no effect: gradients have the parameters' dtype;"
            " with fully_shard and torch 2.15 set param.grad_dtype",
            stacklevel=3,
        )


def _is_container(module: nn.Module) -> bool:
    """Whether it has no forward to gather anything for."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    )


def _check_container(wrapper: Any, module: nn.Module) -> None:
    """Containers can be wrapped if the parameters in them all belong to wrappers of their own."""
    rest = _init_utils._get_orig_params(module, wrapper._ignored_params)
    if _is_container(module) and any(not _is_fsdp_flattened(param) for param in rest):
        raise ValueError(
            f"FullyShardedDataParallel got a {type(module).__name__}, which has no forward: wrap"
            " its members, or the module that calls them"
        )
