"""Gradient accumulation beside torch: micro-batches without synchronisation, and their hooks."""

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import Branches, Net, data
from parity import Pair, Side, Tolerance, on_ranks
from torch import nn


def setter(method: str, *args: Any, **kwargs: Any):
    """A call of one FSDPModule method on the root, for both sides."""

    def call(side: Side) -> None:
        getattr(side.model, method)(*args, **kwargs)

    call.__name__ = method
    return call


def sharding(param: torch.dtype | None, reduce: torch.dtype | None, **options: Any):
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        models.shard_blocks(model, fsdp, mp_policy=policy, **options)

    return shard


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(1, 2, 3)
def test_no_sync(rank: int, n_ranks: int, reshard: bool | None) -> None:
    pair = Pair(Net, sharding(None, None, reshard_after_forward=reshard))
    for step in range(2):
        for micro in range(3):
            pair.both(setter("set_requires_gradient_sync", micro == 2))
            pair.forward(data(rank, 3 * step + micro))
            pair.backward()
        pair.optimize()


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@on_ranks(1, 2)
def test_no_sync_mixed_precision(rank: int, n_ranks: int, reduce: torch.dtype) -> None:
    tolerance = Tolerance.of(n_ranks, reduce)
    pair = Pair(Net, sharding(torch.bfloat16, reduce), tolerance=tolerance)
    for step in range(2):
        for micro in range(3):
            pair.both(setter("set_requires_gradient_sync", micro == 2))
            pair.forward(data(rank, 3 * step + micro))
            pair.backward()
        pair.optimize()


@pytest.mark.parametrize("keep", [True, False])
@on_ranks(1, 2)
def test_no_sync_and_reshard_after_backward(rank: int, n_ranks: int, keep: bool) -> None:
    """Units stay unsharded over micro-batches; the last one reshards them."""
    pair = Pair(Net, sharding(None, None, reshard_after_forward=not keep))
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            pair.both(setter("set_requires_gradient_sync", last))
            pair.both(setter("set_reshard_after_backward", last))
            pair.both(setter("set_is_last_backward", last))
            pair.forward(data(rank, 3 * step + micro))
            pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_no_sync_on_root_only(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step in range(2):
        for micro in range(2):
            pair.both(setter("set_requires_gradient_sync", micro == 1, recurse=False))
            pair.forward(data(rank, 2 * step + micro))
            pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_no_sync_on_one_block(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for micro in range(3):
        pair.both(
            lambda side: side.model.blocks[1].set_requires_gradient_sync(micro == 2), "one block"
        )
        pair.forward(data(rank, micro))
        pair.backward()
    pair.optimize()


@on_ranks(1, 2)
def test_accumulated_gradients_of_unused_units(rank: int, n_ranks: int) -> None:
    """A unit that ran without synchronisation and is not in the last micro-batch is reduced all the
    same.
    """
    pair = Pair(Branches, models.shard_blocks)
    for step in range(2):
        for micro, use in enumerate([(0, 1), (1, 2), (2,)]):
            pair.both(setter("set_requires_gradient_sync", micro == 2))
            pair.forward(data(rank, 3 * step + micro), use=use)
            pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_accumulated_gradients_survive_a_state_dict(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.both(setter("set_requires_gradient_sync", False))
    pair.forward(data(rank))
    pair.backward()
    pair.check_state_dict()
    pair.eval_forward(data(rank, 5))
    pair.both(setter("set_requires_gradient_sync", True))
    pair.step(data(rank, 1))


@on_ranks(1, 2)
def test_frozen_while_accumulating(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.both(setter("set_requires_gradient_sync", False))
    pair.forward(data(rank))
    pair.backward()
    pair.do(lambda side: side.shards["blocks.1.up.weight"].requires_grad_(False), "freeze")
    pair.both(setter("set_requires_gradient_sync", True))
    pair.step(data(rank, 1))


@on_ranks(2)
def test_is_last_backward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    for step in range(2):
        for micro in range(3):
            pair.both(setter("set_is_last_backward", micro == 2))
            pair.forward(data(rank, 3 * step + micro))
            pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_reduce_unused_parameters(rank: int, n_ranks: int) -> None:
    pair = Pair(Branches, models.shard_root)
    if not hasattr(pair.theirs.model, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    pair.step(data(rank))
    pair.both(setter("set_reduce_scatter_unused_params", True))
    pair.step(data(rank, 1), use=(1,))
    pair.step(data(rank, 2), use=(0, 2), set_to_none=False)
    pair.both(setter("set_reduce_scatter_unused_params", False))
    pair.step(data(rank, 3), use=(1,))


@on_ranks(1, 2, 4)
def test_post_accumulate_hooks(rank: int, n_ranks: int) -> None:
    """Called with the sharded parameter, once per reduction, when its gradient is final."""
    pair = Pair(Net, models.shard_blocks)

    def register(side: Side) -> None:
        side.kept_hooks = []
        for name, shard in side.shards.items():
            shard.register_post_accumulate_grad_hook(
                lambda p, name=name: side.kept_hooks.append((name, p.grad.to_local().clone()))
            )

    pair.both(register)
    for micro in range(3):
        pair.both(setter("set_requires_gradient_sync", micro > 0))
        pair.forward(data(rank, micro))
        pair.backward()
        pair.both(lambda side: sorted(side.kept_hooks, key=lambda pair: pair[0]), "hook calls")
        assert len(pair.ours.kept_hooks) == micro * len(pair.ours.shards)


@on_ranks(1, 2)
def test_post_accumulate_hooks_that_return_something(rank: int, n_ranks: int) -> None:
    """Nobody looks at it: autograd's own refusal is not for hooks that FSDP calls."""
    pair = Pair(Net, models.shard_blocks)

    def register(side: Side) -> None:
        for shard in side.shards.values():
            shard.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))

    pair.both(register)
    for step in range(2):
        pair.step(data(rank, step))


@on_ranks(2, 3)
def test_collectives_in_hooks(rank: int, n_ranks: int) -> None:
    """Of gradients and of modules: all ranks come to all of them in one order."""
    pair = Pair(Net, models.shard_blocks)

    def meet(place: int) -> None:
        places = torch.tensor([place])
        dist.all_reduce(places)
        assert places.item() == n_ranks * place

    def register(side: Side) -> None:
        for place, shard in enumerate(side.shards.values()):
            shard.register_post_accumulate_grad_hook(lambda _, place=place: meet(place))
        for place, block in enumerate(side.model.blocks):
            block.register_full_backward_hook(lambda *_, place=100 + place: meet(place))

    pair.both(register)
    for step in range(3):
        pair.step(data(rank, step))


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2)
def test_optimizer_in_backward(rank: int, n_ranks: int, reshard: bool) -> None:
    pair = Pair(Net, sharding(None, None, reshard_after_forward=reshard), optimizer=None)

    def register(side: Side) -> None:
        for shard in side.shards.values():
            optimizer = torch.optim.AdamW([shard], lr=0.01)

            def update(parameter: nn.Parameter, optimizer=optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            shard.register_post_accumulate_grad_hook(update)

    pair.both(register)
    for step in range(3):
        pair.forward(data(rank, step))
        pair.backward()


@on_ranks(2)
def test_reset_drops_accumulated_gradients(rank: int, n_ranks: int) -> None:
    """Torch 2.13 keeps a held micro-batch over `reset_iter_state`; it must not come back."""
    pair = Pair(Net, models.shard_blocks)
    pair.skip_if_same()
    pair.step(data(rank))
    pair.ours.model.set_requires_gradient_sync(False)
    models_output = pair.ours.model(data(rank, 7))
    models_output.sum().backward()
    pair.ours.model.reset_iter_state()
    pair.ours.model.set_requires_gradient_sync(True)
    pair.step(data(rank, 1))
