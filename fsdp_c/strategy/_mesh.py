"""The mesh that a strategy runs on: from a DeviceMesh, sizes or nothing."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init

from fsdp_c import _env
from fsdp_c.strategy._strategies import REPLICATE, SHARD, Strategy

# Meshes that were made here, by world: a second model reuses their process groups.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], DeviceMesh]]
_made = weakref.WeakKeyDictionary()


def check(strategy: Strategy, mesh: Any) -> tuple[int, ...]:
    """Sizes of the strategy's dims; an error where they do not fit. Changes nothing."""
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(mesh.shape)
        if not strategy.is_sharded:
            return _check_replicas(strategy, mesh)
    elif mesh is None:
        sizes = _default_sizes(strategy)
    else:
        sizes = _given_sizes(strategy, mesh)
    if strategy.is_hybrid and len(sizes) != 2:
        raise ValueError(
            f"strategy {strategy.name!r} needs a mesh of two dims, replicas first and shards"
            f" second, but mesh has {len(sizes)}: pass mesh=(replicas, shards)"
        )
    if not strategy.is_hybrid and len(sizes) != 1:
        raise ValueError(
            f"strategy {strategy.name!r} needs a mesh of one dim, but mesh has {len(sizes)}: pass"
            ' one of them, or use strategy="hybrid"'
        )
    return sizes


def _check_replicas(strategy: Strategy, mesh: DeviceMesh) -> tuple[int, ...]:
    """A dim of one shard is added where all ranks can make its process groups together."""
    if mesh.ndim == 2 and mesh.size(1) == 1:
        return (mesh.size(0),)
    if mesh.ndim == 1 and mesh.size() == dist.get_world_size():
        return (mesh.size(),)
    raise ValueError(
        f"strategy {strategy.name!r} needs a mesh of all ranks, or one of two dims (replicas, 1),"
        f" not {tuple(mesh.shape)}: make the latter with init_device_mesh on all ranks"
    )


def _given_sizes(strategy: Strategy, mesh: Any) -> tuple[int, ...]:
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    if not isinstance(sizes, tuple | list) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
    ):
        raise TypeError(f"mesh must be a DeviceMesh, a size, several sizes or None, not {mesh!r}")
    world = dist.get_world_size()
    if math.prod(sizes) != world:
        raise ValueError(
            f"mesh={mesh!r} is for {math.prod(sizes)} ranks, but {world} are running: the sizes of"
            f" {' x '.join(strategy.dims)} multiply to that"
        )
    return tuple(sizes)


def _default_sizes(strategy: Strategy) -> tuple[int, ...]:
    world = dist.get_world_size()
    if not strategy.is_hybrid:
        return (world,)
    per_host = _env.ranks_per_host()
    if per_host is None or not 1 < per_host < world or world % per_host:
        raise ValueError(
            f"strategy {strategy.name!r} needs a second mesh dim, and the launcher does not say how"
            f" {world} ranks split into several hosts: pass mesh=(replicas, shards), with"
            f" replicas * shards == {world}"
        )
    return (world // per_host, per_host)


def make(strategy: Strategy, mesh: Any, sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh for ``fully_shard``. Collective where it is made.

    Replicas alone (DDP) are a mesh whose shard dim has one rank: a unit is its own shard.
    """
    if isinstance(mesh, DeviceMesh) and (strategy.is_sharded or mesh.ndim == 2):
        return mesh
    if mesh is None and not strategy.is_hybrid and strategy.is_sharded:
        return _fsdp_init._init_default_mesh()
    base = mesh if isinstance(mesh, DeviceMesh) else _fsdp_init._init_default_mesh()
    ranks = base.mesh.flatten()
    shape = sizes if strategy.is_sharded else (*sizes, 1)
    names = (REPLICATE, SHARD)[-len(shape) :]
    made = _made.setdefault(dist.group.WORLD, {})
    key = (base.device_type, tuple(ranks.tolist()), shape)
    if key not in made:
        made[key] = DeviceMesh(base.device_type, ranks.view(shape), mesh_dim_names=names)
    return made[key]
