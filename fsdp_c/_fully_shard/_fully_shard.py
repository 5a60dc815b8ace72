"""fully_shard: torch's FSDP2, run by the core."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, contract
from torch.distributed.fsdp._fully_shard import _fsdp_init as _torch_init
from torch.distributed.fsdp._fully_shard import _fully_shard as _torch
from torch.distributed.fsdp._fully_shard._fsdp_api import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.utils import _get_root_modules

from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _adopted_states,
    _callbacks,
    _fsdp_init,
    _fsdp_module,
    _heap,
    _shared_params,
    _watches,
)
from fsdp_c._fully_shard._fsdp_state import FSDPState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims


_callbacks.hand_down()

# The function behind torch's decorator: the key of its states.
_TORCHS_KEY: Any = _torch.fully_shard.__wrapped__  # type: ignore[attr-defined]

_numbers = itertools.count()

Given = TypeVar("Given", bound="nn.Module | Sequence[nn.Module]")


@dataclass(frozen=True)
class Call:
    """How a state was made, for whoever makes another one like it."""

    number: int  # of this process
    is_single: bool  # a module, not a list of modules
    is_placed: bool  # by a shard_placement_fn
    arguments: dict[str, Any]  # the others, but for ignored_params


def fully_shard(
    module: Given,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Given:
    """Shards parameters, gradients and optimizer states of ``module`` over the ranks of ``mesh``.

    A replacement of ``torch.distributed.fsdp.fully_shard`` with its arguments, defaults and
    results: call it bottom-up, on each block of a model and then on the model. Before forward a
    unit's parameters are gathered, afterwards given up again; backward gathers them once more,
    then averages the gradients and leaves every rank its part in ``.grad`` of the sharded
    parameters, which are DTensors. A call that raises leaves the modules as they were.

    Args:
        module: a module, or a list of modules that form one unit. Changed in place.
        mesh: 1-D: shard over it. 2-D with names: replicate over dim 0, shard over dim 1 (HSDP).
            Default: all ranks.
        reshard_after_forward: True gives the parameters up after forward, False keeps them for
            backward, None is True but for the root; an int reshards to groups of that many ranks.
        shard_placement_fn: parameter -> ``Shard(dim)`` or None for ``Shard(0)``. Called more than
            once per parameter.
        mp_policy: dtypes of parameters in forward and backward, of reductions, of outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards on the CPU.
        ignored_params: parameters to leave alone; any collection.
        dp_mesh_dims: names of the data-parallel dims if ``mesh`` is a whole SPMD mesh.

    Returns:
        ``module``, whose class now also is ``FSDPModule``. Type checkers see the type it had, and
        both after ``assert isinstance(module, FSDPModule)``.

    Raises:
        ValueError, TypeError, AssertionError, NotImplementedError: as torch's, and before
            anything is changed.

    Examples:
        >>> from fsdp_c import fully_shard
        >>> for block in model.blocks:
        ...     block = fully_shard(block)
        >>> model = fully_shard(model)
    """
    torch._C._log_api_usage_once("torch.distributed.fsdp.fully_shard")
    _fsdp_init.check_arguments(module, mesh, mp_policy, offload_policy)
    ignored_params = _fsdp_init.ignored_set(ignored_params)
    modules = [module] if isinstance(module, nn.Module) else _get_root_modules(list(module))
    for member in modules:
        _adopted_states.adopt_below(member)
    with (
        _fsdp_init.undone_on_error(modules),
        _shared_params.taken_from_inner_units(modules, ignored_params) as ties,
    ):
        return _contracted(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            dp_mesh_dims=dp_mesh_dims,
            ties=ties,
        )


def _apply(
    module: Any,
    *,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None,
    dp_mesh_dims: DataParallelMeshDims | None,
    ties: _shared_params.Ties,
) -> Any:
    _torch_init._validate_module(module, "fully_shard")
    mesh = mesh or _torch_init._init_default_mesh()
    _versions.validate_mesh(mesh, dp_mesh_dims)
    _fsdp_init.check_dims(mesh, dp_mesh_dims)
    mesh_info = _versions.get_mesh_info(mesh, dp_mesh_dims)
    device = _torch_init._get_device_from_mesh(mesh)
    is_auto = reshard_after_forward is None
    reshard = True if reshard_after_forward is None else reshard_after_forward
    post_forward_mesh_info = None
    if isinstance(mesh_info, FSDPMeshInfo):
        is_int = isinstance(reshard, int) and not isinstance(reshard, bool)
        if is_int and _versions.is_spmd(mesh_info):
            raise NotImplementedError(
                "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
            )
        post_forward_mesh_info = _fsdp_init.post_forward_mesh_info_for(reshard, mesh_info)
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(module))
    managed_modules = _torch_init._get_managed_modules(modules, ignored_params)
    _fsdp_init.check_params(modules, managed_modules)
    params, buffers = _fsdp_init.managed_states(managed_modules, ignored_params)
    _torch_init._move_states_to_device(params, buffers, device)
    if device.type == "cpu":
        _heap.HEAP.prepare_for_shards()
    state = _file_under_torchs_name(modules)
    state.call = Call(
        next(_numbers),
        isinstance(module, nn.Module),
        shard_placement_fn is not None,
        {
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "dp_mesh_dims": dp_mesh_dims,
        },
    )
    state.init(modules, device, mp_policy, is_auto)
    _fsdp_init.make_groups(
        state,
        ties.params_to_shard(params),
        modules,
        mesh_info,
        post_forward_mesh_info,
        device,
        shard_placement_fn,
        mp_policy,
        _fsdp_init.offload_for(device, offload_policy),
        reshard,
    )
    for managed_module in managed_modules:  # for Dynamo
        managed_module._is_fsdp_managed_module = True  # type: ignore[assignment]
        managed_module._fsdp_use_orig_params = True  # type: ignore[assignment]
    _torch_init._apply_to_module(
        modules,
        _torch.get_cls_to_fsdp_cls(),
        _torch.FSDPModule,
        "FSDP",
        _torch._unimplemented_deepcopy,
    )
    _fsdp_module.equip(modules)
    _watches.watch(state, ignored_params)
    state.settle()
    return module


def _file_under_torchs_name(modules: Sequence[nn.Module]) -> FSDPState:
    """Moves the call's state to where torch's `fully_shard.state(module)` looks for it."""
    for module in modules:
        states = module.__dict__[STATE_KEY]
        states[_TORCHS_KEY] = states.pop(_apply)
    return states[_TORCHS_KEY]


def forget(module: nn.Module) -> None:
    """Takes away what the contract between composable functions keeps of the call."""
    module.__dict__[STATE_KEY].pop(_TORCHS_KEY)
    module.__dict__[REGISTRY_KEY].pop(_apply.__name__)


def _state(module: nn.Module) -> Any:
    """What `fully_shard`, this one or torch's, keeps about the module; None if nothing."""
    return module.__dict__.setdefault(STATE_KEY, {}).get(_TORCHS_KEY)


_apply.__name__ = _apply.__qualname__ = "fully_shard"  # the key in the modules' registries
_contracted = contract(state_cls=FSDPState)(_apply)  # type: ignore[arg-type]
fully_shard.state = _state  # type: ignore[attr-defined]
fully_shard.__module__ = "torch.distributed.fsdp"
