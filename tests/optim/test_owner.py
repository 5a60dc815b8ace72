"""gather_to_owner and scatter_from_owner: contents, owners, collectives and bytes, errors, Muon."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh
from models import Net, data, shard_blocks
from parity import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_c
from fsdp_c._comm import _buckets, _dtensor_chunks
from fsdp_c._optim import _gather_to_owner


def whole(index: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(shape, generator=generator).to(dtype)


# Uneven rows, fewer rows than ranks, other dims, other dtypes, no dims, no elements.
CASES: list[tuple[tuple[int, ...], torch.dtype, int | None]] = [
    ((7, 5), torch.float32, 0),
    ((1, 9), torch.float32, 0),
    ((3, 8), torch.bfloat16, 1),
    ((2, 5, 3), torch.float32, 1),
    ((6,), torch.int64, 0),
    ((), torch.float32, None),
    ((0, 4), torch.float32, 0),
    ((10, 10), torch.float64, 0),
    ((5, 7), torch.bfloat16, 0),
    ((40, 3), torch.float32, 0),
]


def sharded(mesh: DeviceMesh) -> list[DTensor]:
    """The cases over the mesh's last dim, copies over those before."""
    tensors = []
    for index, (shape, dtype, dim) in enumerate(CASES):
        last = Replicate() if dim is None else Shard(dim)
        placements = [*[Replicate()] * (mesh.ndim - 1), last]
        tensors.append(distribute_tensor(whole(index, shape, dtype), mesh, placements))
    return tensors


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that go to other ranks in each collective of this rank's communicators."""
    calls: list[int] = []
    inner = fsdp_c.Communicator.exchange

    def count(self: Any, received: Any, sent: Any, counts: Any, itemsize: int) -> None:
        rank = self._comm.transport.rank
        numel = sum(n for to, n in enumerate(counts[rank]) if to != rank)
        calls.append(numel * itemsize)
        inner(self, received, sent, counts, itemsize)

    fsdp_c.Communicator.exchange = count  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        fsdp_c.Communicator.exchange = inner  # type: ignore[method-assign]


def check_round_trip(mesh: DeviceMesh) -> None:
    tensors = sharded(mesh)
    owned = fsdp_c.gather_to_owner(tensors)
    everybody: list[Any] = [None] * mesh.size()
    group, _ = _dtensor_chunks.group_of(mesh)
    dist.all_gather_object(everybody, list(owned), group=group)
    # Exactly one owner each, of which everybody knows.
    assert sorted(key for keys in everybody for key in keys) == list(range(len(CASES)))
    ranks = dist.get_process_group_ranks(group)
    for at, keys in enumerate(everybody):
        assert all(owned.owner_of(key) == ranks[at] for key in keys)
    for key, tensor in owned.items():
        shape, dtype, _ = CASES[key]
        assert torch.equal(tensor, whole(key, shape, dtype))
        if key % 2:
            tensor.mul_(2)
        else:
            owned[key] = tensor * 2
    versions = [tensor._local_tensor._version for tensor in tensors]
    fsdp_c.scatter_from_owner(owned)
    for key, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
        shape, dtype, _ = CASES[key]
        expected = distribute_tensor(whole(key, shape, dtype) * 2, mesh, tensor.placements)
        assert torch.equal(tensor._local_tensor, expected._local_tensor), key
        assert tensor._local_tensor._version > version


@on_ranks(2, 3)
def test_round_trip(rank: int, n_ranks: int) -> None:
    check_round_trip(cached_mesh((n_ranks,)))
    os.environ["FSDP_C_TRANSPORT"] = "callback"
    try:  # the same over the process group's own collectives
        check_round_trip(DeviceMesh.from_group(dist.new_group(), "cpu"))
    finally:
        del os.environ["FSDP_C_TRANSPORT"]


@on_ranks(2)
def test_memory_is_used_again(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    owned = fsdp_c.gather_to_owner(sharded(mesh))
    kept = dict(owned)
    places = {key: tensor.data_ptr() for key, tensor in kept.items()}
    for key in owned:
        owned[key] = torch.zeros_like(owned[key])  # not what is written to
    doubled = [tensor * 2 for tensor in sharded(mesh)]
    again = fsdp_c.gather_to_owner(doubled, into=owned)
    assert again is owned and list(owned) == list(kept)
    for key, tensor in owned.items():
        shape, dtype, _ = CASES[key]
        assert torch.equal(tensor, whole(key, shape, dtype) * 2)
        assert tensor.data_ptr() == places[key] and tensor is kept[key]
        tensor.mul_(2)
    fsdp_c.scatter_from_owner(owned)
    for tensor, double in zip(sharded(mesh), doubled, strict=True):
        assert torch.equal(double._local_tensor, tensor._local_tensor * 4)
    with counted() as calls:
        for wrong, text in [
            (doubled[:2], "2 is only in `into`"),
            ([tensor.float() for tensor in doubled], "2 has dtype torch.bfloat16"),
            ([*doubled[:-1], doubled[0]], "9 has shape"),
            (dict(reversed(list(enumerate(doubled)))), "another order"),
        ]:
            with pytest.raises(ValueError, match=text):
                fsdp_c.gather_to_owner(wrong, into=owned)
        assert not calls


@on_ranks(1)
def test_round_trip_alone(rank: int, n_ranks: int) -> None:
    check_round_trip(cached_mesh((1,)))


@on_ranks(4)
def test_round_trip_with_copies(rank: int, n_ranks: int) -> None:
    """HSDP; and a mesh of which other ranks have another one."""
    check_round_trip(cached_mesh((2, 2), ("replicate", "shard")))
    check_round_trip(cached_mesh((2, 2), ("replicate", "shard"))["shard"])
    # The order of the places is not that of the ranks.
    check_round_trip(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b")))


@on_ranks(4)
def test_sharded_over_two_dims(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("data", "tensor"))
    full = whole(0, (8, 6))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Replicate()]):
        owned = fsdp_c.gather_to_owner({"w": distribute_tensor(full, mesh, placements)})
        assert all(torch.equal(tensor, full) for tensor in owned.values())
    # As fully_shard makes it of a tensor-parallel parameter: first rows per "tensor" rank.
    at = mesh.get_coordinate()
    own = full.chunk(2)[at[1]].chunk(2)[at[0]].clone()
    strided = DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    owned = fsdp_c.gather_to_owner([strided])
    assert all(torch.equal(tensor, full) for tensor in owned.values())


@on_ranks(3)
def test_collectives_and_bytes(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    tensors = [distribute_tensor(whole(i, (6, 4)), mesh, [Shard(0)]) for i in range(9)]
    each = 6 * 4 * 4
    for bucket_bytes, n_buckets in ((1 << 20, 1), (3 * each, 3), (each, 9), (1, 9)):
        with counted() as calls:
            owned = fsdp_c.gather_to_owner(tensors, bucket_bytes=bucket_bytes)
            assert len(calls) == n_buckets
            # Balanced: three matrices each; a third of the others' six goes there.
            assert len(owned) == 3 and sum(calls) == 6 * each // 3
            fsdp_c.scatter_from_owner(owned)
        assert len(calls) == 2 * n_buckets
        assert sum(calls[n_buckets:]) == 3 * each * 2 // 3


def test_balanced_by_size() -> None:
    assert _gather_to_owner._balance([1, 8, 3, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert _gather_to_owner._balance([5, 5, 5], 2) == [0, 1, 0]
    assert _buckets.fill("aba" + "ab", [16, 4, 16, 16, 4], 32) == [(0, 2), (3,), (1, 4)]


@on_ranks(2)
def test_mistakes_are_named(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    good = distribute_tensor(whole(0, (4, 4)), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    meta = DTensor.from_local(torch.empty(2, 2, device="meta"), mesh, [Shard(0)])
    with counted() as calls:
        for bad, error, text in [
            (None, TypeError, "is None .*pass zeros"),
            (torch.ones(2), TypeError, "is a Tensor, not a DTensor"),
            (partial, ValueError, "redistribute it"),
            (meta, ValueError, "meta device"),
        ]:
            with pytest.raises(error, match=f"'bad' on rank {rank}.*{text}"):
                fsdp_c.gather_to_owner({"good": good, "bad": bad})
        with pytest.raises(ValueError, match="bucket_bytes"):
            fsdp_c.gather_to_owner([good], bucket_bytes=0)
        assert not calls
    owned = fsdp_c.gather_to_owner({"good": good, "two": good.clone()})
    mine, other = ("good", "two") if rank == 0 else ("two", "good")
    assert list(owned) == [mine] and len(owned) == 1
    with pytest.raises(KeyError, match=f"owned by rank {1 - rank}, this is rank {rank}"):
        owned[other]
    with pytest.raises(ValueError, match="same shape"):
        owned[mine] = torch.ones(3)
    for into, text in [
        ({"good": good}, "'two' is only in them"),
        ({"good": good, "two": distribute_tensor(whole(0, (4, 5)), mesh, [Shard(0)])}, "shape"),
        ({"good": good, "two": distribute_tensor(whole(0, (4, 4)), mesh, [Shard(1)])}, "placem"),
    ]:
        with pytest.raises(ValueError, match=text):
            fsdp_c.scatter_from_owner(owned, into)


def check_disagree(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    shape = (4, 4) if rank == 0 else (8, 2)
    local = torch.zeros(shape[0] // 2, shape[1])
    tensors = [DTensor.from_local(local, mesh, [Shard(0)])] * (1 + rank)
    with pytest.raises(RuntimeError, match="different collectives"):
        fsdp_c.gather_to_owner(tensors)


def test_ranks_that_disagree() -> None:
    from harness import run_ranks

    outcomes = run_ranks(check_disagree, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes


def matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 2}


@on_ranks(2, 3)
def test_muon_has_the_bits_of_one_process(rank: int, n_ranks: int) -> None:
    """Given the same gradients, torch's Muon at the owners does what it does on whole matrices."""
    torch.manual_seed(0)
    model = Net()
    alone = Net()
    alone.load_state_dict(model.state_dict())
    shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)))
    params, reference = matrices(model), matrices(alone)
    owned = fsdp_c.gather_to_owner(params)
    copies = {name: torch.nn.Parameter(tensor) for name, tensor in owned.items()}
    muon = torch.optim.Muon(copies.values(), lr=0.02) if copies else None
    expected = torch.optim.Muon(reference.values(), lr=0.02)
    for step in range(3):
        model(data(rank, step)).sum().backward()
        for name, param in params.items():
            reference[name].grad = param.grad.full_tensor()
        grads = fsdp_c.gather_to_owner({name: param.grad for name, param in params.items()})
        assert list(grads) == list(copies)
        for name, grad in grads.items():
            copies[name].grad = grad
        if muon is not None:
            muon.step()
        expected.step()
        for name in grads:
            grads[name] = copies[name].detach()
        fsdp_c.scatter_from_owner(grads, into=params)
        model.zero_grad()
        for name, param in params.items():
            assert torch.equal(param.full_tensor(), reference[name]), name
