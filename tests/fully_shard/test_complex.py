"""Complex parameters, and gradients that autograd shows conjugated or negated without writing so.

Torch trains a unit whose parameters are all complex; it refuses others beside them, and a real
reduce_dtype: the unsharded model is the judge there.
"""

from collections.abc import Callable
from typing import Any

import harness
import models
import pytest
import torch
from differential.feature_nets import ReduceScatter
from models import WIDTH, data
from parity import Pair, Plain, Side, Tolerance, on_ranks, sgd, total
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fsdp_c
from fsdp_c._fully_shard import _verify

C64, C128 = torch.complex64, torch.complex128
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def as_reals(z: Tensor) -> Tensor:
    return torch.view_as_real(z.resolve_conj())


class Complex(nn.Module):
    """Rows that no number of ranks divides."""

    def __init__(self, dtype: torch.dtype = C64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return as_reals(x.to(self.weight.dtype) @ self.weight.t() + self.bias)


class Mixed(nn.Module):
    """A layer of spectral weights between real ones; a phase alone; one that is not trained."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.randn(3))
        self.up = nn.Linear(width, 7)
        self.modes = nn.Parameter(torch.randn(4, 7, 3, dtype=C64))
        self.phase = nn.Parameter(torch.randn((), dtype=C64))
        self.wide = nn.Parameter(torch.randn(9, dtype=C128))
        self.fixed = nn.Parameter(torch.randn(4, dtype=C64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.up(x).float(), dim=-1)
        out = torch.einsum("bm,mio->bo", spectrum * self.fixed, self.modes) * self.phase
        return as_reals(out * self.norm + self.wide.sum().to(C64))


class Lazy(nn.Module):
    """Gradients that are views of conjugated or negated memory, laid out as their parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(6, 2, dtype=C64))
        self.one = nn.Parameter(torch.randn(1, dtype=C64))
        self.real = nn.Parameter(torch.randn(1))
        self.imaginary = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.complex(self.real, self.imaginary).conj()
        scale = x.mean().to(C64)
        return as_reals(torch.cat([t.flatten() for t in (self.waves.conj(), self.one.conj())])) * (
            x.mean()
        ) + as_reals(pair * scale)


def check_on_core(model: Any) -> None:
    assert harness.implementation() is not fsdp_c or not models.is_torchs(model)


def check_steps(
    build: Callable[[], nn.Module],
    shard: Callable[..., None],
    rank: int,
    n_ranks: int,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
) -> None:
    """Steps give the gradients and parameters of the unsharded model."""
    side, plain = Side("tested", fsdp_c, build, shard, optimizer), Plain(build)
    plain.optimizer = optimizer(plain.model.parameters())
    for step in range(3):
        side.optimizer.zero_grad()
        plain.optimizer.zero_grad()
        total(side.model(data(rank, step))).backward()
        plain.backward([total(plain.model(data(r, step))) for r in range(n_ranks)], n_ranks)
        plain.check(side, CLOSE)
        side.optimizer.step()
        plain.optimizer.step()
    plain.check(side, CLOSE)
    assert not models.is_torchs(side.model)


@pytest.mark.parametrize("dtype", [C64, C128], ids=["complex64", "complex128"])
@on_ranks(1, 2, 3)
def test_units_of_complex_parameters(rank: int, n_ranks: int, dtype: torch.dtype) -> None:
    """As torch, bit for bit on two ranks: steps, accumulation, evaluation, state dicts."""
    pair = Pair(lambda: Complex(dtype), models.shard_root)
    models.train(pair, rank)
    pair.check_state_dict()
    check_on_core(pair.ours.model)


@pytest.mark.parametrize("mesh", [(), (2, 1)], ids=["shards", "replicas"])
@on_ranks(2)
def test_an_all_reduce_hook_gets_complex_numbers(
    rank: int, n_ranks: int, mesh: tuple[int, ...]
) -> None:
    """The sums that torch's has, in their sizes; a custom reduce-scatter gets them, too."""
    seen: dict[Any, list[Any]] = {}

    def shard(model: nn.Module, fsdp: Any) -> None:
        where = {"mesh": harness.cached_mesh(mesh, ("r", "s"))} if mesh else {}
        fsdp.fully_shard(model, **where)
        noted = seen.setdefault(fsdp, [])

        def turn(output: Tensor) -> None:
            noted.append((output.dtype, output.numel()))
            output.mul_(1j)

        model.set_all_reduce_hook(turn)
        if not mesh:
            model.set_custom_reduce_scatter(ReduceScatter(noted))

    pair = Pair(Complex, shard)
    pair.step(data(rank))
    theirs, ours = seen.values()
    assert theirs == ours and theirs
    check_on_core(pair.ours.model)


@on_ranks(2)
def test_clipping(rank: int, n_ranks: int) -> None:
    pair = Pair(Complex, models.shard_root)
    pair.forward(data(rank))
    pair.backward()
    pair.both(lambda side: nn.utils.clip_grad_norm_(side.model.parameters(), 0.3).full_tensor())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@on_ranks(2)
def test_optimizers(rank: int, n_ranks: int, kind: type[torch.optim.Optimizer]) -> None:
    """Torch's own loses a step over complex DTensors."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.05)

    check_steps(Mixed, models.shard_root, rank, n_ranks, optimizer)


@on_ranks(2)
def test_a_real_param_dtype_leaves_them_as_they_are(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        models.shard_root(model, fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16))

    pair = Pair(Complex, shard)
    pair.step(data(rank))
    check_on_core(pair.ours.model)


@on_ranks(1, 2, 3)
def test_beside_real_ones(rank: int, n_ranks: int) -> None:
    check_steps(Mixed, lambda m, fsdp: fsdp.fully_shard(m), rank, n_ranks)


@pytest.mark.parametrize("reduce", [F32, F64, BF16, F16], ids=str)
@on_ranks(2)
def test_a_real_reduce_dtype(rank: int, n_ranks: int, reduce: torch.dtype) -> None:
    """Never takes a part away: complex ones are summed in the wider of the two."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    check_steps(Complex, lambda m, fsdp: fsdp.fully_shard(m, mp_policy=policy), rank, n_ranks)


@on_ranks(2)
def test_split_at_another_dim(rank: int, n_ranks: int) -> None:
    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 3 else None

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, shard_placement_fn=place)

    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modes = nn.Parameter(torch.randn(3, 4, 5, dtype=C64))

        def forward(self, x: Tensor) -> Tensor:
            return as_reals(self.modes * x.mean())

    check_steps(Even, shard, rank, n_ranks)


@on_ranks(4)
def test_replicas_and_partial_sums(rank: int, n_ranks: int) -> None:
    mesh = harness.cached_mesh((2, 2), ("replicate", "shard"))

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, mesh=mesh)

    side, plain = Side("tested", fsdp_c, Mixed, shard, sgd), Plain(Mixed)
    for micro in range(3):
        side.model.set_requires_all_reduce(micro == 2)
        total(side.model(data(rank, micro))).backward()
        plain.backward([total(plain.model(data(r, micro))) for r in range(n_ranks)], n_ranks)
    plain.check(side, CLOSE)
    assert not models.is_torchs(side.model)


@on_ranks(2, 3)
def test_sums_that_others_look_at(rank: int, n_ranks: int) -> None:
    """There chunks lie next to one another, an odd number of real ones before complex ones."""
    seen = []

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model)
        model.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))

    check_steps(Mixed, shard, rank, n_ranks)
    assert seen


@pytest.mark.parametrize("build", [Mixed, Lazy])
@on_ranks(2, 3)
def test_accumulated_without_synchronization(rank: int, n_ranks: int, build: Any) -> None:
    side, plain = Side("tested", fsdp_c, build, models.shard_root, sgd), Plain(build)
    for micro in range(3):
        side.model.set_requires_gradient_sync(micro == 2)
        total(side.model(data(rank, micro))).backward()
        plain.backward([total(plain.model(data(r, micro))) for r in range(n_ranks)], n_ranks)
    plain.check(side, CLOSE)


@on_ranks(1, 2)
def test_gradients_that_are_lazily_negated(rank: int, n_ranks: int) -> None:
    """Their memory has the other sign: of real parameters, too."""
    leaf = Lazy()
    total(leaf(data(rank))).backward()
    if not leaf.imaginary.grad.is_neg() or not leaf.waves.grad.is_conj():
        pytest.skip("this torch writes them out")
    check_steps(Lazy, lambda m, fsdp: fsdp.fully_shard(m), rank, n_ranks)


@on_ranks(2)
def test_the_self_check_reads_them(rank: int, n_ranks: int) -> None:
    """It is silent where all is well, and tells of one that is wrong."""
    for is_wrong in (False, True):
        harness.seed_everything(1)
        model = Mixed()
        fsdp_c.fully_shard(model)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("FSDP_C_VERIFY", "1")
            loss = total(model(data(rank)))
            if not is_wrong:
                loss.backward()
                continue
            plain = _verify.gathered_plainly
            patched.setattr(_verify, "gathered_plainly", lambda seen: plain(seen).conj() + 1)
            with pytest.raises(RuntimeError, match="was gathered with other bits"):
                loss.backward()


@on_ranks(2)
def test_ranks_that_differ_in_it(rank: int, n_ranks: int) -> None:
    """Twice as many real numbers are as many bytes: ranks are told nevertheless."""
    model = nn.Linear(4, 6, bias=False)
    if rank == 1:
        model.weight = nn.Parameter(torch.randn(6, 4, dtype=C64))
    fsdp_c.fully_shard(model)
    with pytest.raises(RuntimeError, match="complex64"):
        model(torch.ones(2, 4, dtype=model.weight.dtype))


@on_ranks(2)
def test_strict_refuses_as_torch(rank: int, n_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FSDP_C_STRICT", "1")
        model = Complex()
        fsdp_c.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=F32))
        with pytest.raises(TypeError, match="cannot sum in torch.float32"):
            model(data(rank))


@pytest.mark.parametrize("what", ["param_dtype", "reduce_dtype"])
@on_ranks(2)
def test_complex_dtypes_for_real_ones(rank: int, n_ranks: int, what: str) -> None:
    """Torch computes with them as complex numbers, or sums gradients as such: it has to do it."""

    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, WIDTH))
            self.fixed = nn.Parameter(torch.randn(5), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            out = x.to(self.weight.dtype) @ self.weight.t() + self.fixed
            return as_reals(out) if out.is_complex() else out

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**{what: C64}))

    pair = Pair(Real, shard)
    pair.step(data(rank))
    assert harness.implementation() is not fsdp_c or models.is_torchs(pair.ours.model)
