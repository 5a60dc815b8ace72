"""Small units that share collectives over a process group, beside torch's own units."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from models import Branches, Net, data
from parity import Pair, Side, Tolerance, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_c
from fsdp_c._comm import _transport


@functools.cache
def mesh_of_messages() -> DeviceMesh:
    """Its ranks talk over the process group, in units that are made by `shard`."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def shard(model: nn.Module, fsdp: Any, how: str = "blocks", **options: Any) -> None:
    getattr(models, f"shard_{how}")(model, fsdp, mesh=mesh_of_messages(), **options)


@contextlib.contextmanager
def messages() -> Iterator[dict[str, int]]:
    """Over messages; counts collectives of the core."""
    calls = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    kept = {name: getattr(_transport.Messages, name) for name in calls}

    def counting(name: str) -> Any:
        def call(*args: Any, **named: Any) -> None:
            calls[name] += 1
            kept[name](*args, **named)

        return call

    os.environ["FSDP_C_TRANSPORT"] = "callback"
    for name in calls:
        setattr(_transport.Messages, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(_transport.Messages, name, function)
        del os.environ["FSDP_C_TRANSPORT"]


def pair_of(build: Any, how: str = "blocks", tolerance: Any = None, **options: Any) -> Pair:
    return Pair(build, lambda m, fsdp: shard(m, fsdp, how, **options), tolerance=tolerance)


@pytest.mark.parametrize("how", ["blocks", "deep", "grouped"])
@on_ranks(2, 3)
def test_training(rank: int, n_ranks: int, how: str) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Sums of float32 over bf16 gradients; the forward is the same.
    close = Tolerance(scaled=1e-5, realign=True)
    with messages():
        for options in (
            {},
            {"reshard_after_forward": False},
            {"mp_policy": bf16, "tolerance": close},
        ):
            pair = pair_of(Net, how, **options)
            for step in range(3):
                pair.step(data(rank, step))
            pair.eval_forward(data(rank, 3))
            pair.step(data(rank, 4))


@on_ranks(2, 3)
def test_what_changes_between_steps(rank: int, n_ranks: int) -> None:
    with messages():
        pair = pair_of(Branches)
        for step, use in enumerate([(0, 1, 2), (0, 1, 2), (2, 1), (0, 0, 1), (1,), (0, 1, 2)]):
            pair.step(data(rank, step), use=use)
        for step in range(2):  # micro-batches, of which the first is not reduced
            pair.do(lambda side, step=step: side.model.set_requires_gradient_sync(step == 1))
            pair.forward(data(rank, step))
            pair.backward()
        pair.optimize()
        pair.do(lambda side: side.model.blocks[1].unshard())
        pair.step(data(rank, 6))
        pair.do(lambda side: side.model.blocks[1].requires_grad_(False))
        for step in range(7, 9):
            pair.step(data(rank, step))


class Fragile(Net):
    """Raises in forward, or in backward, behind its second block."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.where == "forward":
                raise ZeroDivisionError
            if index == 1 and self.where == "backward":
                x.register_hook(lambda grad: 1 // 0)
        return x


@on_ranks(2)
def test_a_right_step_follows_an_exception(rank: int, n_ranks: int) -> None:
    with messages():
        side = Side("tested", fsdp_c, lambda: Fragile(4, own=False), shard, None)
        wanted = None
        for where in ("", "forward", "backward", ""):
            side.model.where = where
            with pytest.raises(ZeroDivisionError) if where else contextlib.nullcontext():
                side.model(data(rank)).square().sum().backward()
            grads = [p.grad for p in side.model.parameters()]
            if not where:
                found = [grad.to_local().clone() for grad in grads]
                torch.testing.assert_close(found, wanted or found, rtol=0, atol=0)
                wanted = found
            side.model.zero_grad()


def train(model: nn.Module, rank: int) -> None:
    model(data(rank)).square().sum().backward()


@pytest.mark.parametrize("where", ["backward", "unshard"])
@on_ranks(2)
def test_a_gather_that_fails_keeps_no_memory(rank: int, n_ranks: int, where: str) -> None:
    """Not of the unit, and in backward not of those that were to come along."""
    fails = mock.patch.object(_transport.Messages, "all_gather", side_effect=ConnectionError)
    with messages():
        model: Any = Net(4, own=False)
        shard(model, fsdp_c)
        groups = [block._get_fsdp_state()._fsdp_param_groups[0] for block in model.blocks]
        for _ in range(2):
            train(model, rank)
        fsdp_c.release_buffers(model)
        before = fsdp_c.stats(model).rank["gather slots"]
        if where == "backward":
            call = model(data(rank)).square().sum().backward
        else:
            call = model.blocks[1].unshard
        with fails, pytest.raises(ConnectionError):
            call()
        fsdp_c.release_buffers(model)
        assert fsdp_c.stats(model).rank["gather slots"] == before
        assert not any(group._core_is_pending for group in groups)
        train(model, rank)


@on_ranks(2, 3)
def test_units_share_a_reduction(rank: int, n_ranks: int) -> None:
    with messages() as calls:
        model = Net(6, own=False)
        shard(model, fsdp_c)
        train(model, rank)
        assert calls == {"all_gather": 12, "reduce_scatter": 1, "all_reduce": 0}, calls
        traffic = fsdp_c.stats(model).traffic
        assert [unit.reductions for unit in traffic] == [0, 0, 0, 0, 0, 1]
        assert len({unit.reduced for unit in traffic}) == 1
        # Who looks at gradients of a unit sees them as soon as under torch; those before come, too.
        seen = []
        param = model.blocks[2].up.weight
        if rank == 0:
            blocks = list(reversed(model.blocks))
            param.register_post_accumulate_grad_hook(
                lambda p: seen.append([b.up.weight.grad is not None for b in blocks])
            )
        model.zero_grad()
        calls["reduce_scatter"] = 0
        train(model, rank)
        assert calls["reduce_scatter"] == 3
        assert seen == ([[True] * 4 + [False] * 2] if rank == 0 else [])


@on_ranks(2, 3)
def test_backward_gathers_ahead(rank: int, n_ranks: int) -> None:
    """From the second on, in the order of the one before."""
    with messages() as calls:
        model = Branches(6)
        shard(model, fsdp_c)
        gathers = []
        for use in (range(6), range(6), (0, 2, 5), (0, 2, 5), (5, 2, 0), (5, 2, 0), (1, 1)):
            output = model(data(rank), use=tuple(use))
            before = calls["all_gather"]
            output.square().sum().backward()
            gathers.append(calls["all_gather"] - before)
        # Who comes first in another order may have been last in the one before.
        assert gathers == [6, 1, 1, 1, 3, 1, 2], gathers
        assert fsdp_c.stats(model).traffic_total.gathers == calls["all_gather"]
        fsdp_c.release_buffers(model)
        for _ in range(2):
            model(data(rank), use=(0, 1, 2)).square().sum().backward()
        plan = fsdp_c.memory_plan(model, ranks_per_host=1)
        assert fsdp_c.stats(model).rank["gather slots"] <= plan.rank["gather slots"]


@on_ranks(2, 3)
def test_forward_gathers_ahead(rank: int, n_ranks: int) -> None:
    """From the second on, behind a first unit that is gathered alone."""
    with messages() as calls:
        model = Branches(6)
        shard(model, fsdp_c)
        gathers = []
        for use in (range(6), range(6), (0, 2, 5), (0, 2, 5), (5, 2, 0), (5, 2, 0), (1, 1)):
            calls["all_gather"] = 0
            output = model(data(rank), use=tuple(use))
            gathers.append(calls["all_gather"])
            output.square().sum().backward()
        assert gathers == [7, 2, 2, 2, 4, 2, 3], gathers
        # An evaluation follows the order as well, and a forward that fails leaves none.
        with torch.no_grad():
            for expected in (4, 2):
                calls["all_gather"] = 0
                model(data(rank), use=(0, 3, 4))
                assert calls["all_gather"] == expected
        with pytest.raises(IndexError):
            model(data(rank), use=(0, 3, 9))
        for expected in (4, 2):
            calls["all_gather"] = 0
            output = model(data(rank), use=(0, 3, 4))
            assert calls["all_gather"] == expected
            output.sum().backward()


class Late(Net):
    """Writes a shard of its last block in forward, in front of the third one; later on only."""

    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index == 2 and self.writes:
                self.blocks[-1].up.weight.to_local().data.mul_(2)
            x = block(x)
        return x


@on_ranks(2)
def test_shards_written_in_a_later_forward(rank: int, n_ranks: int) -> None:
    """The other rank has gathered them: the one that writes gets an error, and from then on both
    gather units one by one as long as it writes."""
    with messages() as calls:
        pair = pair_of(lambda: Late(4, own=False))
        for step in range(2):
            pair.step(data(rank, step))
        for side in (pair.ours, pair.theirs):
            side.model.writes = rank == 1
        text = (
            r"'blocks\.3\.up\.weight' was written on rank 1 within a forward, after other ranks"
            if rank == 1
            else "rank 1"
        )
        with pytest.raises(RuntimeError, match=text):
            train(pair.ours.model, rank)
        pair.ours.model.zero_grad()
        if rank == 1:  # which torch has not done
            pair.ours.model.blocks[-1].up.weight.to_local().data.mul_(0.5)
        dist.barrier()
        for step in range(2, 4):
            calls["all_gather"] = 0
            pair.step(data(rank, step))
            assert calls["all_gather"] == 4 + 1
        for side in (pair.ours, pair.theirs):
            side.model.writes = False
        for step in range(4, 6):
            calls["all_gather"] = 0
            pair.step(data(rank, step))
        assert calls["all_gather"] == 2 + 1


class Meddling(Net):
    """Writes shards of its first block in backward, behind the last one."""

    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.writes:
                x.register_hook(self.write)
        return x

    def write(self, grad: torch.Tensor) -> None:
        self.blocks[0].up.weight.data.mul_(2)


@on_ranks(2)
def test_shards_written_behind_a_gather(rank: int, n_ranks: int) -> None:
    """Under torch they are read after that."""
    with messages() as calls:
        for batch_bytes in ("", "0"):
            os.environ["FSDP_C_BATCH_BYTES"] = batch_bytes
            model = Meddling(4, own=False)
            shard(model, fsdp_c)
            train(model, rank)
            model.writes = True
            text = r"'blocks\.0\.up\.weight' was written on rank \d within a backward"
            raises = pytest.raises(RuntimeError, match=text)
            with raises if not batch_bytes else contextlib.nullcontext():
                train(model, rank)
            model.writes = False
            train(model, rank)
            # Hooks of gradients may write, too: an optimizer in backward.
            param = model.blocks[3].up.weight
            handle = param.register_post_accumulate_grad_hook(lambda p: p.add_(p.grad))
            calls["all_gather"] = 0
            train(model, rank)
            assert calls["all_gather"] == (8 if batch_bytes else 2 + 4)
            handle.remove()
            del os.environ["FSDP_C_BATCH_BYTES"]


@on_ranks(2)
def test_what_does_not_share(rank: int, n_ranks: int) -> None:
    wide = functools.partial(Net, 4, own=False, width=6, hidden=2000)
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    with messages() as calls:
        for build, policies, variable, n_reductions in (
            (wide, [None] * 4, {}, 4),
            (lambda: Net(4, own=False), [None, half, None, None], {}, 3),
            (lambda: Net(4, own=False), [None] * 4, {"FSDP_C_BATCH_BYTES": "0"}, 4),
            (lambda: Net(4, own=False), [None] * 4, {"FSDP_C_BATCH_BYTES": "5000"}, 2),
            (lambda: Net(4, own=False), [None] * 4, {"FSDP_C_STRICT": "1"}, 4),
        ):
            os.environ.update(variable)
            model = build()
            for block, policy in zip(model.blocks, policies, strict=True):
                options = {"mp_policy": policy} if policy else {}
                fsdp_c.fully_shard(block, mesh=mesh_of_messages(), **options)
            fsdp_c.fully_shard(model, mesh=mesh_of_messages())
            calls["reduce_scatter"] = 0
            model(data(rank)).square().sum().backward()
            assert calls["reduce_scatter"] == n_reductions, (calls, variable)
            for name in variable:
                del os.environ[name]


@on_ranks(2)
def test_limits_that_differ_are_named(rank: int, n_ranks: int) -> None:
    with messages():
        os.environ["FSDP_C_BATCH_BYTES"] = str(rank << 20)
        model = Net(own=False)
        shard(model, fsdp_c)
        try:
            with pytest.raises(RuntimeError, match=r"FSDP_C_BATCH_BYTES .* must be the same"):
                model(data(rank))
        finally:
            del os.environ["FSDP_C_BATCH_BYTES"]


@on_ranks(2)
def test_units_that_differ_are_named(rank: int, n_ranks: int) -> None:
    """Of one size: their bytes would pass for each other's."""
    with messages():
        model = Branches()
        shard(model, fsdp_c)
        text = "rank 0 is in the all-gather of unit blocks.0 and rank 1 in the all-gather of .*1 "
        with pytest.raises(RuntimeError, match=text):
            model(data(rank), use=(rank,))


class Failing(Net):
    """Raises at its end when told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails:
            raise ValueError("told to")
        return x


def keep_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)


def unshard_before_the_step(model: Any) -> None:
    for block in model.blocks:
        block.unshard()


def leave_unwaited(model: Any) -> None:
    for block in model.blocks:
        block.unshard(async_op=True)


def leave_forward(model: Any) -> None:
    model.fails = True
    with pytest.raises(ValueError, match="told to"):
        model(data(0))
    model.fails = False


@pytest.mark.parametrize(
    "prepare", [keep_after_backward, unshard_before_the_step, leave_unwaited, leave_forward]
)
@on_ranks(2)
def test_steps_reach_unsharded_units(rank: int, n_ranks: int, prepare: Any) -> None:
    """Torch goes on with parameters of before the optimizer's step."""
    torch.manual_seed(1)
    plain = Failing()
    torch.manual_seed(1)
    model = Failing()
    with messages():
        shard(model, fsdp_c)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
        for step in range(3):
            losses = []
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                loss = each(data(0, step)).pow(2).sum()
                loss.backward()
                if each is model:
                    prepare(model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@on_ranks(2)
def test_loads_reach_units_that_were_not_waited_for(rank: int, n_ranks: int) -> None:
    """Torch goes on with parameters of before."""
    with messages():
        torch.manual_seed(1)
        model = Failing()
        shard(model, fsdp_c)
        train(model, rank)
        torch.manual_seed(2)
        plain = Failing()
        loaded = Failing()
        loaded.load_state_dict(plain.state_dict())
        shard(loaded, fsdp_c)
        leave_unwaited(model)
        model.load_state_dict(loaded.state_dict())
        torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)
