"""One parameter: torch's FSDPParam, which here may have no dim, any strides and uneven columns."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c import _env
from fsdp_c._compat import _versions
from fsdp_c._compat._versions import ShardPlacementResult, resolve_shard_placement
from fsdp_c._fully_shard import _all_gather_extension, _fallback, _model_digest
from fsdp_c._optim import _stale

# Attributes of parameters that belong to torch, not to the user.
_TORCHS_OWN = frozenset({"_fsdp_orig_uid", "_is_param", "_local_tensor", "_spec"})


def strides_for(size: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims lie in memory in `order`, outermost first."""
    strides = [1] * len(size)
    step = 1
    for dim in reversed(order if order is not None else range(len(size))):
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims in memory order; None if contiguous, or if elements share or skip memory."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives a parameter what users have set on the one that it stands for."""
    for name, value in source.__dict__.items():
        if name not in _TORCHS_OWN:
            target.__dict__.setdefault(name, value)


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives a parameter the hooks of one that it replaces; their handles remove them from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, name, None):
            setattr(target, name, hooks)


def registrations(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """The modules, and the names there, that a parameter is registered under."""
    info = fsdp_param._module_info
    return [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]


class FSDPParam(_versions.AccumulatedGradient, _fallback.FallbackParam):
    """Sharding of one parameter.

    What torch refuses is *special* here, and only the core can run it: parameters without dims are
    replicated, other strides than contiguous ones are kept, and a shard of any dim is padded only
    behind its last element.
    """

    is_special = False
    # Dims in memory order, outermost first; None: contiguous.
    memory_order: tuple[int, ...] | None = None
    _inputs: Sequence[torch.Tensor] = ()  # of the all-gather that is being made
    inputs_agree = False  # those of an extension, over ranks
    is_recast = False  # the shard's dtype has changed since set-up
    _is_alias = False  # what is gathered is the shard's own memory
    _held: torch.Tensor | None = None  # a gradient of micro-batches, while nothing is gathered
    origin: _model_digest.Origin | None = None
    unit: Any = None  # the FSDPParamGroup, while that is bound to the core

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An extension's methods that hang on the one tensor object, and whether they are bound to
        # it: `module.to()` makes another one.
        self._attached: dict[str, tuple[Any, bool]] = {}
        whole = _model_digest.sample(args[0]) if args[2].mesh.size() > 1 else None
        super().__init__(*args, **kwargs)
        self.origin = _model_digest.origin_of(whole, self.sharded_param)  # until set-up
        _stale.note(args[0], self._module_info.param_name, "fully_shard replaced by its shard")

    @property
    def sharded_state(self) -> _fsdp_param.ShardedState:
        if self.unit is not None and self.unit._is_bound:
            return self.unit._sharded_state
        return self.__dict__["sharded_state"]

    @sharded_state.setter
    def sharded_state(self, state: _fsdp_param.ShardedState) -> None:
        self.__dict__["sharded_state"] = state

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

    @torch.no_grad()
    def _init_special(
        self, param: nn.Parameter, device: torch.device, wanted: ShardPlacementResult
    ) -> None:
        """Lets torch shard the parameter with its rows in front, then lays the shard out again."""
        dim = _shard_dim(param, wanted)
        rows = param.detach().movedim(dim, 0) if param.ndim else param.detach().view(1)
        stand_in = nn.Parameter(rows.contiguous(), requires_grad=param.requires_grad)
        uid = _versions.get_orig_param_uid(param)
        stand_in._fsdp_orig_uid = uid  # type: ignore[attr-defined]
        _versions.copy_grad_dtype(param, stand_in)
        by_rows = ShardPlacementResult(Shard(0), wanted.mesh_info)
        super()._init_sharded_param(stand_in, device, lambda _: by_rows, wanted.mesh_info)

        self.is_special = True
        self.memory_order = memory_order(param)
        padded = list(self.padded_sharded_param_size)
        if param.ndim:
            self.fsdp_placement = Shard(dim)
            local = self._sharded_local_tensor.movedim(0, dim)
            padded.insert(dim, padded.pop(0))
        else:
            self.fsdp_placement = Replicate()
            local = param.detach()
            padded = []
        self._init_sharding_spec(param, self.fsdp_placement, dim)
        self._sharding_spec = dataclasses.replace(
            self._sharding_spec,
            tensor_meta=TensorMeta(
                param.size(), strides_for(param.size(), self.memory_order), param.dtype
            ),
        )
        _versions.forget_specs(self)
        self._orig_size = param.size()
        self._contiguous_orig_stride = strides_for(param.size(), None)
        self.sharded_size = local.size()
        self.contiguous_sharded_stride = strides_for(local.size(), None)
        self.padded_sharded_param_size = torch.Size(padded)
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(self.place(local)), requires_grad=param.requires_grad
        )
        _versions.copy_grad_dtype(param, self.sharded_param)
        self._setattr_on_modules(self.sharded_param)

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

    def _init_sharded_post_forward_param_metadata(self, param: torch.Tensor) -> None:
        if self.is_special:  # these are never resharded to another mesh
            return
        super()._init_sharded_post_forward_param_metadata(param)
        dim, mesh_info = self.fsdp_placement.dim, self.post_forward_mesh_info
        if dim > 0 and mesh_info is not self.mesh_info:
            size = list(self._orig_size)
            size[dim] //= mesh_info.shard_mesh_size
            self.sharded_post_forward_size = torch.Size(size)
            self.contiguous_sharded_post_forward_stride = strides_for(size, None)

    def init_unsharded_param(self) -> None:
        is_new = not hasattr(self, "_unsharded_param")
        if hasattr(self._sharded_local_tensor, "fsdp_post_all_gather"):
            self._run_extension(is_new)
        else:
            super().init_unsharded_param()
        if is_new:
            copy_attributes(self.sharded_param, self._unsharded_param)
            if self._held is not None:
                held, self._held = self._held, None
                self._unsharded_param.grad = held.to(_versions.leaf_grad_dtype(self))

    @torch.no_grad()  # what the user's code computes there is no part of the model's graph
    def _run_extension(self, is_new: bool) -> None:
        try:
            super().init_unsharded_param()
        except RuntimeError as error:
            if is_new or self.fsdp_placement != Shard(0):
                raise
            rows = self._orig_size[0]
            padded = self.padded_sharded_param_size[0] * self.mesh_info.shard_mesh_size
            if padded == rows:
                raise
            name = self._param_fqn or self._module_info.param_name
            raise RuntimeError(
                f"{error}\nThis was raised by fsdp_post_all_gather of parameter '{name}', which"
                f" has {rows} rows, as has `out`, while the gathered tensors have {padded}, the"
                " last of them padding: narrow them to the rows of `out`"
            ) from error

    # ---- resharded to a smaller mesh after forward; on the fallback only ----

    def check_post_forward(self) -> None:
        """NotImplementedError at set-up for what torch's class finds out in mid-step."""
        has_extension = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if self.is_dtensor or has_extension:
            what = "has an all-gather extension" if has_extension else "is a DTensor of its own"
            raise NotImplementedError(
                f"reshard_after_forward is an int, and parameter '{self._param_fqn}' {what}, which"
                " cannot be resharded to a smaller mesh: pass True or False"
            )

    @torch.no_grad()
    def to_sharded_post_forward(self) -> None:
        dim = self.fsdp_placement.dim
        if dim == 0 and self._orig_size[0] % self.mesh_info.shard_mesh_size == 0:
            super().to_sharded_post_forward()
            return
        # torch's class cuts the padded buffer in pieces, which here are not those of the mesh.
        info = self.post_forward_mesh_info
        parts = _fsdp_param._chunk_with_empty(
            self._unsharded_param.detach(), info.shard_mesh_size, dim=dim
        )
        own = parts[info.shard_mesh_rank].clone(memory_format=torch.contiguous_format)
        super().to_sharded_post_forward()
        self._sharded_post_forward_param._local_tensor = own
        if dim > 0:
            self._sharded_post_forward_param_data = own

    def to_sharded_post_forward_dtensor(self, tensor: torch.Tensor) -> DTensor:
        shard = super().to_sharded_post_forward_dtensor(tensor)
        if self.fsdp_placement.dim > 0:
            shard._spec = DTensorSpec(
                shard.device_mesh,
                (Replicate(), self.fsdp_placement),
                tensor_meta=shard._spec.tensor_meta,
            )
        return shard

    # ---- what is gathered; on the fallback only ----

    def _init_extensions(self) -> None:
        super()._init_extensions()
        inner = self._sharded_local_tensor
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            method = inner.__dict__.get(name)
            is_bound = getattr(method, "__self__", None) is inner
            if method is not None:
                self._attached[name] = (method.__func__ if is_bound else method, is_bound)

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        self._settle_alias()
        if self._is_alias:
            return self.all_gather_outputs  # torch's group copies it onto itself: nothing
        with _all_gather_extension.checked(self):
            self._inputs = [tensor.view(-1) for tensor in super().all_gather_inputs]
        return self._inputs

    def init_all_gather_outputs(
        self,
        numels: list[int],
        dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        inputs, self._inputs = self._inputs, []
        if world_size > 1 or len(inputs) < 2:
            super().init_all_gather_outputs(numels, dtypes, world_size, device, **kwargs)
            return
        # Of an extension's inputs torch's group copies only the first if there is nobody to ask.
        super().init_all_gather_outputs(
            [tensor.numel() for tensor in inputs],
            [tensor.dtype for tensor in inputs],
            1,
            device,
            **kwargs,
        )
        self.alloc_all_gather_outputs()
        for output, tensor in zip(self.all_gather_outputs[1:], inputs[1:], strict=True):
            with torch.autograd._unsafe_preserve_version_counter(output):
                output.copy_(tensor)

    # ---- a rank that holds all of it: the unsharded parameter is the shard's memory ----

    def _can_alias(self) -> bool:
        info, local = self.mesh_info, self._sharded_local_tensor
        return (
            # A shard mesh of one rank keeps torch's rule: what forward writes is dropped.
            not isinstance(info, FSDPMeshInfo)
            and self.param_dtype is None
            and not (self.offload_to_cpu or self.is_special or _env.is_strict())
            and type(local) is torch.Tensor
            and not hasattr(local, "fsdp_pre_all_gather")
            and local.is_contiguous()
            # Torch's group would cut storage of another size.
            and local.untyped_storage().nbytes() == math.prod(self._orig_size) * local.itemsize
        )

    def _settle_alias(self) -> None:
        """Before a gather: shows the shard, as it is now, as what was gathered; or no longer."""
        was_alias, self._is_alias = self._is_alias, self._can_alias()
        local = self._sharded_local_tensor
        if self._is_alias:
            outputs = self.all_gather_outputs
            if was_alias and outputs[0].data_ptr() == local.data_ptr():
                return
            # Not a view: writes to the shard are none to what autograd has saved of this one.
            output = torch.empty(0, dtype=local.dtype).set_(
                local.untyped_storage(), 0, (local.numel(),)
            )
        elif was_alias:
            output = torch.empty(local.numel(), dtype=self.param_dtype or local.dtype)
        else:
            return
        self.all_gather_outputs = [output]
        if hasattr(self, "_unsharded_param"):
            shown: Any = self._unsharded_param
            shown = shown._local_tensor if isinstance(shown, DTensor) else shown
            with torch.autograd._unsafe_preserve_version_counter(shown):
                shown.data = output.view(self._orig_size)

    def free_unsharded_param(self) -> None:
        if not self._is_alias:
            super().free_unsharded_param()

    # ---- layout ----

    @property
    def unsharded_stride(self) -> tuple[int, ...]:
        return strides_for(self._orig_size, self.memory_order)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return strides_for(self.sharded_size, self.memory_order)

    @property
    def copies(self) -> int:
        """How often the unsharded buffer holds a replicated parameter: once per rank; else 1."""
        return 1 if self._orig_size else self.mesh_info.shard_mesh_size

    def geometry(self) -> tuple[int, int, int]:
        """The full parameter as the core sees it, in memory order: [outer, rows, inner]."""
        if not self._orig_size:
            return 1, self.copies, 1
        dim = self.fsdp_placement.dim
        order = self.memory_order or range(len(self._orig_size))
        size = [self._orig_size[d] for d in order]
        at = list(order).index(dim)
        return math.prod(size[:at]), size[at], math.prod(size[at + 1 :])

    def is_placed(self, local: torch.Tensor) -> bool:
        """Whether a shard lies at the start of storage of its padded size, as the core wants it."""
        laid_out = local if self.memory_order is None else local.permute(self.memory_order)
        return (
            local.storage_offset() == 0
            and laid_out.is_contiguous()
            and local.untyped_storage().nbytes()
            == math.prod(self.padded_sharded_param_size) * local.itemsize
        )

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """A copy of a shard in such a place."""
        size = math.prod(self.padded_sharded_param_size)
        data = local.new_zeros(size, pin_memory=local.is_pinned())
        own = data.as_strided(local.size(), strides_for(local.size(), self.memory_order))
        own.copy_(local)
        self._sharded_param_data = data
        return own

    # ---- parameters that were replaced, moved or cast ----

    def reset_sharded_param(self) -> None:
        old = self.sharded_param
        self._check_registered()
        self._adopt_registered()
        if self.sharded_param.dtype != getattr(self, "orig_dtype", self.sharded_param.dtype):
            self.is_recast = True
        if self.sharded_param is not old:
            _stale.forget(self.sharded_param)
            _stale.note(old, self._name, "was replaced, by load_state_dict(assign=True) or by hand")

    def forget_gathered(self) -> None:
        """What was gathered has another dtype than what will be: the next gather makes it anew."""
        self.is_recast = self._is_alias = False
        self.all_gather_outputs = []
        if (unsharded := self.__dict__.pop("_unsharded_param", None)) is not None:
            self._held = unsharded.grad

    @property
    def _name(self) -> str:
        return self._param_fqn or self._module_info.param_name

    def _check_registered(self) -> None:
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


def is_special(param: nn.Parameter, wanted: ShardPlacementResult) -> bool:
    """Whether torch's FSDPParam would refuse the parameter and ours need not."""
    info = wanted.mesh_info
    if (
        type(param) is not nn.Parameter
        or not isinstance(info, FSDPMeshInfo)
        or _versions.is_spmd(info)
        or not isinstance(wanted.placement or Shard(0), Shard)
        or _versions.is_annotated(param)
    ):
        return False
    if param.ndim == 0:
        return True
    dim = _shard_dim(param, wanted)
    if not 0 <= dim < param.ndim:
        return False
    return not param.is_contiguous() or (dim > 0 and param.size(dim) % info.shard_mesh_size != 0)


def _shard_dim(param: nn.Parameter, wanted: ShardPlacementResult) -> int:
    dim = wanted.placement.dim if wanted.placement is not None else 0
    return dim + param.ndim if dim < 0 else dim
