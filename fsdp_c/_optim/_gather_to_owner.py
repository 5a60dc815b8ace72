"""Whole tensors at one owner each, for optimizers such as Muon that need whole matrices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fsdp_c._comm import _buckets, _communicator, _dtensor_chunks

# What a plan depends on: size, dtype and placements.
_Row = tuple[tuple[int, ...], torch.dtype, tuple[Placement, ...]]

_Table = tuple[tuple[int, ...], ...]  # elements from rank (row) to another rank
_Lists = list[list[torch.Tensor]]


@dataclass(frozen=True)
class _Bucket:
    """Tensors of one dtype that travel in one collective; ranks are those of the group."""

    dtype: torch.dtype
    members: tuple[int, ...]
    to_owner: _Table
    from_owner: _Table


@dataclass(frozen=True)
class _Plan:
    owners: tuple[int, ...]
    boxes: tuple[tuple[_dtensor_chunks.Box, ...], ...]  # of each tensor, by rank
    sources: tuple[frozenset[int], ...]  # ranks that hold the tensor once among them
    buckets: tuple[_Bucket, ...]


@functools.lru_cache(maxsize=64)
def _make_plan(
    rows: tuple[_Row, ...],
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    bucket_bytes: int,
) -> _Plan:
    n_ranks = len(ranks)
    owners = _balance([math.prod(size) for size, _, _ in rows], n_ranks)
    boxes, sources = [], []
    for (size, _, placements), owner in zip(rows, owners, strict=True):
        by_place = _dtensor_chunks.boxes(size, mesh_shape, placements)
        by_rank = {rank: by_place[place] for place, rank in enumerate(ranks)}
        boxes.append(tuple(by_rank[rank] for rank in range(n_ranks)))
        copy = _copy_of(ranks.index(owner), mesh_shape, placements)
        sources.append(
            frozenset(
                rank
                for place, rank in enumerate(ranks)
                if _copy_of(place, mesh_shape, placements) == copy
            )
        )
    buckets = []
    sizes = [math.prod(size) * dtype.itemsize for size, dtype, _ in rows]
    for members in _buckets.fill([dtype for _, dtype, _ in rows], sizes, bucket_bytes):
        there = [[0] * n_ranks for _ in range(n_ranks)]
        back = [[0] * n_ranks for _ in range(n_ranks)]
        for member in members:
            owner = owners[member]
            for rank, box in enumerate(boxes[member]):
                back[owner][rank] += _dtensor_chunks.box_numel(box)
                if rank in sources[member]:
                    there[rank][owner] += _dtensor_chunks.box_numel(box)
        tables = (tuple(map(tuple, table)) for table in (there, back))
        buckets.append(_Bucket(rows[members[0]][1], members, *tables))
    return _Plan(tuple(owners), tuple(boxes), tuple(sources), tuple(buckets))


def _balance(numels: Sequence[int], n_ranks: int) -> list[int]:
    """An owner each: the largest tensors first, each to the rank that owns least so far."""
    owners, loads = [0] * len(numels), [0] * n_ranks
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += numels[index]
    return owners


def _copy_of(
    place: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Which of the tensor's copies a place of the mesh belongs to."""
    coordinate = []
    for n in reversed(mesh_shape):
        place, at = divmod(place, n)
        coordinate.append(at)
    pairs = zip(reversed(coordinate), placements, strict=True)
    return tuple(at for at, placement in pairs if isinstance(placement, Replicate))


class Owned(Mapping[Any, torch.Tensor]):
    """What `gather_to_owner` returns: the whole tensors that this rank owns, by name or index.

    ``owned[key]`` may be written in place or replaced by a tensor of the same shape before
    `scatter_from_owner`. Iteration goes in the order in which the tensors were passed.

    Examples:
        >>> owned = fsdp_c.gather_to_owner(dict(model.named_parameters()))
        >>> print({name: tensor.shape for name, tensor in owned.items()})
    """

    def __init__(self, tensors: dict[Any, DTensor], bucket_bytes: int) -> None:
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._own: dict[Any, torch.Tensor] = {}
        self._memory: dict[Any, torch.Tensor] = {}  # as gathered, whatever was put in its place
        self._owners: dict[Any, int] = {}

    def owner_of(self, key: Hashable) -> int:
        """The rank, as numbered in the world, that has the tensor.

        Examples:
            >>> owned = fsdp_c.gather_to_owner(dict(model.named_parameters()))
            >>> print(owned.owner_of("stem.weight"))
        """
        return self._owners[key]

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key in self._owners and key not in self._own:
            raise KeyError(
                f"{key!r} is owned by rank {self._owners[key]}, this is rank {dist.get_rank()}:"
                " only go through keys that .items() gives"
            )
        return self._own[key]

    def __setitem__(self, key: Any, tensor: torch.Tensor) -> None:
        if tensor.shape != self[key].shape:
            raise ValueError(
                f"tensor {key!r} has shape {tuple(self[key].shape)} on rank {dist.get_rank()}, its"
                f" replacement {tuple(tensor.shape)}: pass one of the same shape"
            )
        self._own[key] = tensor

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@torch.no_grad()
def gather_to_owner(
    tensors: Sequence[Any] | Mapping[Any, Any],
    *,
    bucket_bytes: int = 32 << 20,
    into: Owned | None = None,
) -> Owned:
    """Gathers each sharded tensor, whole, on exactly one rank of its mesh.

    Takes parameters, gradients (``[p.grad for p in ...]``) and any other DTensors: sharded on any
    dim, unevenly, or with copies (HSDP; then one rank of all copies is the owner). Owners depend on
    shapes and order alone, so that tensors of the same shapes have the same owners in each step;
    the largest go first, each to the rank that owns least. Collective over the tensors' meshes, in
    one collective per bucket; only the parts that the owner lacks travel:

        owned = gather_to_owner({name: p.grad for name, p in matrices.items()})
        for name, grad in owned.items():  # of this rank
            owned[name] = orthogonalized(grad)
        scatter_from_owner(owned)  # every p.grad is now its part of the result

    Args:
        tensors: DTensors by index or by name; the same on all ranks.
        bucket_bytes: whole tensors of up to this size (or a single larger one) share a collective.
        into: what an earlier call returned for tensors of the same keys, shapes and dtypes. It is
            filled again, in the memory that it has (new pages take several times as long as what
            is copied), and returned; tensors taken out of it before change with it.

    Raises:
        TypeError, ValueError: a tensor is None, not a DTensor, or not Shard or Replicate; names
            the tensor and the rank. Nothing has been sent then.
        RuntimeError: ranks disagree about the tensors (over shared memory), or a rank is gone.

    Examples:
        >>> grads = {n: p.grad for n, p in model.named_parameters() if p.ndim == 2}
        >>> owned = fsdp_c.gather_to_owner(grads)
        >>> for name, gradient in owned.items():
        ...     gradient.copy_(gradient.sign())
        >>> fsdp_c.scatter_from_owner(owned)
    """
    _buckets.check(bucket_bytes)
    named = dict(tensors) if isinstance(tensors, Mapping) else dict(enumerate(tensors))
    meshes = _by_mesh(named, "gather_to_owner")
    plans = [
        (keys, *_plan_for(mesh, [named[key] for key in keys], bucket_bytes))
        for mesh, keys in meshes.items()
    ]
    owners, likes = {}, {}
    for keys, group, plan in plans:
        ranks = dist.get_process_group_ranks(group)
        for key, owner in zip(keys, plan.owners, strict=True):
            owners[key] = ranks[owner]
            if owner == group.rank():
                likes[key] = named[key]
    owned = Owned(named, bucket_bytes) if into is None else into
    if into is None:
        found = {key: _dtensor_chunks.local_of(t).new_empty(t.shape) for key, t in likes.items()}
    else:
        _check_into("gather_to_owner", named, into._tensors, "dtype")
        if list(into._tensors) != list(named):
            raise ValueError(
                f"gather_to_owner on rank {dist.get_rank()}: `into` has the tensors in another"
                " order: pass them in that one, as owners depend on it"
            )
        found = into._memory
    for keys, group, plan in plans:
        locals_ = [_dtensor_chunks.local_of(named[key]) for key in keys]
        for bucket in plan.buckets:
            _gather(group, plan, bucket, locals_, [found.get(key) for key in keys])
    owned._tensors, owned._bucket_bytes, owned._owners = named, bucket_bytes, owners
    owned._memory = {key: found[key] for key in named if key in found}
    owned._own = dict(owned._memory)
    return owned


@torch.no_grad()
def scatter_from_owner(owned: Owned, into: Sequence[Any] | Mapping[Any, Any] | None = None) -> None:
    """Writes the owners' whole tensors into every rank's shards; the way back of `gather_to_owner`.

    Collective as that is, with one collective per bucket; all copies (HSDP) are written. Values are
    cast to the dtype of what they are written to.

    Args:
        owned: what `gather_to_owner` returned, with the tensors to scatter.
        into: DTensors under the same keys, with the same shapes, meshes and placements as those
            gathered (for instance the parameters of gathered gradients). Default: those gathered.

    Raises:
        TypeError, ValueError: `into` does not fit; names the tensor and the rank. Nothing has been
            sent then.

    Examples:
        >>> owned = fsdp_c.gather_to_owner(dict(model.named_parameters()))
        >>> fsdp_c.scatter_from_owner(owned)
    """
    targets = owned._tensors
    if into is not None:
        targets = dict(into) if isinstance(into, Mapping) else dict(enumerate(into))
        _check_into("scatter_from_owner", owned._tensors, targets)
    for mesh, keys in _by_mesh(targets, "scatter_from_owner").items():
        group, plan = _plan_for(mesh, [targets[key] for key in keys], owned._bucket_bytes)
        locals_ = [_dtensor_chunks.local_of(targets[key]) for key in keys]
        for bucket in plan.buckets:
            _scatter(group, plan, bucket, locals_, [owned._own.get(key) for key in keys])


def _by_mesh(tensors: Mapping[Any, Any], caller: str) -> dict[DeviceMesh, list[Any]]:
    """Keys by mesh, in order."""
    meshes: dict[DeviceMesh, list[Any]] = {}
    for key, tensor in tensors.items():
        where = f"{caller}: tensor {key!r} on rank {dist.get_rank()}"
        if tensor is None:
            raise TypeError(
                f"{where} is None (a parameter without a gradient?): leave it out on all ranks, or"
                " pass zeros"
            )
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"{where} is a {type(tensor).__name__}, not a DTensor: pass sharded parameters or"
                " their gradients; plain tensors are whole on every rank"
            )
        if tensor._local_tensor.is_meta:
            raise ValueError(f"{where} is on the meta device: give it memory (to_empty) before")
        try:
            _dtensor_chunks.own_place(tensor.device_mesh)
            _dtensor_chunks.tensor_boxes(tensor)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        meshes.setdefault(tensor.device_mesh, []).append(key)
    return meshes


def _check_into(
    caller: str, gathered: Mapping[Any, DTensor], targets: Mapping[Any, Any], *more: str
) -> None:
    """Targets must be laid out as what is gathered; alike on all ranks."""
    where = f"{caller} on rank {dist.get_rank()}"
    if odd := [*(gathered.keys() ^ targets.keys())]:
        raise ValueError(
            f"{where}: `into` must have the keys of the gathered tensors; {odd[0]!r} is only in"
            f" {'them' if odd[0] in gathered else '`into`'}"
        )
    for key, source in gathered.items():
        target = targets[key]
        for name in ("shape", "device_mesh", "placements", *more):
            ours, theirs = (getattr(tensor, name, None) for tensor in (target, source))
            if ours != theirs:
                raise ValueError(
                    f"{where}: tensor {key!r} has {name} {ours}, what was gathered has {theirs}"
                )


def _plan_for(
    mesh: DeviceMesh, tensors: Sequence[DTensor], bucket_bytes: int
) -> tuple[dist.ProcessGroup, _Plan]:
    group, ranks = _dtensor_chunks.group_of(mesh)
    rows = tuple((tuple(t.shape), t._local_tensor.dtype, tuple(t.placements)) for t in tensors)
    return group, _make_plan(rows, tuple(mesh.shape), ranks, bucket_bytes)


def _gather(
    group: dist.ProcessGroup,
    plan: _Plan,
    bucket: _Bucket,
    locals_: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor | None],
) -> None:
    own, ranks = group.rank(), range(group.size())
    sent: _Lists = [[] for _ in ranks]
    received: _Lists = [[] for _ in ranks]
    for member in bucket.members:
        sources, whole = plan.sources[member], wholes[member]
        if own in sources:
            sent[plan.owners[member]].append(locals_[member])
        if whole is not None:
            for rank in sources:
                received[rank].append(whole[plan.boxes[member][rank]])
    _exchange(group, bucket.to_owner, locals_[bucket.members[0]], sent, received)


def _scatter(
    group: dist.ProcessGroup,
    plan: _Plan,
    bucket: _Bucket,
    locals_: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor | None],
) -> None:
    ranks = range(group.size())
    sent: _Lists = [[] for _ in ranks]
    received: _Lists = [[] for _ in ranks]
    for member in bucket.members:
        local, whole = locals_[member], wholes[member]
        received[plan.owners[member]].append(local)
        if whole is not None:
            whole = whole.to(local.device, local.dtype).resolve_conj().resolve_neg()
            for rank in ranks:
                sent[rank].append(whole[plan.boxes[member][rank]])
    _exchange(group, bucket.from_owner, locals_[bucket.members[0]], sent, received)


def _exchange(
    group: dist.ProcessGroup,
    counts: _Table,
    like: torch.Tensor,
    sent: _Lists,
    received: _Lists,
) -> None:
    """One collective, of tensors like the given one, in lists by rank."""
    if like.is_cpu:
        _communicator.communicator_for(group).exchange(received, sent, counts, like.itemsize)
        return
    own = group.rank()
    taken = [row[own] for row in counts]
    packed, arrived = like.new_empty(sum(counts[own])), like.new_empty(sum(taken))
    for flat, part in _cut(packed, sent):
        flat.copy_(part)
    dist.all_to_all_single(arrived, packed, taken, list(counts[own]), group=group)
    for flat, part in _cut(arrived, received):
        part.copy_(flat)


def _cut(flat: torch.Tensor, lists: _Lists) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a flat tensor, each with the tensor whose elements it holds."""
    at = 0
    for part in itertools.chain.from_iterable(lists):
        yield flat[at : at + part.numel()].view(part.shape), part
        at += part.numel()
