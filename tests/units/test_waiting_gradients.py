"""Gradients that wait for a reduction while shards are moved, replaced, cast or trained anew."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import harness
import models
import pytest
import test_messages_replicas
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh
from models import Net, data
from parity import Plain, Tolerance, compare, full, on_ranks, total
from test_batches import mesh_of_messages, messages
from test_hsdp import mesh_shapes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NAMES = ("replicate", "shard")
# Whether a micro-batch is reduced, and whether its replicas are.
MICRO_BATCHES = [(False, True), (False, True), (True, True)]
PARTIAL = [(True, False), (False, False), (True, False), (True, True)]


def moved(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor.clone())


def swapped(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moved(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_by_hand(model: Any) -> None:
    with torch.no_grad():
        local = model.stem.weight._local_tensor
        local.set_(local.clone())


def replaced_by_hand(model: Any) -> None:
    old = model.blocks[0].up.weight
    local = old._local_tensor.clone()
    new = DTensor(local, old._spec, requires_grad=False)
    model.blocks[0].up.weight = nn.Parameter(new)


def loaded(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES = [moved, swapped, set_by_hand, replaced_by_hand, loaded]


def kept(model: nn.Module) -> None:
    pass


def gradients(
    fsdp: Any,
    shard: Callable[[nn.Module, Any], None],
    change: Callable[[nn.Module], None],
    micro_batches: Sequence[tuple[bool, bool]],
    rank: int,
) -> dict[str, Tensor]:
    """Of a step whose micro-batches have the change between each other, and of one after it."""
    harness.seed_everything(1)
    model: Any = Net()
    shard(model, fsdp)
    found = {}
    for step in range(2):
        for micro, (sync, all_reduce) in enumerate(micro_batches):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            dtype = model.stem.weight.dtype
            total(model(data(rank, 8 * step + micro).to(dtype))).backward()
            if micro + 1 < len(micro_batches) and step == 0:
                change(model)
        for name, param in model.named_parameters():
            found[f"{step} {name}"] = param.grad
            param.grad = None
    return found


def over(transport: str) -> Any:
    return messages() if transport == "messages" else contextlib.nullcontext()


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize("is_cast", [False, True])
@on_ranks(1, 2)
def test_shards_change_while_accumulating(
    rank: int, n_ranks: int, is_cast: bool, transport: str
) -> None:
    cast = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mp_policy": cast} if is_cast else {}
    tolerance = Tolerance(scaled=1e-5) if is_cast else Tolerance.of(n_ranks)
    with over(transport):
        if transport == "messages":
            options["mesh"] = mesh_of_messages()
        shard = functools.partial(models.shard_blocks, **options)
        for change in CHANGES:
            theirs, ours = (
                gradients(fsdp, shard, change, MICRO_BATCHES, rank)
                for fsdp in (torch_fsdp, harness.implementation())
            )
            compare(ours, theirs, tolerance, change.__name__)


@on_ranks(2, 4)
def test_shards_change_while_sums_wait_for_replicas(rank: int, n_ranks: int) -> None:
    for shape in mesh_shapes(n_ranks):
        shard = functools.partial(models.shard_blocks, mesh=cached_mesh(shape, NAMES))
        for change in (moved, loaded):
            theirs, ours = (
                gradients(fsdp, shard, change, PARTIAL, rank)
                for fsdp in (torch_fsdp, harness.implementation())
            )
            compare(ours, theirs, Tolerance.of(n_ranks), f"{change.__name__} on {shape}")


@pytest.mark.parametrize("where", ["all", "replicas"])
@on_ranks(4)
def test_the_same_over_messages(rank: int, n_ranks: int, where: str) -> None:
    shard = functools.partial(test_messages_replicas.shard, over=where)
    theirs, ours = (
        gradients(fsdp, shard, moved, PARTIAL, rank)
        for fsdp in (torch_fsdp, harness.implementation())
    )
    compare(ours, theirs, Tolerance.of(n_ranks), where)


def doubled(model: nn.Module) -> None:
    model.to(torch.float64)


@pytest.mark.parametrize("micro_batches", [MICRO_BATCHES, PARTIAL])
@on_ranks(2, 4)
def test_cast_while_accumulating(
    rank: int, n_ranks: int, micro_batches: Sequence[tuple[bool, bool]]
) -> None:
    """As nn.Module casts gradients. Torch fails; from 2.15 on not where the compute dtype stays."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        pytest.skip("torch fails here")
    mesh = cached_mesh((2, n_ranks // 2), NAMES)
    for dtype in (None, torch.bfloat16):
        policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
        shard = functools.partial(models.shard_blocks, mesh=mesh, mp_policy=policy)
        before, cast = (
            gradients(fsdp, shard, change, micro_batches, rank) for change in (kept, doubled)
        )
        for name, grad in cast.items():
            assert grad.dtype is torch.float64, name
            torch.testing.assert_close(
                grad.to_local(), before[name].to_local().double(), rtol=1e-4, atol=1e-4, msg=name
            )


@pytest.mark.parametrize("transport", ["memory", "messages"])
@on_ranks(1, 2)
def test_trained_while_accumulating(rank: int, n_ranks: int, transport: str) -> None:
    """Torch goes on without the parameter's gradients."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        pytest.skip("torch passes over it")
    with over(transport):
        plain = Plain(Net)
        harness.seed_everything(1)
        side: Any = type("Side", (), {"model": Net()})
        plain.model.blocks[1].up.requires_grad_(False)
        side.model.blocks[1].up.requires_grad_(False)
        options = {"mesh": mesh_of_messages()} if transport == "messages" else {}
        models.shard_blocks(side.model, fsdp, **options)
        for micro in range(3):
            side.model.set_requires_gradient_sync(micro == 2)
            total(side.model(data(rank, micro))).backward()
            plain.backward([total(plain.model(data(r, micro))) for r in range(n_ranks)], n_ranks)
            for model in (plain.model, side.model):
                model.blocks[1].up.requires_grad_(True)
            moved(side.model)
        side.shards = dict(side.model.named_parameters())
        plain.check(side, Tolerance(relative=1e-5, scaled=1e-5))
        assert full(side.shards["blocks.1.up.weight"].grad).any()


@on_ranks(1, 2)
def test_gradients_that_come_late(rank: int, n_ranks: int) -> None:
    """A weight is read before the forward: its gradient comes after those of its unit, when no unit
    has anything left to do.
    """
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        pytest.skip("torch leaves them until the next backward")
    plain: Any = Net(own=False)
    model: Any = Net(own=False)
    model.load_state_dict(plain.state_dict())
    models.shard_blocks(model, fsdp)
    for micro in range(4):
        is_late = micro == 3
        model.set_requires_gradient_sync(micro != 2)
        if is_late:
            moved(model)
            model.blocks[1].unshard()
        for net, ranks in ((model, [rank]), (plain, range(n_ranks))):
            for each in ranks:
                early = net.blocks[1].up.weight.sum() if is_late else 0
                x = data(each, micro).requires_grad_().clone()
                (net(x).square().sum() + early).backward()
    for name, param in plain.named_parameters():
        grad = full(model.get_parameter(name).grad) * n_ranks
        torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-4, msg=name)


@on_ranks(2)
def test_a_hook_runs_once_for_several_sums(rank: int, n_ranks: int) -> None:
    """A module that runs twice makes two sums of what has waited; an optimizer in the hook takes
    the gradient away with the first call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.extend(model[:2])
    fsdp = harness.implementation()
    fsdp.fully_shard(model[0])
    fsdp.fully_shard(model)
    found = []

    def take(parameter: Tensor) -> None:
        found.append(parameter.grad._local_tensor.clone())
        parameter.grad = None

    weight = model[0].weight
    plain = nn.Parameter(weight.full_tensor().detach().clone())
    bias = model[0].bias.full_tensor().detach()
    weight.register_post_accumulate_grad_hook(take)
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch == 2)
        model(data(rank, micro_batch)[:, :4]).sum().backward()
        for r in range(n_ranks):
            hidden = data(r, micro_batch)[:, :4]
            for _ in range(2):
                hidden = nn.functional.linear(hidden, plain, bias).tanh()
            (hidden.sum() / n_ranks).backward()
    assert len(found) == 1
    torch.testing.assert_close(found[0], plain.grad.chunk(n_ranks)[rank])
