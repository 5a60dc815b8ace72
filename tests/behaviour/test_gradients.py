"""G: what becomes of gradients that users put, keep, drop or watch."""

from typing import Any

import harness
import torch
import torch.distributed.fsdp as torch_fsdp
from models import Net, data
from parity import on_ranks, total
from torch import nn

from behaviour.pairs import (
    agree,
    backward,
    chain,
    gradients,
    hsdp_mesh,
    linear,
    raised,
    sharded,
    shards,
)


@on_ranks(2)
def test_g2_a_gradient_on_the_full_parameter_is_added(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        shard = model.weight
        model.unshard()
        model.weight.grad = torch.full((4, 4), 8.0)
        backward(model, torch.ones(2, 4))
        with_it = shard.grad.to_local().clone()
        shard.grad = None
        backward(model, torch.ones(2, 4))
        return (with_it - shard.grad.to_local()).round(decimals=4).unique().tolist()

    assert agree(see) == [8.0]


@on_ranks(1, 2)
def test_g3_sparse_gradients_are_refused(rank: int, n_ranks: int) -> None:
    def end(fsdp: Any, *texts: str) -> str:
        model = fsdp.fully_shard(nn.Sequential(nn.Embedding(6, 4, sparse=True)))
        return raised(lambda: backward(model, torch.tensor([0, 1])), *texts)

    ours = harness.implementation()
    if n_ranks > 1:
        assert end(torch_fsdp) in ("NotImplementedError", "RuntimeError")  # by the version
    if ours is not torch_fsdp:
        assert end(ours, "'0.weight' is sparse", "sparse=False") == "ValueError"


@on_ranks(2)
def test_g8_the_divide_factor_is_the_units_own(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        found = []
        for factor in (None, 1.0):
            model = sharded(fsdp, Net)
            kept = shards(model)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
                model.set_force_sum_reduction_for_comms(True)
            total(model(data(rank))).backward()
            found.append(gradients(kept))
        return found

    usual, summed = agree(see)
    for name, gradient in usual.items():
        factor = 1 if name.startswith("blocks") else 2
        assert torch.equal(summed[name], factor * gradient), name


@on_ranks(1, 2)
def test_g9_division_by_zero(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> str:
        model = linear(fsdp)
        model.set_gradient_divide_factor(0)
        return raised(lambda: backward(model, torch.ones(2, 4)))

    assert see(harness.implementation()) == "ZeroDivisionError"
    if n_ranks > 1:
        assert see(torch_fsdp) == "ZeroDivisionError"


@on_ranks(1)
def test_g14_a_plain_gradient_of_a_shard(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> str:
        model = linear(fsdp)
        model.weight.grad = torch.ones(4, 4)
        return raised(lambda: backward(model, torch.ones(2, 4)), "to be DTensor, got")

    assert agree(see) == "AssertionError"


@on_ranks(2)
def test_g15_g16_what_zero_grad_reaches(rank: int, n_ranks: int) -> None:
    """Nothing that is held; under torch not the shards of units that are unsharded now, either."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp, reshard_after_forward=False)
        shard = model.weight
        seen = []
        for forget in (model.zero_grad, torch.optim.SGD([shard]).zero_grad):
            backward(model, torch.ones(1, 4))
            once = shard.grad.to_local().clone()
            loss = total(model(torch.ones(1, 4)))
            forget()
            loss.backward()
            seen.append((shard.grad.to_local() / once).unique().tolist())
            shard.grad = None
        model.set_requires_gradient_sync(False)
        backward(model, torch.ones(1, 4))
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        backward(model, torch.ones(1, 4))
        seen.append((shard.grad.to_local() / once).unique().tolist())
        return seen

    assert see(torch_fsdp) == [[2.0], [1.0], [2.0]]
    if harness.implementation() is not torch_fsdp:
        assert see(harness.implementation()) == [[1.0], [1.0], [2.0]]


@on_ranks(2)
def test_g17_kept_units_show_no_gradients(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        kept = shards(model)
        model.set_reshard_after_backward(False)
        backward(model, torch.ones(2, 4))
        before = [parameter.grad is None for parameter in model.parameters()]
        for unit in (*model, model):
            unit.reshard()
        return before, gradients(kept), gradients(dict(model.named_parameters()))

    before, kept, found = agree(see)
    assert all(before) and str(kept) == str(found) and None not in kept.values()


@on_ranks(2)
def test_g25_g28_the_all_reduce_hook(rank: int, n_ranks: int) -> None:
    """Gets the flat sum and may change it; rests while nothing is summed over replicas."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp, mesh=hsdp_mesh())
        seen: list[Any] = []

        def hook(flat: torch.Tensor) -> None:
            seen.append((flat.dtype, flat.ndim))
            flat.mul_(3)

        model.set_all_reduce_hook(hook)
        n_calls = []
        for sums_up in (False, True):
            model.set_requires_all_reduce(sums_up)
            backward(model, torch.ones(2, 4))
            n_calls.append(len(seen))
        return n_calls, seen, gradients(shards(model))

    n_calls, seen, _ = agree(see)
    assert n_calls == [0, 1] and seen == [(torch.float32, 1)]


@on_ranks(2)
def test_g27_tensor_hooks(rank: int, n_ranks: int) -> None:
    """None fires on a sharded parameter; on a full one they see what was not reduced yet."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        seen: list[Any] = []
        model.weight.register_hook(lambda gradient: seen.append("sharded"))
        model.unshard()
        model.weight.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        model.reshard()
        for _ in range(2):
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
        return seen

    assert agree(see) == [16.0 * (rank + 1)] * 2
