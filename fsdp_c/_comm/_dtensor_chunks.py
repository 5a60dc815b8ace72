"""Which part of a whole tensor each rank of a mesh holds, and the group of a mesh's ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Box = tuple[slice, ...]  # a part of a whole tensor
Run = tuple[int, int]  # indices of a dim, from the first to before the second


def box_size(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def box_numel(box: Box) -> int:
    return math.prod(box_size(box))


def overlap(a: Box, b: Box) -> Box | None:
    """What two parts have in common; None if that is nothing."""
    common = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None


def within(part: Box, box: Box) -> Box:
    """A part of a box, as seen from its beginning."""
    return tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))


@functools.lru_cache(maxsize=4096)
def boxes(
    size: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Box, ...]:
    """The part of each place of the mesh, row by row.

    Raises:
        ValueError: a placement is neither Shard nor Replicate, or a part is not one piece.
    """
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(
                f"it is placed {placements}: redistribute it to Shard or Replicate before"
            )
    places = itertools.product(*(range(n) for n in mesh_shape))
    return tuple(_box(size, mesh_shape, placements, place) for place in places)


def _box(
    size: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    place: tuple[int, ...],
) -> Box:
    dims: list[list[Run]] = [[(0, n)] for n in size]
    for n, at, placement in zip(mesh_shape, place, placements, strict=True):
        if isinstance(placement, _StridedShard):  # of each of the parts that a later dim will make
            factor, runs = placement.split_factor, dims[placement.dim]
            parts = [_chunk(runs, factor, part) for part in range(factor)]
            dims[placement.dim] = [run for part in parts for run in _chunk(part, n, at)]
        elif isinstance(placement, Shard):
            dims[placement.dim] = _chunk(dims[placement.dim], n, at)
    box = []
    for runs in map(_joined, dims):
        if len(runs) > 1:
            raise ValueError(
                f"with {placements} a rank's part of it is not one piece: shard it evenly"
            )
        box.append(slice(*runs[0]) if runs else slice(0, 0))
    return tuple(box)


def _chunk(runs: Sequence[Run], n: int, at: int) -> list[Run]:
    """Part `at` of n of the indices, cut as torch.chunk does."""
    total = sum(stop - start for start, stop in runs)
    each = -(-total // n)
    begin, end = min(at * each, total), min((at + 1) * each, total)
    part, done = [], 0
    for start, stop in runs:
        low, high = max(begin - done, 0), min(end - done, stop - start)
        if low < high:
            part.append((start + low, start + high))
        done += stop - start
    return part


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def tensor_boxes(tensor: DTensor) -> tuple[Box, ...]:
    """`boxes` of a DTensor."""
    return boxes(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements))


def own_place(mesh: DeviceMesh) -> int:
    """This rank's place in the mesh, row by row; ValueError if it has none."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}")
    place = 0
    for n, at in zip(mesh.shape, coordinate, strict=True):
        place = place * n + at
    return place


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """A group of all ranks of the mesh, and the rank in it of each place of the mesh.

    Collective where a group has to be made: for a named mesh of several dims that is not the world.
    """
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
    elif mesh.mesh_dim_names:
        group = mesh._flatten().get_group()
    else:
        raise ValueError(f"{mesh} needs mesh_dim_names, since it has several dims")
    ranks = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
    return group, tuple(ranks[rank] for rank in mesh.mesh.flatten().tolist())


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part itself, outside of autograd."""
    with torch.no_grad():
        return tensor.to_local().detach()
