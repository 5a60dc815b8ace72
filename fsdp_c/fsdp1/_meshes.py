"""Device meshes for the process groups and strategies that FSDP1 scripts name."""

from __future__ import annotations

import socket
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES

_HYBRID_DIMS = ("replicate", "shard")
# group -> {(device type, whether replicated, group of the copies): mesh}
_made: Any = weakref.WeakKeyDictionary()


def is_hybrid(strategy: ShardingStrategy) -> bool:
    return strategy in HYBRID_SHARDING_STRATEGIES


def host_groups(device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks of this host, and those with this rank's place on the other hosts; collective."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rows = list(by_host.values())
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            "a hybrid strategy shards over the ranks of each host, but hosts have"
            f" {sorted({len(row) for row in rows})} ranks: pass device_mesh or process_group"
        )
    mesh = DeviceMesh(device_type, torch.tensor(rows), mesh_dim_names=_HYBRID_DIMS)
    shard, copies = mesh.get_group("shard"), mesh.get_group("replicate")
    _of(shard)[device_type, False, copies.group_name] = mesh
    return shard, copies


def mesh_for(
    strategy: ShardingStrategy,
    group: dist.ProcessGroup,
    copies: dist.ProcessGroup | None,
    given: DeviceMesh | None,
    device_type: str,
) -> DeviceMesh:
    """The mesh that `fully_shard` takes for a strategy; made once per group.

    Args:
        group: the ranks to shard over.
        copies: of a hybrid strategy, the ranks that hold the same shards.
        given: the user's mesh.
    """
    is_replicated = strategy is ShardingStrategy.NO_SHARD and group.size() > 1
    if given is not None and not is_replicated and (given.ndim == 1 or given.mesh_dim_names):
        return given
    key = (device_type, is_replicated, copies.group_name if copies else "")
    made = _of(group)
    if key not in made:
        if is_replicated:
            made[key] = _whole_mesh(group, device_type)
        elif copies is not None:
            made[key] = _hybrid_mesh(group, copies, device_type)
        else:
            made[key] = DeviceMesh.from_group(group, device_type)
    return made[key]


def _of(group: dist.ProcessGroup) -> dict[tuple[str, bool, str], DeviceMesh]:
    return _made.setdefault(group, {})


def _whole_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Every rank shards over itself and has copies on all others."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 1)
    return DeviceMesh.from_group([group, own], device_type, mesh=ranks, mesh_dim_names=_HYBRID_DIMS)


def _hybrid_mesh(
    group: dist.ProcessGroup, copies: dist.ProcessGroup, device_type: str
) -> DeviceMesh:
    rows: list[Any] = [None] * copies.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(group), group=copies)
    return DeviceMesh.from_group(
        [copies, group], device_type, mesh=torch.tensor(rows), mesh_dim_names=_HYBRID_DIMS
    )
