"""Clipping over local tensors and shared memory, with torch's bits; torch's code elsewhere."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import harness
import models
import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh
from models import Net, Odd, Tiny, data
from parity import on_ranks, total
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from fsdp_c._compat import _redirection
from fsdp_c._optim import _clip_grad_norm


@contextlib.contextmanager
def torchs_own_clipping() -> Iterator[None]:
    """Else torch's functions have fsdp_c's inside, whoever calls them."""
    _clip_grad_norm.uninstall()
    try:
        yield
    finally:
        _clip_grad_norm.install()


@contextlib.contextmanager
def calls_of_torch() -> Iterator[list[str]]:
    """Collects the names of torch's own functions of clipping that are called."""
    _clip_grad_norm.uninstall()
    cells = [_redirection.decorated(function) for function in _clip_grad_norm._FUNCTIONS]
    originals, called = [cell.cell_contents for cell in cells], []

    def spy(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(original.__name__)
            return original(*args, **kwargs)

        return call

    for cell, original in zip(cells, originals, strict=True):
        cell.cell_contents = spy(original)
    _clip_grad_norm.install()
    try:
        yield called
    finally:
        _clip_grad_norm.uninstall()
        for cell, original in zip(cells, originals, strict=True):
            cell.cell_contents = original
        _clip_grad_norm.install()


def check_clip(shard: Callable[..., None], rank: int, *args: Any, **kw: Any) -> None:
    norms, grads = [], []
    for is_torch in (True, False):
        torch.manual_seed(1)
        model = Odd()
        shard(model, harness.implementation())
        model(data(rank)).backward()
        with torchs_own_clipping() if is_torch else calls_of_torch() as called:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), *args, **kw))
        assert is_torch or called == []
        grads.append([p.grad.to_local() for p in model.parameters()])
    assert type(norms[0]) is type(norms[1]) is DTensor
    assert norms[0].placements == norms[1].placements
    assert torch.equal(norms[0].full_tensor(), norms[1].full_tensor())
    assert all(map(torch.equal, *grads))


@on_ranks(1, 2)
def test_clipping_has_torchs_bits(rank: int, n_ranks: int) -> None:
    for max_norm in (0.1, 1e9):
        check_clip(models.shard_root, rank, max_norm)
        check_clip(models.shard_root, rank, max_norm, foreach=True)
        check_clip(models.shard_root, rank, max_norm, norm_type=1)
    check_clip(models.shard_root, rank, 0.1, error_if_nonfinite=True)


@on_ranks(2)
def test_largest_where_a_rank_has_no_rows(rank: int, n_ranks: int) -> None:
    """torch refuses this on the rank without rows and leaves the others waiting."""
    torch.manual_seed(1)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    models.shard_root(model, harness.implementation())
    norms = []
    for m in (model, plain):
        m(data(0)).backward()
        norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=math.inf))
    assert norms[0].full_tensor() == norms[1]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@on_ranks(4)
def test_clipping_on_two_dimensions(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    for norm_type in (2.0, 1.0):
        check_clip(functools.partial(models.shard_root, mesh=mesh), rank, 0.1, norm_type)


@on_ranks(1)
def test_clipping_of_plain_tensors_is_torchs(rank: int, n_ranks: int) -> None:
    models.shard_root(Tiny(), harness.implementation())
    model = Net(n_blocks=1)
    total(model(data(rank))).backward()
    with calls_of_torch() as called:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert called == ["clip_grad_norm_", "_get_total_norm", "_clip_grads_with_norm_"]


@on_ranks(1)
def test_first_clipping_in_inference_mode(rank: int, n_ranks: int) -> None:
    """What is tried once per process does not depend on the caller's mode."""
    from fsdp_c._optim import _grad_norm

    model, parameters = parameters_to_clip(harness.implementation(), n_ranks)
    _grad_norm._agrees.cache_clear()
    with calls_of_torch() as called, torch.inference_mode():
        nn.utils.clip_grad_norm_(parameters, 0.1)
    assert not called


@on_ranks(1)
def test_function_modes_see_clipping(rank: int, n_ranks: int) -> None:
    model, parameters = parameters_to_clip(harness.implementation(), n_ranks)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.utils.clip_grad_norm_(parameters, 0.1)
    assert torch._foreach_mul_ in seen


def parameters_to_clip(fsdp: Any, n_ranks: int) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Net()
    models.shard_blocks(model, fsdp, mesh=cached_mesh((n_ranks,)))
    total(model(data(0))).backward()
    return model, list(model.parameters())


def fill_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad.to_local().normal_(generator=generator)


def compare_clipped(ours: list[nn.Parameter], theirs: list[nn.Parameter], norms: list[Any]) -> None:
    assert norms[0].placements == norms[1].placements
    assert torch.equal(norms[0].to_local(), norms[1].to_local())
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


@pytest.mark.parametrize("kind", [2.0, 1.0, 3.0])
@on_ranks(1, 2)
def test_bits_and_messages(rank: int, n_ranks: int, kind: float) -> None:
    """torch adds up over its backend in every call, fsdp_c in the first; then in shared memory."""
    keep, ours = parameters_to_clip(harness.implementation(), n_ranks)
    keep_too, theirs = parameters_to_clip(torch_fsdp, n_ranks)
    counts: list[int] = []
    with mock.patch.object(funcol, "all_reduce", wraps=funcol.all_reduce) as all_reduce:
        for step, max_norm in enumerate((5.0, 3.0, 1000.0)):
            fill_gradients(ours, 10 * rank + step)
            fill_gradients(theirs, 10 * rank + step)
            before = all_reduce.call_count
            versions = [parameter.grad._version for parameter in ours]
            norms = [nn.utils.clip_grad_norm_(ours, max_norm, norm_type=kind)]
            counts.append(all_reduce.call_count - before)
            assert all(p.grad._version > old for p, old in zip(ours, versions, strict=True))
            with torchs_own_clipping():
                norms.append(nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=kind))
            compare_clipped(ours, theirs, norms)
    assert all_reduce.call_count >= 3 * (n_ranks - 1)
    assert counts[1:] == [0, 0]


@on_ranks(1)
def test_gradients_below_the_limit(rank: int, n_ranks: int) -> None:
    """Nothing is multiplied by one, but where that makes zeros of denormal numbers."""
    keep, ours = parameters_to_clip(harness.implementation(), n_ranks)
    keep_too, theirs = parameters_to_clip(torch_fsdp, n_ranks)
    for flushes in (False, True):
        for parameter in (*ours, *theirs):
            parameter.grad.to_local().fill_(1e-40)
        torch.set_flush_denormal(flushes)
        try:
            norms = [nn.utils.clip_grad_norm_(ours, 1.0)]
            with torchs_own_clipping():
                norms.append(nn.utils.clip_grad_norm_(theirs, 1.0))
        finally:
            torch.set_flush_denormal(False)
        compare_clipped(ours, theirs, norms)
        assert all((p.grad.to_local() == 0).all() == flushes for p in theirs)
        versions = [[(p.grad._version, p.grad.to_local()._version) for p in ours]]
        nn.utils.clip_grad_norm_(ours, 1.0)
        versions.append([(p.grad._version, p.grad.to_local()._version) for p in ours])
        assert all(a < b and c < d for (a, c), (b, d) in zip(*versions, strict=True))


@on_ranks(2)
def test_ranks_of_which_one_falls_back(rank: int, n_ranks: int) -> None:
    """A rank that counts collectives needs torch's; then all ranks take them."""
    keep, ours = parameters_to_clip(harness.implementation(), n_ranks)
    keep_too, theirs = parameters_to_clip(torch_fsdp, n_ranks)
    for step in range(4):
        fill_gradients(ours, 10 * rank + step)
        fill_gradients(theirs, 10 * rank + step)
        mode = CommDebugMode() if rank == step % 2 and step > 0 else contextlib.nullcontext()
        with mode:
            norms = [nn.utils.clip_grad_norm_(ours, 1.0)]
        with torchs_own_clipping():
            norms.append(nn.utils.clip_grad_norm_(theirs, 1.0))
        compare_clipped(ours, theirs, norms)
        if isinstance(mode, CommDebugMode):
            assert mode.get_total_counts() == 1


@on_ranks(1)
def test_whoever_replaces_a_step_of_clipping(rank: int, n_ranks: int) -> None:
    """torch's clip_grad_norm_ looks its two steps up by name; so it does here."""
    keep, ours = parameters_to_clip(harness.implementation(), n_ranks)
    for name in ("_get_total_norm", "_clip_grads_with_norm_"):
        original = getattr(clip_grad, name)
        with mock.patch.object(clip_grad, name, wraps=original) as replaced:
            nn.utils.clip_grad_norm_(ours, 1.0)
        assert replaced.call_count == 1
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)
