"""Parameters tied over several units: accepted by fsdp_c; the unsharded model is the judge."""

import copy
import os
from typing import Any

import harness
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, run_ranks
from models import Tied, function_replaced, is_torchs, tokens
from parity import full
from torch import nn
from torch.distributed.tensor import DTensor


def embedding_inside(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """The embedding's unit lies inside the root's, which has the head."""
    for module in (model.embedding, *model.blocks, model):
        fsdp.fully_shard(module, **options)


def head_inside(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for module in (*model.blocks, model.head, model):
        fsdp.fully_shard(module, **options)


def side_by_side(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for module in (model.embedding, *model.blocks, model.head, model):
        fsdp.fully_shard(module, **options)


def head_first(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for module in (model.head, *model.blocks, model.embedding, model):
        fsdp.fully_shard(module, **options)


def grouped(model: nn.Module, fsdp: Any, **options: Any) -> None:
    fsdp.fully_shard([model.blocks[1], model.head], **options)
    fsdp.fully_shard(model.blocks[0], **options)
    fsdp.fully_shard(model, **options)


SHARDINGS = [embedding_inside, head_inside, side_by_side, head_first, grouped]


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    plain = Tied()
    return copy.deepcopy(plain), plain


def train(rank: int, n_ranks: int, shard: Any, n_micro: int) -> None:
    model, plain = build()
    shard(model, harness.implementation(), mesh=cached_mesh((n_ranks,)))
    check_tie(model, plain)
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            assert all(g.fsdp_params for g in module._get_fsdp_state()._fsdp_param_groups)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(3):
        for micro in range(n_micro):
            model.set_requires_gradient_sync(micro == n_micro - 1)
            model(tokens(rank, 10 * step + micro)).square().mean().backward()
            for peer in range(n_ranks):
                loss = plain(tokens(peer, 10 * step + micro)).square().mean()
                (loss / n_ranks).backward()
        model.reshard()
        check_tie(model, plain)
        for name, param in plain.named_parameters():
            grad = full(model.get_parameter(name).grad)
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full(state[name]), value, rtol=1e-3, atol=1e-5)
    other, _ = build()
    shard(other, harness.implementation(), mesh=cached_mesh((n_ranks,)))
    other.load_state_dict(state)
    other.reshard()
    check_tie(other, plain)
    with torch.no_grad():
        torch.testing.assert_close(other(tokens(0)), model(tokens(0)))


def check_tie(model: nn.Module, plain: nn.Module) -> None:
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("shard", SHARDINGS)
def test_trains(shard: Any, n_ranks: int) -> None:
    run_ranks(train, n_ranks, shard, 1)


@pytest.mark.parametrize("shard", SHARDINGS)
def test_accumulates(shard: Any) -> None:
    run_ranks(train, 2, shard, 2)


def train_on_torchs(rank: int, n_ranks: int, shard: Any) -> None:
    """Ties are a matter of set-up, so trees that torch's code runs have them too."""
    model, plain = build()
    shard(model, harness.implementation(), mesh=cached_mesh((n_ranks,)))
    with function_replaced():
        model(tokens(rank)).square().mean().backward()
    assert is_torchs(model) and is_torchs(model.blocks[0])
    model.reshard()
    for peer in range(n_ranks):
        (plain(tokens(peer)).square().mean() / n_ranks).backward()
    for name, param in plain.named_parameters():
        grad = full(model.get_parameter(name).grad)
        torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shard", SHARDINGS)
def test_trains_on_torchs_implementation(shard: Any) -> None:
    run_ranks(train_on_torchs, 2, shard)


def refuse(rank: int, n_ranks: int, shard: Any, strict: bool) -> None:
    model, _ = build()
    if strict:
        os.environ["FSDP_C_STRICT"] = "1"
    try:
        fsdp = harness.implementation() if strict else torch_fsdp
        shard(model, fsdp, mesh=cached_mesh((n_ranks,)))
        with pytest.raises(ValueError, match="already managed by another"):
            model(tokens(rank))
    finally:
        os.environ.pop("FSDP_C_STRICT", None)


@pytest.mark.parametrize("strict", [False, True], ids=["torch", "strict"])
@pytest.mark.parametrize("shard", SHARDINGS)
def test_torch_and_strict_refuse(shard: Any, strict: bool) -> None:
    run_ranks(refuse, 2, shard, strict)


def without_enclosing_call(rank: int, n_ranks: int) -> None:
    model, _ = build()
    fsdp, mesh = harness.implementation(), cached_mesh((n_ranks,))
    fsdp.fully_shard(model.embedding, mesh=mesh)
    fsdp.fully_shard(model.head, mesh=mesh)
    with pytest.raises(ValueError, match="Call fully_shard on a module that contains both"):
        model(tokens(rank))
    fsdp.fully_shard(model.blocks[0], mesh=mesh)


def test_units_side_by_side_need_one_around_them() -> None:
    run_ranks(without_enclosing_call, 2)


def failed_call(rank: int, n_ranks: int) -> None:
    """A call that fails gives the inner unit its parameter back."""
    model, plain = build()
    fsdp, mesh = harness.implementation(), cached_mesh((n_ranks,))
    fsdp.fully_shard(model.embedding, mesh=mesh)
    weight = model.embedding.weight
    with pytest.raises(ValueError, match="Invalid"):
        fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=str)
    assert model.embedding.weight is weight and isinstance(weight, DTensor)
    group = model.embedding._get_fsdp_state()._fsdp_param_groups[0]
    assert [p.sharded_param for p in group.fsdp_params] == [weight]
    fsdp.fully_shard(model, mesh=mesh)
    check_tie(model, plain)
    model(tokens(rank)).sum().backward()


def test_failed_call_leaves_the_tie() -> None:
    run_ranks(failed_call, 2)
