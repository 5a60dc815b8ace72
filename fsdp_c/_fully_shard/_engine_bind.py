"""Binding units to the engine: their domains, the place of shards, unsharded parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _python_dispatch

from fsdp_c import _env
from fsdp_c._comm import _agreement, _device, _process_group, _rendezvous, _transport
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _fqns,
    _model_digest,
    _param_attributes,
    _same_model,
    _visible_collectives,
)
from fsdp_c._fully_shard._heap import HEAP
from fsdp_c._fully_shard._param_spec import UnitSpec, gradient_dtypes, parts_of, spec_of
from fsdp_c._native import _C

# The dispatch key that is on while a transform of functorch runs.
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"

# Names of units whose collectives are in sight of somebody, on devices.
_in_sight = itertools.count()


class Place(NamedTuple):
    """Where a parameter is registered; read by name in csrc/bind/fsdp/parameters.cpp."""

    parameters: dict[str, Any]  # the module's
    name: str
    setter: nn.Module | None  # the module, only where it overrides __setattr__


class BoundParam(NamedTuple):
    """What the unit has to know of a parameter; read by name in csrc/bind/fsdp/parameters.cpp."""

    places: list[Place]
    sharded: nn.Parameter
    unsharded: nn.Parameter
    unsharded_local: torch.Tensor  # its local tensor if it is a DTensor, else itself
    owner: Any  # its FSDPParam
    reduce: torch.dtype
    grad: torch.dtype
    local_size: tuple[int, ...]
    local_stride: tuple[int, ...]
    copies: int
    outputs: list[torch.Tensor]  # of an extension: what was gathered


class Binding(NamedTuple):
    """Where a unit is bound: its index in the domains of its shards, of its replicas, and of a
    smaller group that forward reshards to."""

    shard: _C.Domain
    index: int
    replicate: _C.Domain | None
    smaller: _C.Domain | None  # over messages


def bind_units(
    groups: Sequence[Any],
    streams: _C.Streams | None = None,
    then: Callable[[list[_C.Domain]], None] = lambda domains: None,
) -> list[_C.Domain]:
    """Binds units to the core; collective over each of their process groups. Returns the domains.

    All ranks must pass the same units in the same order. On failure no unit is bound and every
    rank raises, also where `then`, which is local and gets the domains, fails on one of them. Units
    on a device share the schedule of those in `streams`.
    """
    with _apart(), _rendezvous.telling_of_ended():
        return _bind_units(groups, streams, then)


@contextmanager
def _apart() -> Iterator[None]:
    """Neither dispatch modes nor functorch's transforms of a first forward have a part in it:
    shards are as real as before, and levels of a transform end.
    """
    # Who looks for transforms gives the thread a stack of them, and autograd then copies it with
    # every node that it makes, for good.
    has_transforms = torch._C._dispatch_tls_is_dispatch_key_included(_TRANSFORMS)
    without_transforms = temporarily_clear_interpreter_stack() if has_transforms else nullcontext()
    with _python_dispatch._disable_current_modes(), without_transforms:
        yield


def _bind_units(
    groups: Sequence[Any],
    streams: _C.Streams | None,
    then: Callable[[list[_C.Domain]], None],
) -> list[_C.Domain]:
    streams = _device.streams_for(groups, streams)
    by_mesh: dict[tuple[Any, Any, str], list[Any]] = {}
    for group in groups:
        shards = getattr(group.mesh_info, "shard_process_group", _process_group.ALONE)
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        group.visible = group.wants_visible
        in_sight = _what_is_in_sight(group, shards, replicas, streams is not None)
        by_mesh.setdefault((shards, replicas, in_sight), []).append(group)
    _check_model(by_mesh)
    for group in groups:
        for fsdp_param in group.fsdp_params:
            fsdp_param.lay_out()
        if streams is not None:
            _connect(streams, group)
    domains: list[_C.Domain] = []
    placed = []
    for (shard_pg, replicate_pg, in_sight), members in by_mesh.items():
        shard, replicate = _make_domains(shard_pg, replicate_pg, members, streams, in_sight)
        smaller = {} if streams is not None else _make_smaller(shard, members)
        domains += [d for d in (shard, replicate, *smaller.values()) if d is not None]
        placed += [
            (group, Binding(shard, i, replicate, smaller.get(_device.smaller_group(group))))
            for i, group in enumerate(members)
        ]
    error: Exception | None = None
    try:
        for group, binding in placed:
            bind_unit(group, binding)
        then(domains)
    except Exception as fault:
        error = fault
    told = f"rank {dist.get_rank()}: {error}" if error is not None and dist.is_initialized() else ""
    reason = _agreement.first_reason_of_units("binding units", groups, told)
    if error is not None or reason:
        for group in groups:
            if group._is_bound:
                group.unbind()
        raise error or RuntimeError(reason)
    if streams is None:
        HEAP.prepare_for_core()
    return domains


def _connect(streams: _C.Streams, group: Any) -> None:
    """Tells a device who does the collectives of a unit. Collective."""
    info = group.mesh_info
    shards = getattr(info, "shard_process_group", _process_group.ALONE)
    replicas = getattr(info, "replicate_process_group", None)
    group.in_sight_as = next(_in_sight)
    for process_group, is_replicate, is_slice in (
        (shards, False, False),
        (replicas, True, False),
        (_device.smaller_group(group), False, True),
    ):
        if process_group is None:
            continue
        messages = None
        if group.visible.reason:
            messages = _visible_collectives.VisibleMessages(
                [group],
                process_group,
                is_last=is_replicate or (replicas is None and not is_slice),
                stands_in=False,
            )
        _device.connect(streams, process_group, group, messages, is_replicate, is_slice)


def _what_is_in_sight(
    group: Any, shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None, on_device: bool
) -> str:
    """Of a unit: none of its collectives (empty), all of them, or only sums between replicas."""
    if not group.visible.reason:
        return ""
    if on_device:
        return "all"
    is_hooked = replicas is not None and not group.visible.is_watched
    # Sums of shards are divided afterwards, for which float16 lacks the range.
    fits = all(parts_of(_versions.reduce_dtype(p)) != torch.float16 for p in group.fsdp_params)
    return (
        "sums" if is_hooked and fits and _transport.transport_for(shards).kind == "shm" else "all"
    )


def _check_model(by_mesh: dict[tuple[Any, Any, str], list[Any]]) -> None:
    """Ranks build the same units; once for each process group. Collective."""
    members: dict[Any, list[Any]] = {}
    for process_groups, groups in by_mesh.items():
        for process_group in filter(None, process_groups[:2]):
            members.setdefault(process_group, []).extend(groups)
    for process_group, groups in members.items():
        _same_model.check(process_group, groups)
    for groups in by_mesh.values():
        _model_digest.forget(_same_model.params_of(groups))


def _make_domains(
    shard_pg: dist.ProcessGroup,
    replicate_pg: dist.ProcessGroup | None,
    groups: Sequence[Any],
    streams: _C.Streams | None,
    in_sight: str,
) -> tuple[_C.Domain, _C.Domain | None]:
    units = [
        UnitSpec(
            _fqns.unit_name(group),
            [spec_of(p) for p in group.fsdp_params],
            [spec for p in group.fsdp_params for spec in p.input_specs()],
        )
        for group in groups
    ]
    # What replicas add up next has to be there at once.
    is_alone = streams is None and replicate_pg is None and not in_sight
    batch_bytes = _env.batch_bytes() if is_alone else 0
    process_groups = [shard_pg] if replicate_pg is None else [shard_pg, replicate_pg]

    def transport(index: int) -> _C.Transport:
        process_group = process_groups[index]
        is_last = index == len(process_groups) - 1
        if streams is None and (in_sight == "all" or (in_sight and is_last)):
            summed = shard_pg if in_sight == "sums" else None
            return _transport.messages_for(
                process_group,
                _visible_collectives.VisibleMessages(groups, process_group, is_last, summed),
            )
        make = _transport.transport_for if streams is None else _transport.messages_for
        return make(process_group)

    # A process group may stand for both dimensions, of one rank.
    transports = [transport(index) for index in range(len(process_groups))]
    is_counted = (
        streams is None
        and not in_sight
        and _agreement.any_rank(
            process_groups, any(transport.kind != "shm" for transport in transports)
        )
    )

    def make(index: int) -> _C.Domain:
        process_group, transport = process_groups[index], transports[index]
        domain = _C.Domain(
            transport=transport,
            is_replicate=index == 1,
            units=units,
            shard_rank=shard_pg.rank(),
            n_shards=shard_pg.size(),
            batch_bytes=batch_bytes,
            is_counted=is_counted,
            is_packed=bool(in_sight),
            streams=streams,
        )
        # On a GPU nobody waits for peers, and NCCL has a board of its own.
        is_blocking = _device.is_blocking(process_group, groups[0].device)
        if transport.kind != "shm" and is_blocking:
            watch = _transport.watch_for(process_group)
            if watch is not None:
                domain.watch(watch)
        return domain

    shard, *replicate = map(make, range(len(transports)))
    return shard, replicate[0] if replicate else None


def _make_smaller(
    shard: _C.Domain, groups: Sequence[Any]
) -> dict[dist.ProcessGroup | None, _C.Domain]:
    """Over messages, domains of the smaller groups that forward reshards to. Each has all units,
    at the index that they have in the domain of their shards."""
    if shard.is_mapped:  # slices lie in the unsharded unit
        return {}
    params = [
        [s._replace(orig=s.compute, is_made=False) for s in map(spec_of, g.fsdp_params)]
        for g in groups
    ]
    units = [UnitSpec(_fqns.unit_name(g), p) for g, p in zip(groups, params, strict=True)]
    found: dict[dist.ProcessGroup | None, _C.Domain] = {}
    for group in groups:
        process_group = _device.smaller_group(group)
        if process_group is None or process_group in found:
            continue
        messages = None
        if group.visible.reason:
            own = group.post_forward_mesh_info.shard_process_group
            messages = _visible_collectives.VisibleMessages(groups, own, False)
        shards = group.mesh_info.shard_process_group
        if messages is None and _transport.transport_kind(shards) == "rails":
            transport = _transport.fast_messages_for(process_group)
        else:
            transport = _transport.messages_for(process_group, messages)
        found[process_group] = domain = _C.Domain(
            transport=transport,
            is_replicate=False,
            units=units,
            shard_rank=process_group.rank(),
            n_shards=process_group.size(),
            batch_bytes=0,
            is_counted=False,
            is_packed=messages is not None,
            streams=None,
        )
        watch = _transport.watch_for(process_group)
        if watch is not None:
            domain.watch(watch)
    return found


@torch.no_grad()
def bind_unit(group: Any, binding: Binding) -> None:
    """Gives the unit's shards their place and makes its unsharded parameters; local."""
    shard, index = binding.shard, binding.index
    layout = shard.layout(index)
    shard_rank = getattr(group.mesh_info, "shard_mesh_rank", 0)
    with torch.inference_mode(False), _apart():
        # Never touched: its memory is taken away when the unit is bound.
        flat = torch.empty(layout["full_bytes"], dtype=torch.uint8, device=group.device)
        seen: set[int] = set()
        rows = []
        for fsdp_param, place in zip(group.fsdp_params, layout["params"], strict=True):
            if not fsdp_param.is_extended:
                _own_storage(fsdp_param, seen)
            outputs = fsdp_param.renew_outputs()
            if outputs:
                unsharded = fsdp_param.stand_in()
            else:
                # Of a parameter that is held once per rank each rank reads its own.
                own = shard_rank if fsdp_param.copies > 1 else 0
                unsharded = _view_of(flat, place["offset"], own, fsdp_param)
                fsdp_param._unsharded_param = unsharded
            fsdp_param.unit = group
            reduce, grad = gradient_dtypes(fsdp_param)
            rows.append(
                BoundParam(
                    places=_places(fsdp_param),
                    sharded=fsdp_param.sharded_param,
                    unsharded=unsharded,
                    unsharded_local=getattr(unsharded, "_local_tensor", unsharded),
                    owner=fsdp_param,
                    reduce=reduce,
                    grad=grad,
                    local_size=tuple(fsdp_param.sharded_size),
                    local_stride=fsdp_param.local_stride,
                    copies=fsdp_param.copies,
                    outputs=outputs,
                )
            )
        group._bind(
            domain=shard,
            index=index,
            replicate=binding.replicate,
            smaller=binding.smaller,
            post_mesh=group.post_forward_mesh_info if _device.smaller_group(group) else None,
            params=rows,
            flat=flat,
            on_device=_device.options_of(group),
        )
        group.keep_storage()
    group._binding = binding
    group.note_layout()
    group.choose_reduce_group()


def _view_of(flat: torch.Tensor, offset: int, own: int, fsdp_param: Any) -> nn.Parameter | DTensor:
    """The unsharded parameter, from `own` elements behind `offset` bytes on."""
    dtype = _versions.compute_dtype(fsdp_param)
    data = torch.empty(0, dtype=dtype, device=flat.device).set_(
        flat.untyped_storage(),
        offset // dtype.itemsize + own,
        fsdp_param._orig_size,
        fsdp_param.unsharded_stride,
    )
    unsharded = parameter_of(
        data, fsdp_param.unsharded_spec(dtype), fsdp_param.sharded_param.requires_grad
    )
    _param_attributes.copy_attributes(fsdp_param.sharded_param, unsharded)
    _versions.set_grad_dtype(fsdp_param, unsharded)
    return unsharded


def parameter_of(
    data: torch.Tensor, spec: DTensorSpec | None, requires_grad: bool
) -> nn.Parameter | DTensor:
    """One whose unit notices that `param.data` was taken, to which writes are not counted."""
    param = _C.make_noted(data)  # nn.Parameter() would make another tensor of it
    if spec is not None:
        param = DTensor(param, spec, requires_grad=False)
        # `data` of a DTensor is taken from itself, and writes to that are not its local tensor's.
        _C.note_data(param)
        param._is_param = True
        return param.requires_grad_(requires_grad)
    param.__class__ = nn.Parameter
    return param.requires_grad_(requires_grad)


def _places(fsdp_param: Any) -> list[Place]:
    places = []
    for module, name in _param_attributes.registrations(fsdp_param):
        is_plain = getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
        places.append(Place(module._parameters, name, None if is_plain else module))
    return places


def _own_storage(fsdp_param: Any, seen: set[int]) -> None:
    """Makes the shard the only tensor of a storage of exactly its padded size."""
    local = fsdp_param._sharded_local_tensor
    if not fsdp_param.is_placed(local) or local.untyped_storage()._cdata in seen:
        local = fsdp_param.place(local)
        fsdp_param.sharded_param._local_tensor = local  # type: ignore[attr-defined]
    seen.add(local.untyped_storage()._cdata)
