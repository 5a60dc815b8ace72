"""Clipping of gradients of every kind over local tensors, with torch's bits."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import harness
import models
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from harness import cached_mesh
from models import Tiny, data
from parity import on_ranks
from test_clip_pass import calls_of_torch, torchs_own_clipping
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from fsdp_c._optim import _grad_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
KINDS = (2.0, 1.0, 3.0, math.inf, 0.0, -math.inf, -1.0)
SHAPES = ((6, 5), (4,), (1, 3), (8, 2), (2, 3, 4))

Parameters = list[nn.Parameter]


def share_memory(n_ranks: int) -> Any:
    """The mesh of all ranks, which talk over shared memory from the first forward on."""
    mesh = cached_mesh((n_ranks,))
    model = Tiny()
    models.shard_root(model, harness.implementation(), mesh=mesh)
    model(data(0)).sum().backward()
    return mesh


def parameter(
    mesh: Any,
    shape: Sequence[int],
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    placements: Sequence[Any] = (Shard(0),),
) -> nn.Parameter:
    """With a gradient; plain if there is no mesh."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if mesh is not None:
        values = distribute_tensor(values, mesh, placements)
    made = nn.Parameter(torch.zeros_like(values))
    made.grad = values
    return made


@on_ranks(1)
def test_one_by_one_where_torch_has_no_function_for_many(rank: int, n_ranks: int) -> None:
    """As plain tensors are clipped, whose device decides."""
    mesh = share_memory(n_ranks)
    parameters = [parameter(mesh, shape, i, dtype=torch.float64) for i, shape in enumerate(SHAPES)]
    with mock.patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as many:
        found = clip_grad_norm_(parameters, 1e9)
        assert many.call_count == 1
        with mock.patch.object(_grad_norm, "_device_has_foreach_support", lambda device: False):
            assert torch.equal(local(clip_grad_norm_(parameters, 1e9)), local(found))
        assert many.call_count == 1


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def versions(params: Parameters) -> list[tuple[int, int]]:
    return [(p.grad._version, local(p.grad)._version) for p in params]


def compare(norms: Sequence[Any], ours: Parameters, theirs: Parameters) -> None:
    for norm, other in itertools.pairwise(norms):
        assert type(norm) is type(other)
        assert norm.dtype == other.dtype
        assert getattr(norm, "placements", None) == getattr(other, "placements", None)
        assert torch.equal(local(norm), local(other)), (local(norm), local(other))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(local(one.grad), local(other.grad))


def check(
    make: Callable[[], Parameters], *, repeats: int = 3, max_norm: float = 0.7, **options: Any
) -> None:
    """What clipping does is what torch does, without its functions, and again later."""
    for _ in range(repeats):
        ours, theirs = make(), make()
        before = versions(ours)
        with calls_of_torch() as called:
            norms = [clip_grad_norm_(ours, max_norm, **options)]
        assert called == []
        for (new, local_new), (old, local_old) in zip(versions(ours), before, strict=True):
            assert new > old
            assert local_new > local_old
        with torchs_own_clipping():
            norms.append(clip_grad_norm_(theirs, max_norm, **options))
        compare(norms, ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_bits_of_every_dtype(rank: int, n_ranks: int, kind: float) -> None:
    mesh = share_memory(n_ranks)
    for dtype in DTYPES:
        for foreach in (None, True, False):
            check(
                lambda: (
                    [parameter(mesh, shape, i, dtype=dtype) for i, shape in enumerate(SHAPES)]
                    if not (math.isinf(kind) or kind < 0)
                    else [parameter(mesh, (4, 3 + i), i, dtype=dtype) for i in range(4)]
                ),
                norm_type=kind,
                foreach=foreach,
            )


@on_ranks(1, 2)
def test_zeros_are_counted(rank: int, n_ranks: int) -> None:
    """Norms of type 0 of gradients that are 0 everywhere, or on one rank."""
    mesh = share_memory(n_ranks)

    def make() -> Parameters:
        made = [parameter(mesh, (4, 3), i, dtype=torch.bfloat16) for i in range(4)]
        local(made[0].grad).zero_()
        if rank == 0:
            local(made[1].grad).zero_()
        return made

    check(make, norm_type=0.0)


@on_ranks(1)
def test_foreach_is_as_asked_for(rank: int, n_ranks: int) -> None:
    mesh = share_memory(n_ranks)
    for foreach, n_calls in ((None, 1), (True, 1), (False, 0)):
        params = [parameter(mesh, (4, 3), i, dtype=torch.bfloat16) for i in range(3)]
        for step in ("_foreach_norm", "_foreach_mul_"):
            with mock.patch.object(torch, step, wraps=getattr(torch, step)) as called:
                clip_grad_norm_(params, 0.7, foreach=foreach)
            assert called.call_count == n_calls


@on_ranks(1, 2)
def test_mixed_dtypes_and_strides(rank: int, n_ranks: int) -> None:
    mesh = share_memory(n_ranks)

    def make() -> Parameters:
        dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float64))
        made = [
            parameter(mesh, shape, i, dtype=dtype)
            for (i, shape), dtype in zip(enumerate(SHAPES * 2), dtypes, strict=False)
        ]
        transposed = parameter(mesh, (6, 4), 11, placements=[Shard(1)])
        made.append(nn.Parameter(transposed.detach().t()))
        made[-1].grad = transposed.grad.t()
        assert not local(made[-1].grad).is_contiguous() or n_ranks > 1
        return made

    for foreach in (None, False):
        for kind in (2.0, 1.0):
            check(make, norm_type=kind, foreach=foreach)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_different_placements(rank: int, n_ranks: int, kind: float) -> None:
    """Of one mesh: torch brings their norms to one layout before it stacks them."""
    mesh = share_memory(n_ranks)
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(0), Replicate(), Shard(1)],
        [Replicate(), Shard(0)],
        [Replicate()],
    ):
        for dtype in (torch.bfloat16, torch.float32):
            check(
                lambda: [
                    parameter(mesh, (4, 6 + i), i, dtype=dtype, placements=[placement])
                    for i, placement in enumerate(placements * 3)
                ],
                repeats=2,
                norm_type=kind,
            )


@pytest.mark.parametrize("kind", [2.0, 3.0, math.inf])
@on_ranks(4)
def test_two_dimensions(rank: int, n_ranks: int, kind: float) -> None:
    """Replicated and sharded; sharded twice, with others on one of the dims alone."""
    share_memory(n_ranks)
    for names, placements in (
        (("replicate", "shard"), [(Replicate(), Shard(0))]),
        (("rows", "columns"), [(Shard(0), Shard(1))]),
        (("rows", "columns"), [(Shard(0), Shard(1)), (Shard(0), Replicate())]),
    ):
        mesh = cached_mesh((2, 2), names)
        for dtype in (torch.bfloat16, torch.float32):
            check(
                lambda: [
                    parameter(mesh, (4, 6 + 2 * i), i, dtype=dtype, placements=each)
                    for i, each in enumerate(placements * 2)
                ],
                repeats=2,
                norm_type=kind,
            )


@pytest.mark.parametrize("kind", [math.inf, -math.inf, -1.0])
@on_ranks(2)
def test_extremes_where_a_rank_has_no_rows(rank: int, n_ranks: int, kind: float) -> None:
    """torch refuses these on the rank without rows and leaves the others waiting."""
    mesh = share_memory(n_ranks)
    for dtype in (torch.bfloat16, torch.float32):
        for _ in range(2):
            both = [
                [parameter(m, shape, i, dtype=dtype) for i, shape in enumerate(SHAPES)]
                for m in (mesh, None)
            ]
            norms = [clip_grad_norm_(params, 0.7, kind).reshape(()) for params in both]
            tolerance = {"rtol": 2e-2, "atol": 0} if dtype is torch.bfloat16 else {}
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], **tolerance)
            for one, other in zip(*both, strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, **tolerance)


@on_ranks(2)
def test_collectives(rank: int, n_ranks: int) -> None:
    """At most torch's in the first call of a process; then none, over shared memory."""
    mesh = share_memory(n_ranks)
    counts: dict[bool, list[int]] = {True: [], False: []}
    for kind in (2.0, 0.0, math.inf):
        for is_torch in (True, False):
            for _ in range(3):
                params = [parameter(mesh, (4, 3), i, dtype=torch.bfloat16) for i in range(3)]
                with mock.patch.object(funcol, "all_reduce", wraps=funcol.all_reduce) as all_reduce:
                    if is_torch:
                        with torchs_own_clipping():
                            clip_grad_norm_(params, 0.7, kind)
                    else:
                        clip_grad_norm_(params, 0.7, kind)
                counts[is_torch].append(all_reduce.call_count)
    assert counts[True] == [1] * 9
    assert sorted(counts[False]) in ([0] * (9 - n) + [1] * n for n in range(4))
    assert not any(counts[False][i] for i in range(9) if i % 3 > 0)


@on_ranks(1, 2)
def test_several_meshes_and_plain_tensors(rank: int, n_ranks: int) -> None:
    """As if all were plain; torch refuses them."""
    mesh = share_memory(n_ranks)
    alone = cached_mesh((n_ranks, 1), ("shard", "alone"))["alone"]
    for dtype, kind in itertools.product(
        (torch.bfloat16, torch.float32), (2.0, 1.0, math.inf, 0.0)
    ):
        for _ in range(2):
            both = [
                [parameter(m, (4, 3 + i), i, dtype=dtype) for i, m in enumerate(meshes)]
                for meshes in ((mesh, None, alone, mesh, None), (None,) * 5)
            ]
            before = [p.grad._version for p in both[0]]
            with calls_of_torch() as called:
                norms = [clip_grad_norm_(params, 0.7, kind) for params in both]
            # One for the plain tensors, one for the parts' norms; the rest for the plain twins.
            n_totals = 1 if kind == 0 else 2
            assert called.count("_get_total_norm") == n_totals + 1
            assert called.count("_clip_grads_with_norm_") == 1
            assert all(p.grad._version > old for p, old in zip(both[0], before, strict=True))
            tolerance = {"rtol": 2e-2, "atol": 0} if dtype is torch.bfloat16 else {}
            torch.testing.assert_close(*norms, **tolerance)
            for one, other in zip(*both, strict=True):
                torch.testing.assert_close(full(one.grad), full(other.grad), **tolerance)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@on_ranks(1, 2)
def test_missing_gradients(rank: int, n_ranks: int) -> None:
    mesh = share_memory(n_ranks)

    def make() -> Parameters:
        return [parameter(mesh, (4, 3), i, dtype=torch.bfloat16) for i in range(4)]

    ours, theirs = make(), make()
    for params in (ours, theirs):
        params[0].grad = params[2].grad = None
    norms = [clip_grad_norm_(ours, 0.7)]
    with torchs_own_clipping():
        norms.append(clip_grad_norm_(theirs, 0.7))
    left = [[p for p in params if p.grad is not None] for params in (ours, theirs)]
    assert [len(params) for params in left] == [2, 2]
    compare(norms, *left)
    for params in (ours, theirs):
        params[1].grad = params[3].grad = None
    assert torch.equal(clip_grad_norm_(ours, 0.7), torch.tensor(0.0))


@pytest.mark.parametrize("kind", [2.0, math.inf])
@on_ranks(1, 2)
def test_what_is_not_finite(rank: int, n_ranks: int, kind: float) -> None:
    """torch's error, before anything is multiplied, on all ranks; else NaN everywhere."""
    mesh = share_memory(n_ranks)
    for dtype in (torch.bfloat16, torch.float32):
        for value in (math.nan, math.inf):
            errors = []
            for is_torch in (False, True, False):
                params = [parameter(mesh, (4, 3), i, dtype=dtype) for i in range(3)]
                if rank == 0:
                    local(params[1].grad)[0, 0] = value
                before = [local(p.grad).clone() for p in params]
                with pytest.raises(RuntimeError) as caught:
                    if is_torch:
                        with torchs_own_clipping():
                            clip_grad_norm_(params, 0.7, kind, error_if_nonfinite=True)
                    else:
                        clip_grad_norm_(params, 0.7, kind, error_if_nonfinite=True)
                errors.append(str(caught.value))
                for param, old in zip(params, before, strict=True):
                    assert torch.equal(local(param.grad).nan_to_num(), old.nan_to_num())
            assert errors[0] == errors[1] == errors[2]
            clip_grad_norm_(params, 0.7, kind)
            factor = math.nan if math.isnan(value) else 0.0
            for param, old in zip(params, before, strict=True):
                expected = old * factor
                torch.testing.assert_close(local(param.grad), expected, equal_nan=True)
        make = lambda: [parameter(mesh, (4, 3), i, dtype=dtype) for i in range(3)]  # noqa: E731
        check(make, norm_type=kind, error_if_nonfinite=True)


@on_ranks(1, 2)
def test_the_two_steps_one_by_one(rank: int, n_ranks: int) -> None:
    mesh = share_memory(n_ranks)
    for kind, dtype in itertools.product((2.0, math.inf), (torch.bfloat16, torch.float32)):
        for convert in (lambda t: t, Tensor.double, lambda t: t.full_tensor().float()):
            for foreach in (None, False):
                both = [
                    [parameter(mesh, (4, 3), i, dtype=dtype) for i in range(3)] for _ in range(2)
                ]
                with calls_of_torch() as called:
                    norms = [get_total_norm([p.grad for p in both[0]], kind)]
                    clip_grads_with_norm_(both[0], 0.7, convert(norms[0]), foreach)
                assert called == []
                with torchs_own_clipping():
                    norms.append(get_total_norm([p.grad for p in both[1]], kind))
                    clip_grads_with_norm_(both[1], 0.7, convert(norms[1]), foreach)
                compare(norms, *both)


@on_ranks(2)
def test_ranks_of_which_one_falls_back(rank: int, n_ranks: int) -> None:
    """One rank's operations are looked at: then all ranks make torch's collectives."""
    mesh = share_memory(n_ranks)
    for kind, finite in itertools.product((2.0, math.inf, 0.0), (False, True)):
        for step in range(4):
            both = [
                [parameter(mesh, (4, 3), i, dtype=torch.bfloat16) for i in range(3)]
                for _ in range(2)
            ]
            norms = []
            for params, own in zip(both, (False, True), strict=True):
                with torchs_own_clipping() if own else looked_at(step > 1 and rank == step % 2):
                    norms.append(clip_grad_norm_(params, 0.7, kind, error_if_nonfinite=finite))
            compare(norms, *both)


def looked_at(is_so: bool) -> Any:
    """By somebody who wants to see operations."""
    return CommDebugMode() if is_so else contextlib.nullcontext()


@on_ranks(1)
def test_what_stays_torchs(rank: int, n_ranks: int) -> None:
    mesh = share_memory(n_ranks)
    every = ["clip_grad_norm_", "_get_total_norm", "_clip_grads_with_norm_"]

    def made(dtype: torch.dtype = torch.bfloat16) -> Parameters:
        return [parameter(mesh, (4, 3), i, dtype=dtype) for i in range(3)]

    complex_ones = made()
    for param in complex_ones:
        param.grad = None
    complex_ones.append(nn.Parameter(distribute_tensor(torch.zeros(4, 2).cfloat(), mesh)))
    complex_ones[-1].grad = torch.ones_like(complex_ones[-1])
    with calls_of_torch() as called:
        clip_grad_norm_(complex_ones, 0.7)
    assert called == every
    for dtype in (torch.bfloat16, torch.float32):
        inferred = made(dtype)
        with torch.inference_mode():
            grad = DTensor.from_local(local(inferred[0].grad), mesh, (Shard(0),), run_check=False)
        inferred[0].grad = grad
        with calls_of_torch() as called:
            clip_grad_norm_(inferred, 0.7)
        assert called == every
    with calls_of_torch() as called, torch.autocast("cpu"):
        norm = clip_grad_norm_(made(), 0.7)
    assert called == every
    with torchs_own_clipping(), torch.autocast("cpu"):
        assert torch.equal(local(norm), local(clip_grad_norm_(made(), 0.7)))
    with calls_of_torch() as called, CommDebugMode():
        clip_grad_norm_(made(), 0.7)
    assert called == every
