"""Units on a device, run by a device over host memory, beside torch's fully_shard.

`_device.on_cpu()` around a first forward takes a model's CPU tensors by the schedule of devices.
"""

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from harness import cached_mesh
from models import Net, data
from parity import Pair, Side, Tolerance, on_ranks
from torch import nn

import fsdp_c
from fsdp_c._comm import _device


def shard_blocks(**options: Any) -> Any:
    return lambda model, fsdp: models.shard_blocks(model, fsdp, **options)


def groups_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, fsdp_c.FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def is_on_device(pair: Pair) -> bool:
    groups = list(groups_of(pair.ours.model))
    return bool(groups) and all(group._is_bound and _device.is_taken(group) for group in groups)


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(1, 3)
def test_steps_and_forwards_without_backward(rank: int, n_ranks: int, reshard: bool | None) -> None:
    with _device.on_cpu():
        pair = Pair(Net, shard_blocks(reshard_after_forward=reshard))
        for step in range(2):
            pair.step(data(rank, step))
            pair.eval_forward(data(rank, 10 + step))
        assert is_on_device(pair)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(4, apart=True)
def test_resharded_to_a_smaller_group(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Backward gathers the slices that forward has left, uneven and cast ones, and no older ones.

    In between torch registers its slices; ours are nobody's business, and shards are registered.
    """

    def reshard(side: Side) -> None:
        for module in (*side.model.blocks, side.model):
            module.reshard()

    def look(side: Side) -> torch.Tensor:
        with torch.no_grad():
            result = side.model(data(rank, 1))
        reshard(side)
        return result

    def train(side: Side) -> torch.Tensor:
        loss = side.model(data(rank)).square().mean()
        loss.backward()
        return loss.detach()

    def leave_old_slices(side: Side) -> torch.Tensor:
        side.model(data(rank, 2))
        with torch.no_grad():
            for param in side.shards.values():
                param.mul_(0.5)
        if side is pair.theirs:  # which would show them
            reshard(side)
        side.model.blocks[0].unshard()
        weight = side.model.blocks[0].up.weight.detach().clone()
        reshard(side)
        return weight

    def counts(pair: Pair) -> tuple[int, int]:
        unit = next(groups_of(pair.ours.model))
        group = _device.smaller_group(unit)
        return group._get_sequence_number_for_group(), unit._core_traffic()["gathered"]

    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    meshes = cached_mesh((4,)), cached_mesh((1, 4), ("replicate", "shard"))
    with _device.on_cpu(by_torch):
        for mesh, options in zip(meshes, ({}, {"mp_policy": policy}), strict=True):
            tolerance = Tolerance.of(n_ranks, torch.bfloat16 if options else torch.float32)
            few = shard_blocks(mesh=mesh, reshard_after_forward=2, **options)
            pair = Pair(Net, few, tolerance=tolerance)
            pair.both(train, "step")
            pair.optimize()
            pair.both(look, "look")
            (n_gathers, one_gather), before = counts(pair), counts(pair)[1] / 3
            pair.both(train, "step")
            assert counts(pair)[0] - n_gathers == 4, "one for each unit"
            assert counts(pair)[1] - one_gather < 2 * before, "slices are not all of a unit"
            pair.both(leave_old_slices, "forward without backward, and other shards")
            pair.both(train, "step")
            assert is_on_device(pair)


@on_ranks(2)
def test_accumulation_and_gradients_that_stay(rank: int, n_ranks: int) -> None:
    def sync(is_synced: bool) -> Any:
        return lambda side: side.model.set_requires_gradient_sync(is_synced)

    def drop_one(side: Side) -> None:
        next(iter(side.shards.values())).grad = None

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks())
        for step in range(2):
            pair.do(sync(False), "no sync")
            pair.forward(data(rank, step))
            pair.backward()
            pair.do(sync(True), "sync")
            pair.forward(data(rank, 5 + step))
            pair.backward()
        pair.do(drop_one, "one gradient less")
        pair.step(data(rank, 9))
        assert is_on_device(pair)


def move(side: Side) -> None:
    side.model._apply(lambda tensor: tensor.clone())


@on_ranks(1, 2)
def test_what_waits_outlasts_moved_shards(rank: int, n_ranks: int) -> None:
    with _device.on_cpu():
        shapes = [(n_ranks,), *((n_ranks // n, n) for n in {1, n_ranks})]
        for shape in shapes:
            mesh = cached_mesh(shape, ("replicate", "shard")[-len(shape) :])
            pair = Pair(Net, shard_blocks(mesh=mesh))
            for step in range(4):
                pair.do(lambda side, on=step != 1: side.model.set_requires_gradient_sync(on))
                pair.do(lambda side, on=step == 3: side.model.set_requires_all_reduce(on))
                pair.forward(data(rank, step))
                pair.backward()
                pair.do(move)
            assert is_on_device(pair)


@on_ranks(2)
def test_sums_on_a_device_need_the_layout(rank: int, n_ranks: int) -> None:
    with _device.on_cpu():
        model: Any = Net()
        models.shard_blocks(model, fsdp_c, mesh=cached_mesh((2, 1), ("replicate", "shard")))
        model.set_requires_all_reduce(False)
        model(data(rank)).sum().backward()
        model.to(torch.float64)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"were cast, .* wait on the device for the rep"):
                model(data(rank).double())
        model.reset_iter_state()
        model(data(rank).double()).sum().backward()


@on_ranks(4)
def test_replicas(rank: int, n_ranks: int) -> None:
    def all_reduce(is_reduced: bool) -> Any:
        return lambda side: side.model.set_requires_all_reduce(is_reduced)

    with _device.on_cpu():
        mesh = cached_mesh((2, 2), ("replicate", "shard"))
        pair = Pair(Net, shard_blocks(mesh=mesh))
        for step in range(2):
            pair.do(all_reduce(False), "scatter")
            pair.forward(data(rank, step))
            pair.backward()
            pair.do(all_reduce(True), "all-reduce")
            pair.step(data(rank, 5 + step))
        assert is_on_device(pair)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(4)
def test_offload(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Shards and gradients stay on the host; hooks and later additions find them there."""

    def drop_one(side: Side) -> None:
        next(iter(side.shards.values())).grad = None

    def step_in_backward(side: Side) -> None:
        param = next(iter(side.model.blocks[1].parameters()))
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    policy = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    with _device.on_cpu(by_torch):
        pair = Pair(Net, shard_blocks(mesh=mesh, offload_policy=policy))
        pair.step(data(rank))
        pair.eval_forward(data(rank, 1))
        for step in (2, 3):
            pair.forward(data(rank, step))
            pair.backward()
        pair.do(drop_one, "one gradient less")
        pair.step(data(rank, 4), set_to_none=False)
        pair.do(step_in_backward, "hook")
        pair.step(data(rank, 5))
        assert is_on_device(pair)


@on_ranks(2)
def test_separate_group_of_reductions(rank: int, n_ranks: int) -> None:
    """set_separate_reduce_scatter_group, before the first forward and after it."""
    if not hasattr(fsdp_c.FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("this torch has no such method")

    def separate(is_enabled: bool) -> Any:
        return lambda side: side.model.set_separate_reduce_scatter_group(is_enabled)

    def n_reductions(group: Any) -> int:
        before = group._get_sequence_number_for_group()
        pair.step(data(rank))
        return group._get_sequence_number_for_group() - before

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks())
        pair.do(separate(True), "on")
        unit = next(groups_of(pair.ours.model))
        group = unit.mesh_info.reduce_scatter_process_group
        assert n_reductions(group) == 4  # three blocks and the root
        pair.do(separate(False), "off")
        assert n_reductions(group) == 0
        pair.do(separate(True), "on again")
        assert n_reductions(group) == 4
        assert is_on_device(pair)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2)
def test_mixed_precision_and_other_dims(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Also as accelerators do it, by torch's operators."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def placement(param: nn.Parameter) -> Any:
        return torch.distributed.tensor.Shard(1 if param.ndim == 2 and param.size(1) == 6 else 0)

    with _device.on_cpu(by_torch):
        tolerance = Tolerance.of(n_ranks, torch.bfloat16)
        pair = Pair(
            Net, shard_blocks(mp_policy=policy, shard_placement_fn=placement), tolerance=tolerance
        )
        for step in range(2):
            pair.step(data(rank, step))
        assert is_on_device(pair)


@on_ranks(2)
def test_exceptions_and_units_unsharded_by_hand(rank: int, n_ranks: int) -> None:
    def fail_in_backward(side: Side) -> None:
        def raise_error(*_: Any) -> None:
            raise ValueError("on purpose")

        hook = side.model.blocks[1].register_forward_hook(
            lambda module, args, out: out.register_hook(raise_error) and None
        )
        with pytest.raises(ValueError, match="on purpose"):
            side.model(data(rank)).sum().backward()
        hook.remove()

    def unshard(side: Side) -> None:
        handle = side.model.blocks[0].unshard(async_op=True)
        side.model.blocks[1].unshard()
        handle.wait()

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks())
        pair.do(unshard, "before the first forward")
        pair.eval_forward(data(rank, 2))
        pair.do(unshard, "by hand")
        pair.do(lambda side: side.model.blocks[0].reshard(), "reshard")
        pair.step(data(rank))
        fail_in_backward(pair.ours)
        with pytest.warns(UserWarning, match="previous backward ended in an exception"):
            pair.ours.model(data(rank)).sum().backward()
        pair.ours.model.zero_grad()
        pair.do(unshard, "by hand")
        pair.step(data(rank, 1))
        assert is_on_device(pair)


def gathers_before(model: nn.Module, block: nn.Module, run: Any) -> int:
    """How many all-gathers `run` starts before the forward of `block`."""
    mark = block.register_forward_pre_hook(
        lambda *_: torch.autograd._record_function_with_args_exit(
            torch.autograd._record_function_with_args_enter("here")
        )
    )
    with torch.profiler.profile() as profile:
        run(model)
    mark.remove()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    return sum("allgather_base" in name for name in names[: names.index("here")])


@on_ranks(2)
def test_prefetches(rank: int, n_ranks: int) -> None:
    def ahead(side: Side) -> None:
        first, second, third = side.model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    def infer(model: nn.Module) -> None:
        with torch.no_grad():
            model(data(rank))

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks())
        pair.step(data(rank))
        model = pair.ours.model
        model.reshard()
        alone = gathers_before(model, model.blocks[0], infer)
        model.reshard()
        pair.do(ahead, "prefetch lists")
        pair.step(data(rank, 1))
        model.reshard()
        assert gathers_before(model, model.blocks[0], infer) == alone + 2
        assert is_on_device(pair)


@on_ranks(2)
def test_units_asked_for_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """They come along when the tree gets its schedule, also those that no forward uses."""

    class OneOfThree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x)

    def ask(side: Side) -> None:
        side.kept = side.model.blocks[1].unshard(async_op=True)
        side.model.blocks[2].unshard()

    def wait(side: Side) -> None:
        side.kept.wait()

    with _device.on_cpu():
        pair = Pair(OneOfThree, shard_blocks())
        pair.do(ask, "ask")
        pair.both(lambda side: side.model(torch.ones(2, 6)).sum().detach(), "forward")
        pair.do(wait, "wait")
        assert is_on_device(pair)
        assert pair.ours.model.blocks[2].weight.shape == (6, 6)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(1, 2)
def test_what_was_written_before_the_first_forward(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Unsharded parameters keep it until they are resharded."""

    def write(side: Side) -> None:
        with torch.no_grad():
            for block in (side.model.blocks[0], side.model):
                block.unshard()
                for param in block.parameters(recurse=False):
                    param.mul_(2)
            for param in side.model.blocks[0].parameters():
                param.mul_(2)
                param.data.add_(1)  # no version counts this one

    with _device.on_cpu(by_torch):
        pair = Pair(Net, shard_blocks())
        pair.do(write, "write")
        pair.both(lambda side: side.model(data(rank)).detach(), "sees what was written")
        pair.both(lambda side: side.model(data(rank)).detach(), "blocks have been resharded")
        pair.do(lambda side: side.model.reshard(), "reshard")
        pair.step(data(rank))
        assert is_on_device(pair)


@pytest.mark.parametrize("is_resharded", [False, True])
@on_ranks(1, 2)
def test_hooks_from_before_the_first_forward(rank: int, n_ranks: int, is_resharded: bool) -> None:
    """Those of unsharded parameters are called, until their handles remove them."""
    calls: dict[str, list[str]] = {"torch": [], "tested": []}

    def hook(side: Side) -> None:
        side.model.unshard()
        side.kept = []
        for param in side.model.parameters(recurse=True):
            if not hasattr(param, "placements"):
                seen = calls[side.name]
                post = param.register_post_accumulate_grad_hook(lambda p, s=seen: s.append("post"))
                side.kept += [post, param.register_hook(lambda grad, s=seen: s.append("grad"))]
        if is_resharded:
            side.model.reshard()

    def step(side: Side) -> list[str]:
        calls[side.name].clear()
        side.model(data(rank)).sum().backward()
        return sorted(calls[side.name])

    def unhook(side: Side) -> None:
        for handle in side.kept:
            handle.remove()

    with _device.on_cpu():
        pair = Pair(Net, shard_blocks())
        pair.do(hook, "hooks")
        assert len(pair.both(step)) > 0
        pair.both(step, "again")
        pair.do(unhook, "no hooks")
        assert pair.both(step) == []
        assert is_on_device(pair)
