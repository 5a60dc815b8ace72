"""functorch's transforms around a model, in its first forward too; the unsharded model judges."""

import copy
from collections.abc import Callable
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from behaviour.records import collectives
from differential.ways import TRANSPORTS
from models import Net, data
from parity import full
from torch import Tensor, func, nn

import fsdp_c

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def mean(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def vmap(model: Any, x: Tensor) -> Any:
    out = func.vmap(model)(x)
    out.square().mean().backward()
    return out


def grad(model: Any, x: Tensor) -> Any:
    return func.grad(mean(model))(x)


def grads_of_samples(model: Any, x: Tensor) -> Any:
    return func.vmap(func.grad(mean(model)))(x)


def jvp(model: Any, x: Tensor) -> Any:
    return func.jvp(model, (x,), (torch.ones_like(x),))


def vjp(model: Any, x: Tensor) -> Any:
    out, pull = func.vjp(model, x)
    return out, pull(torch.ones_like(out))


def jacobians(model: Any, x: Tensor) -> Any:
    return func.jacrev(model)(x[:2]), func.jacfwd(model)(x[:2])


def hessian(model: Any, x: Tensor) -> Any:
    return func.hessian(mean(model))(x[:2])


def functional_call(model: Any, x: Tensor) -> Any:
    out = func.functional_call(model, dict(model.named_parameters()), (x,))
    out.square().mean().backward()
    return out


TRANSFORMS = (vmap, grad, grads_of_samples, jvp, vjp, jacobians, hessian, functional_call)


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.detach()]
    return [leaf for item in tree for leaf in leaves(item)]


def check(rank: int, n_ranks: int, name: str, first: bool, in_sight: bool) -> None:
    transform = globals()[name]
    fsdp = harness.implementation()
    harness.seed_everything(1)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    models.shard_blocks(model, fsdp)
    if not first:
        model(data(rank)).sum().backward()
        model.zero_grad()
    if in_sight:
        with collectives() as seen:
            found = transform(model, data(rank))
        assert seen
    else:
        found = transform(model, data(rank))
    torch.testing.assert_close(leaves(found), leaves(transform(plain, data(rank))), **CLOSE)
    check_step(model, plain, rank, n_ranks)
    if fsdp is not torch_fsdp:
        assert not any(row.road.startswith("torch") for row in fsdp_c.explain(model).units)


def check_step(model: Any, plain: nn.Module, rank: int, n_ranks: int) -> None:
    """What the transform has left counts, and a step without one is as ever."""
    had_gradients = next(plain.parameters()).grad is not None
    whole = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert bool(whole) == had_gradients
    model.zero_grad()
    plain.zero_grad()
    model(data(rank, 1)).square().mean().backward()
    for r in range(n_ranks):
        (plain(data(r, 1)).square().mean() / n_ranks).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            full(model.get_parameter(name).grad), parameter.grad, **CLOSE, msg=name
        )


def check_all(rank: int, n_ranks: int, first: bool, in_sight: bool) -> None:
    for transform in TRANSFORMS:
        check(rank, n_ranks, transform.__name__, first, in_sight)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_transforms(n_ranks: int, transport: str, first: bool) -> None:
    harness.run_ranks(check_all, n_ranks, first, False, env=TRANSPORTS[transport])


def test_transforms_with_collectives_in_sight() -> None:
    harness.run_ranks(check_all, 2, True, True)


def check_gradients(rank: int, n_ranks: int) -> None:
    """Averages over ranks of what a mapped forward and a backward behind it leave."""
    harness.seed_everything(1)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    models.shard_blocks(model, harness.implementation())
    vmap(model, data(rank))
    for r in range(n_ranks):
        (func.vmap(plain)(data(r)).square().mean() / n_ranks).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            full(model.get_parameter(name).grad), parameter.grad, **CLOSE, msg=name
        )


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_gradients(n_ranks: int) -> None:
    harness.run_ranks(check_gradients, n_ranks)


def check_unsharded_by_hand(rank: int, n_ranks: int) -> None:
    """In a transform, before the first forward."""
    harness.seed_everything(1)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    models.shard_blocks(model, harness.implementation())

    def forward(x: Tensor) -> Tensor:
        model.blocks[1].unshard()
        return model(x).square().mean()

    found = func.grad(forward)(data(rank))
    torch.testing.assert_close(found, grad(plain, data(rank)), **CLOSE)
    check_step(model, plain, rank, n_ranks)


def test_unsharded_by_hand() -> None:
    harness.run_ranks(check_unsharded_by_hand, 2)


def check_plain_parameters(rank: int, n_ranks: int) -> None:
    """Parameters of the whole size in the place of shards: torch fails with an AttributeError."""
    if harness.implementation() is torch_fsdp:
        return
    for first in (True, False):
        model: Any = Net()
        models.shard_blocks(model, fsdp_c)
        if not first:
            model(data(rank)).sum().backward()
        model.reshard()
        whole = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"weight' .*was replaced by a Tensor.*DTensor"):
            func.grad(lambda p, m=model: func.functional_call(m, p, (data(rank),)).sum())(whole)
        model(data(rank)).sum().backward()


def test_plain_parameters() -> None:
    harness.run_ranks(check_plain_parameters, 2)


def halved() -> tuple[Any, Net, dict[str, Any], Net]:
    """A sharded model, the same unsharded; shards of half its values, a model of these."""
    harness.seed_everything(1)
    plain, other = Net(), Net()
    model: Any = copy.deepcopy(plain)
    models.shard_blocks(model, fsdp_c)
    other.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    return model, plain, {n: p.detach() * 0.5 for n, p in model.named_parameters()}, other


def check_shards(rank: int, n_ranks: int) -> None:
    """Shards of other values count in the call, where torch takes those of the model, and go."""
    if harness.implementation() is torch_fsdp:
        return
    model, plain, shards, other = halved()
    model.set_reshard_after_forward(True)  # the root shows shards when the call ends
    model(data(rank)).sum().backward()
    model.reshard()
    with torch.no_grad():
        for _ in range(2):
            found = func.functional_call(model, shards, (data(rank),))
            torch.testing.assert_close(found, other(data(rank)), **CLOSE)
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), **CLOSE)
    for name, shard in shards.items():
        torch.testing.assert_close(shard.full_tensor(), other.get_parameter(name))
    model.zero_grad()
    check_step(model, plain, rank, n_ranks)


def test_shards() -> None:
    harness.run_ranks(check_shards, 2)


def check_shards_of_a_root_that_stays(rank: int, n_ranks: int) -> None:
    """Its unsharded parameters stand where the call puts the model's shards back.

    They are written to the dictionary of the call, by which it would be given them again.
    """
    if harness.implementation() is torch_fsdp:
        return
    model, plain, shards, other = halved()
    with torch.no_grad():
        for resharded in (False, True):
            found = func.functional_call(model, dict(shards), (data(rank),))
            torch.testing.assert_close(found, other(data(rank)), **CLOSE)
            if resharded:
                model.reshard()
                for name, shard in model.named_parameters():
                    torch.testing.assert_close(shard.full_tensor(), plain.get_parameter(name))
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), **CLOSE)
            with pytest.raises(RuntimeError, match="while the unit is unsharded.*call reshard"):
                func.functional_call(model, dict(shards), (data(rank),))
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), **CLOSE)
            model.reshard()
    check_step(model, plain, rank, n_ranks)


def test_shards_of_a_root_that_stays() -> None:
    harness.run_ranks(check_shards_of_a_root_that_stays, 2)


def look_for_nothing(rank: int, n_ranks: int) -> None:
    """A thread that has looked has a stack of transforms, which autograd copies with each node."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch._C._functorch, "peek_interpreter_stack", lambda: asked.append("the stack")
        )
        model: Any = Net()
        models.shard_blocks(model, fsdp_c)
        model(data(rank)).sum().backward()
        assert [row.road for row in fsdp_c.explain(model).units if "core" not in row.road] == []
    assert asked == []


def test_nobody_looks_for_transforms_where_there_are_none() -> None:
    harness.run_ranks(look_for_nothing, 1)
