"""Set-up that torch's `fully_shard` refuses and fsdp_c accepts; the unsharded model is the judge.

Each test runs under fsdp_c, and expects the same under torch, or with FSDP_C_STRICT=1, to fail: a
torch that learns one of them is noticed.
"""

import copy
import os
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, run_ranks
from models import function_replaced
from parity import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

WIDTH = 6


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator)


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(7, (2, 4), generator=generator)


class Mixed(nn.Module):
    """float32, bfloat16, float16 and float64 parameters side by side."""

    inputs = staticmethod(batch)

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 5)
        self.low = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.small = nn.Parameter(torch.rand(5, dtype=torch.float16))
        self.exact = nn.Parameter(torch.rand(3, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(x))
        x = x + self.low(x.bfloat16()).float() * self.small.float()
        return (x.double() @ self.exact.t()).float()


class Scalars(nn.Module):
    """Parameters without dims, one of them frozen."""

    inputs = staticmethod(batch)

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.tensor(0.25))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain * self.fixed + self.bias


class Strided(nn.Module):
    """A transposed matrix and a convolution in channels_last, with rows no rank count divides."""

    inputs = staticmethod(batch)

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, 7).t())
        self.conv = nn.Conv2d(1, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.deep = nn.Conv2d(5, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.matrix.t())
        assert not self.matrix.is_contiguous() and self.matrix.stride() == (1, 7)
        assert self.deep.weight.is_contiguous(memory_format=torch.channels_last)
        return self.deep(torch.tanh(self.conv(x[None, None]))).flatten(1)


class Columns(nn.Module):
    """Sizes that no rank count divides on every dim."""

    inputs = staticmethod(batch)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.cube = nn.Parameter(torch.randn(2, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,kij->bkj", torch.tanh(self.up(x)), self.cube).flatten(1)


def last_dim(param: Tensor) -> Shard:
    return Shard(param.ndim - 1)


def shard_root(model: nn.Module, fsdp: Any, **options: Any) -> None:
    fsdp.fully_shard(model, **options)


MODELS: dict[str, tuple[type[nn.Module], dict[str, Any], type[Exception], str]] = {
    "mixed": (Mixed, {}, AssertionError, "uniform original parameter dtype"),
    "scalars": (Scalars, {}, ValueError, "1D tensor with numel equal to 1"),
    "strided": (Strided, {}, NotImplementedError, "non-contiguous"),
    "columns": (
        Columns,
        {"shard_placement_fn": last_dim},
        NotImplementedError,
        "uneven sharding on dim",
    ),
}

# Sums of more than two depend on their order; low types are rounded once or at each addition.
CLOSE = {
    torch.float64: {"rtol": 1e-6, "atol": 1e-7},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
    torch.float16: {"rtol": 1e-2, "atol": 2e-3},
}


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train_both(
    model: nn.Module, plain: nn.Module, n_steps: int = 3, n_micro: int = 1, lr: float = 0.1
) -> None:
    """Trains both, comparing gradients and parameters; `plain` sees all ranks' data."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m in (model, plain)]
    for step in range(n_steps):
        for micro in range(n_micro):
            if n_micro > 1:
                model.set_requires_gradient_sync(micro == n_micro - 1)
            loss_of(model(model.inputs(rank, step * n_micro + micro))).backward()
            for peer in range(n_ranks):
                data = plain.inputs(peer, step * n_micro + micro)
                (loss_of(plain(data)) / n_ranks).backward()
        compare(model, plain, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, plain)
        # Roundings of low types would reach every other parameter in the next step.
        with torch.no_grad():
            for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
                twin.copy_(full(param))


def compare(model: nn.Module, plain: nn.Module, grads: bool = False) -> None:
    if isinstance(model, torch_fsdp.FSDPModule):
        for module in model.modules():
            if isinstance(module, torch_fsdp.FSDPModule):
                module.reshard()
    # A third of a loss is rounded in the low types, and then reaches all parameters.
    is_rough = isinstance(plain, Mixed) and dist.get_world_size() == 3
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, param in found.items():
        assert isinstance(param, DTensor) and param.dtype is expected[name].dtype
        values, wanted = param, expected[name]
        if grads:
            values, wanted = param.grad, expected[name].grad
        if wanted is None:
            assert values is None, name
            continue
        assert values.dtype is wanted.dtype and values.placements == param.placements
        torch.testing.assert_close(
            full(values),
            wanted.detach(),
            **(CLOSE[torch.bfloat16] if is_rough else CLOSE[wanted.dtype]),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def build(kind: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    cls, options, _, _ = MODELS[kind]
    torch.manual_seed(3)
    plain = cls()
    return copy.deepcopy(plain), plain, options


def train(rank: int, n_ranks: int, kind: str, n_micro: int = 1) -> None:
    model, plain, options = build(kind)
    shard_root(model, harness.implementation(), mesh=cached_mesh((n_ranks,)), **options)
    train_both(model, plain, n_micro=n_micro)
    assert model._get_fsdp_state()._root is not None


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_trains(kind: str, n_ranks: int) -> None:
    run_ranks(train, n_ranks, kind)


@pytest.mark.parametrize("kind", MODELS)
def test_accumulates(kind: str) -> None:
    run_ranks(train, 2, kind, 3)


def train_all(rank: int, n_ranks: int) -> None:
    for kind in MODELS:
        train(rank, n_ranks, kind, 2)


def test_trains_without_shared_memory() -> None:
    run_ranks(train_all, 2, env={"FSDP_C_TRANSPORT": "callback"})


def train_replicas(rank: int, n_ranks: int, kind: str) -> None:
    model, plain, options = build(kind)
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    shard_root(model, harness.implementation(), mesh=mesh, **options)
    train_both(model, plain)


@pytest.mark.parametrize("kind", MODELS)
def test_trains_with_replicas(kind: str) -> None:
    run_ranks(train_replicas, 4, kind)


def refuse(rank: int, n_ranks: int, kind: str, strict: bool) -> None:
    _, _, error, match = MODELS[kind]
    fsdp = harness.implementation() if strict else torch_fsdp
    model, _, options = build(kind)
    if strict:
        os.environ["FSDP_C_STRICT"] = "1"
    try:
        with pytest.raises(error, match=match):
            shard_root(model, fsdp, mesh=cached_mesh((n_ranks,)), **options)
            loss_of(model(model.inputs(rank, 0))).backward()
    finally:
        os.environ.pop("FSDP_C_STRICT", None)


@pytest.mark.parametrize("strict", [False, True], ids=["torch", "strict"])
@pytest.mark.parametrize("kind", MODELS)
def test_torch_and_strict_refuse(kind: str, strict: bool) -> None:
    run_ranks(refuse, 2, kind, strict)


def clip(rank: int, n_ranks: int, kind: str) -> None:
    model, plain, options = build(kind)
    shard_root(model, harness.implementation(), mesh=cached_mesh((n_ranks,)), **options)
    loss_of(model(model.inputs(rank, 0))).backward()
    model.reshard()
    for peer in range(n_ranks):
        (loss_of(plain(plain.inputs(peer, 0))) / n_ranks).backward()
    ours = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    close = {"rtol": 1e-2, "atol": 0} if kind == "mixed" else {"rtol": 1e-4, "atol": 0}
    torch.testing.assert_close(full(ours), theirs, check_dtype=False, **close)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    reference.step()
    if kind != "mixed":  # the first step of Adam is about the sign of each rounded gradient
        compare(model, plain)


@pytest.mark.parametrize("kind", MODELS)
def test_clipping_and_adamw(kind: str) -> None:
    run_ranks(clip, 2, kind)


def save_and_load(rank: int, n_ranks: int, kind: str) -> None:
    fsdp, mesh = harness.implementation(), cached_mesh((n_ranks,))
    model, plain, options = build(kind)
    shard_root(model, fsdp, mesh=mesh, **options)
    loss_of(model(model.inputs(rank, 0))).backward()
    options_full = torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options_full)
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
    for assign in (False, True):
        other = MODELS[kind][0]()
        shard_root(other, fsdp, mesh=mesh, **options)
        sharded = {k: v.clone() for k, v in model.state_dict().items()}
        other.load_state_dict(sharded, assign=assign)
        other.inputs = model.inputs
        train_both(other, copy.deepcopy(plain), n_steps=1)
    other = MODELS[kind][0]()
    shard_root(other, fsdp, mesh=mesh, **options)
    set_model_state_dict(other, whole, options=options_full)
    train_both(other, copy.deepcopy(plain), n_steps=2)


@pytest.mark.parametrize("kind", MODELS)
def test_state_dicts(kind: str) -> None:
    run_ranks(save_and_load, 2, kind)


def from_meta(rank: int, n_ranks: int, kind: str) -> None:
    _, plain, options = build(kind)
    with torch.device("meta"):
        model = MODELS[kind][0]()
    if kind == "strided":  # deep copies and moves to meta keep strides, construction does not
        model.matrix = nn.Parameter(torch.empty(WIDTH, 7, device="meta").t())
    shard_root(model, harness.implementation(), mesh=cached_mesh((n_ranks,)), **options)
    model.to_empty(device="cpu")
    whole = {k: v.detach().clone() for k, v in plain.state_dict().items()}
    options_full = torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole, options=options_full)
    train_both(model, plain, n_steps=2)


@pytest.mark.parametrize("kind", MODELS)
def test_meta_init(kind: str) -> None:
    run_ranks(from_meta, 2, kind)


def scalar_layout(rank: int, n_ranks: int) -> None:
    model, _, _ = build("scalars")
    shard_root(model, harness.implementation(), mesh=cached_mesh((n_ranks,)))
    assert model.gain.placements == (Replicate(),) and model.gain.to_local().shape == ()
    assert model.gain.to_local().item() == 0.5


def test_scalars_are_replicated() -> None:
    run_ranks(scalar_layout, 2)


def low_precision(rank: int, n_ranks: int, kind: str) -> None:
    """Under a policy all parameters compute in bfloat16; the sums are those of torch's policy."""
    fsdp = harness.implementation()
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model, plain, options = build(kind)
    shard_root(model, fsdp, mesh=cached_mesh((n_ranks,)), mp_policy=policy, **options)
    loss_of(model(model.inputs(rank, 0))).backward()
    model.reshard()
    for peer in range(n_ranks):
        twin = copy.deepcopy(plain).bfloat16()
        loss_of(twin(plain.inputs(peer, 0).bfloat16())).backward()
        for param, other in zip(plain.parameters(), twin.parameters(), strict=True):
            if other.grad is not None:
                grad = other.grad.float() / n_ranks
                param.grad = grad if param.grad is None else param.grad + grad
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad, rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["scalars", "strided", "columns"])
def test_mixed_precision(kind: str) -> None:
    run_ranks(low_precision, 2, kind)


# --- the core alone can run them ---


def with_hook(rank: int, n_ranks: int, kind: str, late: bool) -> None:
    model, plain, options = build(kind)
    _, _, error, match = MODELS[kind]
    shard_root(model, harness.implementation(), mesh=cached_mesh((n_ranks,)), **options)
    if late:
        train_both(model, plain, n_steps=1)
    with (
        pytest.raises((error, NotImplementedError), match=f"{match}|only be run by the core"),
        function_replaced(),
    ):
        model(model.inputs(rank, 0))
    if late:
        train_both(model, plain, n_steps=1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_refused_where_torch_runs_the_tree(kind: str, late: bool) -> None:
    run_ranks(with_hook, 2, kind, late)
