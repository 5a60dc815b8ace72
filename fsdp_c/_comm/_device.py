"""Units on a device: which of them the core's stream schedule carries, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy

from fsdp_c import _built, _env
from fsdp_c._comm import _nccl, _process_group
from fsdp_c._native import _C

# Beside the extension where nvcc was there.
_KERNELS = _built.FOLDER / "libfsdp_c_cuda.so"

# By their ranks. The process's, as torch's own table of process groups is: units of all models
# share them, and one that torch has destroyed gives way.
_smaller_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


class _Choice(NamedTuple):
    """How units on a device are run, beside what the environment says."""

    types: tuple[str, ...] = ()  # of devices whose units go by the schedule
    by_torch: bool = False  # what is on the CPU is moved by torch's operators, as elsewhere
    by_nccl: bool = False  # ranks on the CPU talk over an NCCL that takes host memory


# The process's, like the environment: it is there before any model is. `on_cpu` alone changes it.
_choice = _Choice()


@contextmanager
def on_cpu(by_torch: bool = False, by_nccl: bool = False) -> Iterator[None]:
    """Models that run their first forward in here go by the schedule of devices; for tests."""
    global _choice
    before = _choice
    _choice = _Choice((*before.types, "cpu"), by_torch, by_nccl)
    try:
        yield
    finally:
        _choice = before


def is_wanted(group: Any) -> bool:
    """Whether the unit goes by the schedule of devices, if the core runs it at all."""
    return _has_schedule(group.device)


def has_core(device: torch.device) -> bool:
    """Whether the core runs units there."""
    return device.type == "cpu" or _has_schedule(device)


def _has_schedule(device: torch.device) -> bool:
    asked = (*_choice.types, *_env.DEVICES.get())
    return _type_word(device) in asked if asked else _is_nvidia(device)


def _type_word(device: torch.device) -> str:
    """The device's type; that of an extension of torch, which names it, is privateuseone."""
    is_extension = torch.device(_env.EXTENSION).type == device.type
    return _env.EXTENSION if is_extension else device.type


def is_taken(group: Any) -> bool:
    """Whether a schedule runs the unit."""
    return group._binding is not None and group._binding[0].streams is not None


def why_not(group: Any) -> str:
    """What the unit has that the schedule does not carry; alike on all ranks."""
    for process_group in process_groups(group):
        if not _is_registered(process_group):
            return "a process group without a registered name"
    if any(p.keep_unsharded_storage for p in group.fsdp_params):
        return "unsharded parameters keep their storage"
    return ""


def process_groups(group: Any) -> list[dist.ProcessGroup]:
    info = group.mesh_info
    found = (
        getattr(info, "shard_process_group", None),
        getattr(info, "replicate_process_group", None),
        reduce_group(group),
        smaller_group(group),
    )
    return [process_group for process_group in found if process_group is not None]


def reduce_group(group: Any) -> dist.ProcessGroup:
    """Who sums gradients: the ranks of the shards, perhaps in a process group of their own."""
    info = group.mesh_info
    # Before torch 2.13 there is no such choice.
    return getattr(info, "reduce_scatter_process_group", None) or getattr(
        info, "shard_process_group", _process_group.ALONE
    )


def smaller_group(group: Any) -> dist.ProcessGroup | None:
    """Whom forward reshards to (reshard_after_forward is an int). torch makes such groups for each
    unit; those between the same ranks share the first one, and its communicators."""
    info = group.post_forward_mesh_info
    if info in (None, group.mesh_info):
        return None
    own: dist.ProcessGroup = info.shard_process_group
    ranks = tuple(dist.get_process_group_ranks(own))
    known = _smaller_groups.get(ranks)
    if known is None or not _is_registered(known):
        known = _smaller_groups[ranks] = own
    return known


def offloads(group: Any) -> tuple[bool, bool]:
    """Whether shards and gradients are offloaded, and to pinned memory."""
    policy = group.offload_policy
    is_offloaded = isinstance(policy, CPUOffloadPolicy)
    return is_offloaded, is_offloaded and policy.pin_memory


class DeviceOptions(NamedTuple):
    """Read by name in csrc/bind/device/device.cpp."""

    is_offloaded: bool
    is_pinned: bool
    group: str = ""  # who talks, by the names that are connected
    replicate_group: str = ""
    post_rank: int = 0  # in a smaller group that forward reshards to
    n_post_ranks: int = 0
    post_group: str = ""


def options_of(group: Any) -> DeviceOptions:
    is_offloaded, is_pinned = offloads(group)
    options = DeviceOptions(is_offloaded=is_offloaded, is_pinned=is_pinned)
    if not is_wanted(group):
        return options
    info, smaller = group.mesh_info, smaller_group(group)
    options = options._replace(
        group=name_of(getattr(info, "shard_process_group", _process_group.ALONE), group)
    )
    if replicas := getattr(info, "replicate_process_group", None):
        options = options._replace(replicate_group=name_of(replicas, group, is_replicate=True))
    if smaller is None:
        return options
    return options._replace(
        post_rank=smaller.rank(),
        n_post_ranks=smaller.size(),
        post_group=name_of(smaller, group),
    )


def name_of(process_group: dist.ProcessGroup, group: Any, is_replicate: bool = False) -> str:
    """Under which name a unit's collectives are connected: those in sight are its own. A process
    group of one rank may stand for shards and for replicas."""
    name = str(process_group.group_name)
    if not group.visible.reason:
        return name
    return f"{name} of unit {group.in_sight_as}{' and its replicas' if is_replicate else ''}"


def _is_registered(process_group: dist.ProcessGroup) -> bool:
    if process_group is _process_group.ALONE:
        return True
    try:
        found = torch._C._distributed_c10d._resolve_process_group(process_group.group_name)
    except (RuntimeError, ValueError, AttributeError):
        return False
    return bool(found == process_group)


def connect(
    streams: _C.Streams,
    process_group: dist.ProcessGroup,
    group: Any,
    messages: Any = None,
    is_replicate: bool = False,
    is_slice: bool = False,
) -> None:
    """Decides who does the collectives between the ranks of a unit: who makes them in sight,
    communicators of NCCL of our own if they are asked for and all can use it, or else the process
    group, whose watchdog and deadlines are torch's. Collective."""
    nccl = None
    if messages is None and process_group.size() > 1 and _may_use_nccl(group.device):
        with suppress(NotImplementedError):
            nccl = _nccl.group_for(
                process_group, group.device, gathers=not is_replicate, reduces=not is_slice
            )
    streams.connect(
        group=name_of(process_group, group, is_replicate),
        nccl=nccl,
        messages=messages,
        rank=process_group.rank(),
        n_ranks=process_group.size(),
        may_scale=_process_group.scales(process_group, group.device),
    )


def _may_use_nccl(device: torch.device) -> bool:
    if device.type == "cpu":
        return _choice.by_nccl
    return _is_nvidia(device) and device.type in _env.DEVICES.get()


def _is_nvidia(device: torch.device) -> bool:
    """A GPU whose streams can be handed to NVIDIA's libraries."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and bool(_C.Streams.tells_handles())


def is_blocking(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a collective there keeps the host waiting, and not the device alone."""
    return device.type == "cpu" and _nccl.find(process_group) is None


class Way(NamedTuple):
    """Who does the collectives between some ranks."""

    kind: str  # "nccl" or "callback", as transports are called
    why_not: str = ""  # why not NCCL, where somebody asked for it


def ways(group: Any) -> dict[str, Way]:
    """Who does the collectives of a taken unit: between ranks of shards, of replicas, in sums,
    of slices that forward leaves."""
    info = group.mesh_info
    dims = {
        "shards": getattr(info, "shard_process_group", None),
        "replicas": getattr(info, "replicate_process_group", None),
        "sums": getattr(info, "reduce_scatter_process_group", None),
        "slices": smaller_group(group),
    }
    return {
        dim: _way_of(process_group, bool(group.visible.reason))
        for dim, process_group in dims.items()
        if process_group is not None and process_group.size() > 1
    }


def _way_of(process_group: dist.ProcessGroup, is_in_sight: bool) -> Way:
    if is_in_sight:
        return Way("callback")
    if _nccl.find(process_group) is not None:
        return Way("nccl")
    return Way("callback", _nccl.why_not(process_group))


def streams_for(groups: Sequence[Any], known: _C.Streams | None) -> _C.Streams | None:
    """What units that are bound together run in; None if they run in shared memory."""
    if not groups or not is_wanted(groups[0]):
        return None
    if known is not None:
        return known
    device = groups[0].device
    has_kernels = _is_nvidia(device) and _KERNELS.exists()
    return _C.Streams(
        device=device, by_torch=_choice.by_torch, kernels=str(_KERNELS) if has_kernels else ""
    )
