"""One parameter: torch's FSDPParam, whose tensors are the core's."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor

from fsdp_c import _env
from fsdp_c._compat import _versions
from fsdp_c._compat._versions import ShardPlacementResult, resolve_shard_placement
from fsdp_c._fully_shard import _extended_param, _model_digest, _step_messages
from fsdp_c._fully_shard._param_attributes import copy_attributes, share_hooks
from fsdp_c._fully_shard._param_layout import is_special, outside_of_inference
from fsdp_c._native import _C
from fsdp_c._optim import _replaced_params


class FSDPParam(_versions.AccumulatedGradient, _extended_param.ExtendedParam):
    """Sharding of one parameter."""

    inputs_agree = False  # those of an extension, over ranks
    origin: _model_digest.Origin | None = None
    _former: weakref.ref[torch.Tensor] | None = None
    unit: Any = None  # the FSDPParamGroup, while that is bound to the core

    def adopt(self) -> None:
        """What an object of torch's class lacks."""
        # An extension's methods that hang on the one tensor object, and whether they are bound to
        # it: `module.to()` makes another one.
        self._attached: dict[str, tuple[Any, bool]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.adopt()
        full = _model_digest.sample(args[0]) if args[2].mesh.size() > 1 else None
        super().__init__(*args, **kwargs)
        self.origin = _model_digest.origin_of(full, self.sharded_param)  # until set-up
        _replaced_params.note(
            args[0], self._module_info.param_name, "fully_shard replaced by its shard"
        )

    @property
    def sharded_state(self) -> _fsdp_param.ShardedState:
        if self.unit is not None and self.unit._is_bound:
            return self.unit._sharded_state
        return self.__dict__["sharded_state"]

    @sharded_state.setter
    def sharded_state(self, state: _fsdp_param.ShardedState) -> None:
        self.__dict__["sharded_state"] = state

    @property
    def _sharded_post_forward_param(self) -> Any:
        """What modules show after a forward that reshards to a smaller mesh; else None."""
        if self.unit is None or not self.unit._is_bound:
            return self.__dict__["_sharded_post_forward_param"]
        info = self._module_info
        return info.module._parameters[info.param_name] if self.unit._core_has_slices else None

    @_sharded_post_forward_param.setter
    def _sharded_post_forward_param(self, param: Any) -> None:
        self.__dict__["_sharded_post_forward_param"] = param

    @property
    def _sharded_post_forward_param_data(self) -> Any:
        if self.unit is None or not self.unit._is_bound:
            return self.__dict__["_sharded_post_forward_param_data"]
        param = self._sharded_post_forward_param
        return None if param is None else param._local_tensor.detach().reshape(-1)

    @_sharded_post_forward_param_data.setter
    def _sharded_post_forward_param_data(self, data: Any) -> None:
        self.__dict__["_sharded_post_forward_param_data"] = data

    @property
    def keep_unsharded_storage(self) -> bool:
        """Whether reshard leaves the unsharded parameter's memory as it is (torch 2.15)."""
        return self.__dict__.get("_keeps_storage", False)

    @keep_unsharded_storage.setter
    def keep_unsharded_storage(self, keeps: bool) -> None:
        self.__dict__["_keeps_storage"] = bool(keeps)
        if self.unit is not None and self.unit._is_bound:
            self.unit.keep_storage()

    # ---- set-up ----

    def _init_sharded_param(
        self,
        param: nn.Parameter,
        device: torch.device,
        shard_placement_fn: Any,
        mesh_info: Any = None,
    ) -> None:
        mesh_info = mesh_info or self.mesh_info  # before 2.13 torch has set it, and passes none
        wanted = ShardPlacementResult(None, mesh_info)
        if callable(shard_placement_fn):
            wanted = resolve_shard_placement(shard_placement_fn(param), mesh_info)
            shard_placement_fn = lambda _: wanted  # noqa: E731
        if not _env.is_strict() and is_special(param, wanted):
            self._init_special(param, device, wanted)
        else:
            _fsdp_init._verify_managed_param(self._module_info.param_name, param)
            super()._init_sharded_param(param, device, shard_placement_fn, mesh_info)
        copy_attributes(param, self.sharded_param)
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            warnings.warn(
                f"hooks of parameter '{self._module_info.param_name}' of"
                f" {type(self._module_info.module).__name__} do not run any more: fully_shard"
                " replaces parameters, so register hooks on them afterwards",
                stacklevel=2,
            )

    def _init_sharding_spec_tp(self, param: Any, *args: Any) -> torch.Tensor:
        try:
            return super()._init_sharding_spec_tp(param, *args)
        except NotImplementedError:
            raise
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"parameter '{self._module_info.param_name}' is a DTensor on {param.device_mesh},"
                f" and fully_shard uses {self.mesh_info.mesh}: both meshes need dim names and may"
                f" not have a dim in common ({error})"
            ) from error

    def _init_sharding_spec_spmd(self, param: Any, *args: Any) -> torch.Tensor:
        mesh = self.mesh_info.spmd_mesh
        if param.device_mesh is not mesh and param.device_mesh == mesh and not _env.is_strict():
            param = DTensor(  # an equal mesh is as good
                param._local_tensor,
                dataclasses.replace(param._spec, mesh=mesh),
                requires_grad=param.requires_grad,
            )
        return super()._init_sharding_spec_spmd(param, *args)

    def _init_extensions(self) -> None:
        super()._init_extensions()
        inner = self._sharded_local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            method = inner.__dict__.get(name)
            is_bound = getattr(method, "__self__", None) is inner
            if method is not None:
                self._attached[name] = (method.__func__ if is_bound else method, is_bound)

    def _local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a DTensor's gradient, or a wrapper's numbers; called by the core."""
        local = self._get_grad_inner_tensor(grad)
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if local.size() != self._orig_size:
            raise RuntimeError(
                f"the gradient of parameter '{self._name}' has {tuple(local.size())} on this rank"
                f" and the parameter {tuple(self._orig_size)}: it is placed as {grad.placements}"  # type: ignore[attr-defined]
            )
        if type(local) is not torch.Tensor:
            return torch.empty(local.size(), dtype=local.dtype, device=self.device).copy_(local)
        return local

    def _refuse_sparse_gradient(self) -> None:
        """Called by the core."""
        _step_messages.refuse_sparse_gradient(self)

    def keep_values(self) -> None:
        """For `become_torchs`: the unit is unsharded, and its parameters were perhaps written."""
        if not self.has_extension:
            self._values = _local(self._unsharded_param).detach().clone()

    def become_torchs(self) -> bool:
        """An object of torch's own class that knows no core; returns whether it is unsharded, with
        the values of `keep_values`. Users' hooks of the whole parameter stay."""
        values = self.__dict__.pop("_values", None)
        whole = None if self.has_extension else self.__dict__.get("_unsharded_param")
        n_shards = self._n_shards
        self.forget_whole()
        keeps_storage = self.__dict__.pop("_keeps_storage", None)
        for name in ("_attached", "inputs_agree", "origin", "unit", "inputs", "_next", "_metadata"):
            self.__dict__.pop(name, None)
        self.__class__ = _versions.TorchParam
        if keeps_storage is not None:
            self.keep_unsharded_storage = keeps_storage
        if whole is not None:
            _gather_as_torch(self, n_shards, whole, values)
        return values is not None

    # ---- parameters that were replaced, moved or cast ----

    def reset_sharded_param(self) -> None:
        old = self.sharded_param
        is_in_unit = self.unit is not None and not self.is_extended
        memory = self._sharded_param_data if is_in_unit else None
        self._check_registered()
        self._adopt_registered()
        if memory is not None and not _shares_storage(memory, self._sharded_param_data):
            _leave_place(memory)
        # torch.utils.swap_tensors leaves a hook to Python alone, and autograd's part has none.
        share_hooks(self.sharded_param, self.sharded_param)
        if self.sharded_param is not old:
            is_back = self.sharded_param is self.former()
            self._former = None if is_back else weakref.ref(old)
            _replaced_params.forget(self.sharded_param)
            _replaced_params.note(
                old, self._name, "was replaced, by load_state_dict(assign=True) or by hand"
            )

    @property
    def _name(self) -> str:
        return self._param_fqn or self._module_info.param_name

    def former(self) -> Any:
        """The shard that this one has replaced, until it is put back."""
        return self._former() if self._former is not None else None

    def check_is_there(self, of_unit: str = "") -> None:
        """ValueError if its module has no parameter of its name any more."""
        info = self._module_info
        if info.module._parameters.get(info.param_name) is None:
            raise ValueError(
                f"parameter '{self._name}'{of_unit} is no parameter of its"
                f" {type(info.module).__name__} any more: it was deleted or set to None, or a"
                " parametrization (weight_norm, spectral_norm, pruning) took its place. Do that"
                " before fully_shard"
            )

    def _check_registered(self) -> None:
        self.check_is_there()
        param = getattr(self._module_info.module, self._module_info.param_name)
        sizes = (self.sharded_size, self.padded_sharded_param_size)
        if not isinstance(param, DTensor) or param._local_tensor.size() not in sizes:
            raise ValueError(
                f"parameter '{self._name}' was replaced by a {type(param).__name__} of another"
                " layout: assign a DTensor with the parameter's mesh and placements"
                f" {self._sharding_spec.placements} (distribute_tensor), or copy into it in place"
            )

    def _adopt_registered(self) -> None:
        if not self.is_special:
            with outside_of_inference():
                super().reset_sharded_param()
            inner = self._sharded_local_tensor
            for name, (function, is_bound) in self._attached.items():
                if not hasattr(inner, name):
                    setattr(inner, name, MethodType(function, inner) if is_bound else function)
            return
        param = getattr(self._module_info.module, self._module_info.param_name)
        _versions.take_grad_dtype(self, param)
        self.sharded_param = param
        if param._local_tensor.is_meta:
            return
        if not self.is_placed(param._local_tensor):
            param._local_tensor = self.place(param._local_tensor)
        self._sharding_spec = param._spec
        _versions.forget_specs(self)


def _gather_as_torch(torchs: Any, n_shards: int, old: torch.Tensor, values: Any) -> None:
    """What a parameter of torch's has since its first gather: a whole one, with what hung on the
    old one. Without values its memory is away, as after a reshard."""
    dtype = _local(old).dtype
    numel = torchs._sharded_param_data.numel() * n_shards  # with what pads the shards
    with torch.no_grad(), outside_of_inference():
        gathered = torch.empty(numel, dtype=dtype, device=torchs.device)
        torchs.all_gather_outputs = [gathered]
        torchs.init_unsharded_param()
    whole = torchs._unsharded_param
    copy_attributes(old, whole)
    share_hooks(old, whole)
    if values is None:
        _fsdp_param.free_storage(gathered)
    else:
        _local(whole).detach().copy_(values)


def _shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _leave_place(former: torch.Tensor) -> None:
    """A shard that was replaced keeps its values in memory of its own: whoever has it may put it
    back, as `functional_call` does, and the new one takes its place in the unit's memory."""
    storage = former.untyped_storage()
    if storage.nbytes() == 0 or former.is_meta:
        return
    with torch.no_grad(), outside_of_inference():
        as_bytes = torch.empty(0, dtype=torch.uint8, device=former.device).set_(storage)
        _C.give_memory(tensor=as_bytes, bytes=as_bytes.clone())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
