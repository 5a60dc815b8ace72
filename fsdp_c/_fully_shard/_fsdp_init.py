"""Set-up of a fully_shard call: checking arguments, and undoing a call that fails."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_api import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor

from fsdp_c import _env
from fsdp_c._compat._versions import ShardPlacementResult, resolve_shard_placement
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._fsdp_state import FSDPState
from fsdp_c._optim import _replaced_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


def check_arguments(
    module: Any, mesh: DeviceMesh | None, mp_policy: Any, offload_policy: Any
) -> None:
    """What torch would only notice later, or not at all."""
    if not isinstance(module, nn.Module):
        try:
            members = list(module)
        except TypeError:
            raise TypeError(
                f"fully_shard expects a module or a list of modules, but {type(module).__name__}"
                " object is not iterable"
            ) from None
        if not members:
            raise ValueError("fully_shard got an empty list for argument `module`")
        for member in members:
            if not isinstance(member, nn.Module):
                raise TypeError(f"fully_shard expects modules, not {type(member).__name__}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, not {mesh!r}")
    if mesh is not None and mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh}: only its ranks may call"
            " fully_shard"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy instance, not {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy must be an OffloadPolicy instance, not {offload_policy!r}:"
            " write CPUOffloadPolicy() with parentheses"
        )
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, field)
        is_dtype = isinstance(dtype, torch.dtype)
        if dtype is not None and not (is_dtype and (dtype.is_floating_point or dtype.is_complex)):
            raise ValueError(
                f"MixedPrecisionPolicy.{field} must be a floating-point torch.dtype or None,"
                f" not {dtype!r}"
            )
    if mesh is None and not dist.is_initialized():
        try:
            dist.init_process_group()
        except (ValueError, RuntimeError) as error:
            raise RuntimeError(
                "fully_shard needs a process group: launch the script with torchrun, call"
                f" torch.distributed.init_process_group() first, or pass `mesh` ({error})"
            ) from error


def ignored_set(ignored_params: Any) -> set[nn.Parameter] | None:
    """The argument as a set; any collection of parameters will do."""
    if ignored_params is None or isinstance(ignored_params, set) or _env.is_strict():
        return ignored_params
    try:
        return set(ignored_params)
    except TypeError:
        raise TypeError(
            f"ignored_params must be a collection of parameters, not {ignored_params!r}"
        ) from None


def managed_states(
    managed: Sequence[nn.Module], ignored_params: set[nn.Parameter] | None
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Parameters and buffers of the managed modules, each once, in order of discovery."""
    ignored = ignored_params or ()
    params: dict[nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False):
            if param not in ignored:
                if _env.is_strict():
                    _fsdp_init._verify_managed_param(name, param)
                params[param] = None
        buffers.update(dict.fromkeys(module.buffers(recurse=False)))
    return list(params), list(buffers)


def offload_for(device: torch.device, policy: OffloadPolicy) -> OffloadPolicy:
    """The policy to follow: on the CPU there is no transfer that pinned memory could speed up."""
    if device.type == "cpu" and isinstance(policy, CPUOffloadPolicy) and policy.pin_memory:
        return dataclasses.replace(policy, pin_memory=False)
    return policy


def check_params(roots: Sequence[nn.Module], managed: Sequence[nn.Module]) -> None:
    """A parameter that a call around or beside this one has sharded cannot be sharded again."""
    for module in managed:
        for name, param in module.named_parameters(recurse=False):
            if isinstance(param, DTensor) and (owner := _owner_of(param)) is not None:
                names = ", ".join(type(member).__mro__[2].__name__ for member in owner)
                around = {inner for member in owner for inner in member.modules()}
                if not any(root in around for root in roots):
                    raise ValueError(
                        f"module {type(module).__name__} with parameter '{name}' is part of"
                        f" {names}, which is a unit already, and of {type(roots[0]).__name__}: make"
                        " it a unit of its own by calling fully_shard on it first"
                    )
                raise ValueError(
                    f"parameter '{name}' of {type(module).__name__} is already sharded by the"
                    f" fully_shard call on its enclosing module {names}. Call it bottom-up,"
                    " first on submodules, then on the modules that contain them"
                )


def _owner_of(param: nn.Parameter) -> tuple[nn.Module, ...] | None:
    """The modules of the call that shards the parameter, of all that live in this process."""
    for ref in list(_composable_state._module_state_mapping.values()):
        for group in getattr(ref(), "_fsdp_param_groups", ()):
            if any(fsdp_param.sharded_param is param for fsdp_param in group.fsdp_params):
                return group.modules
    return None


@contextmanager
def undone_on_error(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules, and all below them, back as they were if the body raises."""
    everything = {id(m): m for root in modules for m in root.modules()}
    saved = [(m, m.__class__, copy_fields(m)) for m in everything.values()]
    tensors = {
        id(t): (t, None if isinstance(t, DTensor) else t.data, t.__dict__.copy())
        for m in everything.values()
        for t in (*m._parameters.values(), *m._buffers.values())
        if t is not None
    }
    mapping = _composable_state._module_state_mapping
    states = [(m, mapping[m]) for m in everything.values() if m in mapping]
    try:
        yield
    except BaseException:
        for module, cls, fields in saved:
            module.__class__ = cls
            put_fields(module, fields)
            _composable_state._module_state_mapping.pop(module, None)
        for module, state in states:
            _composable_state._module_state_mapping[module] = state
        for tensor, data, fields in tensors.values():
            if data is not None and data.device != tensor.device:
                tensor.data = data
            tensor.__dict__.clear()
            tensor.__dict__.update(fields)
            _replaced_params.forget(tensor)
        raise


def copy_fields(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The module's fields; its own dicts (parameters, hooks, registries) with a copy of each."""
    return {
        key: (value, value.copy() if isinstance(value, dict) else None)
        for key, value in module.__dict__.items()
    }


def put_fields(module: nn.Module, fields: dict[str, tuple[Any, Any]]) -> None:
    """Dicts stay the same objects: the core of a unit that runs already writes into them."""
    module.__dict__.clear()
    for key, (value, copy) in fields.items():
        if copy is not None:
            value.clear()
            value.update(copy)
        module.__dict__[key] = value


# Of process groups that hold shards: by their mesh's ranks and the size of the smaller groups.
_smaller: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)


def post_forward_mesh_info_for(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
    """torch's own; units of one mesh share its smaller groups, which torch makes for each of them:
    a process group is three threads and a set-up of all ranks."""
    size, n = mesh_info.shard_mesh_size, reshard_after_forward
    if isinstance(n, bool) or not isinstance(n, int) or not 1 < n < size or size % n != 0:
        return _fsdp_init._get_post_forward_mesh_info(n, mesh_info)
    known = _smaller.setdefault(mesh_info.shard_process_group, {})
    key = (n, *mesh_info.mesh.mesh.flatten().tolist())
    if key not in known:
        known[key] = _fsdp_init._get_post_forward_mesh_info(n, mesh_info)
    return known[key]


def make_groups(
    state: FSDPState,
    params: list[nn.Parameter],
    modules: tuple[nn.Module, ...],
    mesh_info: Any,
    post_forward_mesh_info: Any,
    device: torch.device,
    shard_placement_fn: Any,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard_after_forward: bool | int,
) -> None:
    """One group of parameters per pair of shard and replicate process groups, in order."""
    if not params:
        return
    by_mesh: dict[tuple[Any, Any], tuple[Any, list[nn.Parameter]]] = {}
    if shard_placement_fn is None:
        by_mesh[None, None] = (mesh_info, params)
        place = None
    elif not isinstance(mesh_info, FSDPMeshInfo):
        raise ValueError(
            "Per-param mesh via shard_placement_fn is not supported with"
            f" {type(mesh_info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    else:
        place = _with_equal_meshes_as_one(shard_placement_fn, mesh_info)
        for param in params:
            info = place(param).mesh_info
            replicas = info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None
            first, members = by_mesh.setdefault((info.shard_process_group, replicas), (info, []))
            if first is not info:
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object,"
                    f" but got different objects: {first} vs {info}"
                )
            members.append(param)
    for info, members in by_mesh.values():
        if info is not mesh_info:
            after = post_forward_mesh_info_for(reshard_after_forward, info)
        else:
            after = post_forward_mesh_info
        state._fsdp_param_groups.append(
            FSDPParamGroup(
                members,
                modules,
                info,
                after,
                device,
                place,
                mp_policy,
                offload_policy,
            )
        )


def _with_equal_meshes_as_one(
    shard_placement_fn: Callable[[nn.Parameter], Any], mesh_info: FSDPMeshInfo
) -> Callable[[nn.Parameter], ShardPlacementResult]:
    """The function with complete results, in which equal mesh infos are the same object."""
    infos = [mesh_info]

    def place(param: nn.Parameter) -> ShardPlacementResult:
        result = resolve_shard_placement(shard_placement_fn(param), mesh_info)
        info = result.mesh_info
        if not isinstance(info, FSDPMeshInfo):
            raise ValueError(
                "shard_placement_fn must name an FSDPMeshInfo or HSDPMeshInfo, not a"
                f" {type(info).__name__}, for a parameter of size {tuple(param.shape)}: to"
                " replicate parameters, put them into ignored_params or give them a unit of"
                " their own"
            )
        if _env.is_strict():
            return result
        known = next((other for other in infos if other == info), None)
        if known is None:
            infos.append(info)
        return ShardPlacementResult(result.placement, known or info)

    return place


def check_dims(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None) -> None:
    """Dims that parameters are sharded over become one: they have to lie side by side."""
    if dp_mesh_dims is None:
        return
    assert mesh.mesh_dim_names is not None
    at = sorted(mesh.mesh_dim_names.index(name) for name in dp_mesh_dims.shard_names)
    if at and at[-1] - at[0] >= len(at):
        raise ValueError(
            f"dp_mesh_dims.shard={dp_mesh_dims.shard_names} must be neighbours in the mesh, whose"
            f" dims are {mesh.mesh_dim_names}: put them side by side when the mesh is made"
        )


def groups_of(module: nn.Module) -> list[Any]:
    """The groups of the fully_shard call on the module itself; empty if there is none."""
    state = _get_module_fsdp_state(module)
    return [] if state is None else list(getattr(state, "_fsdp_param_groups", ()))
