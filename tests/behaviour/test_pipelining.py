"""PP: units as the stages of a pipeline, driven by torch.distributed.pipelining."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Block, Net, data, shard_blocks
from parity import Pair, Plain, Side, Tolerance, compare_values, full, on_ranks, total
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from behaviour.pairs import registered

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)
N_MICRO, ROWS, WIDTH = 4, 8, 6


def mesh() -> DeviceMesh:
    return cached_mesh((2, 2), ("pp", "dp"))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stage_model(index: int) -> nn.Module:
    torch.manual_seed(10 + index)
    return nn.Sequential(Block(), Block())


def make_schedule(model: nn.Module, kind: Any) -> Any:
    stage = PipelineStage(
        model,
        mesh().get_local_rank("pp"),
        2,
        torch.device("cpu"),
        group=mesh().get_group("pp"),
    )
    return kind(stage, N_MICRO, loss_fn=loss_of)


def run(schedule: Any, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    losses: list[Tensor] = []
    if mesh().get_local_rank("pp") == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    return [loss.detach() for loss in losses]


def expected_gradients() -> dict[str, Tensor]:
    """Of the two stages as one model, averaged over the data-parallel ranks."""
    model = nn.Sequential(stage_model(0), stage_model(1))
    for r in range(2):
        for x, y in zip(batch(r).chunk(N_MICRO), target(r).chunk(N_MICRO), strict=True):
            (loss_of(model(x), y) / N_MICRO / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def batch(r: int) -> Tensor:
    return data(r, 0, ROWS, WIDTH)


def target(r: int) -> Tensor:
    return data(r, 7, ROWS, WIDTH)


def shard_units(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for block in model:
        fsdp.fully_shard(block, mesh=mesh()["dp"], **options)
    fsdp.fully_shard(model, mesh=mesh()["dp"], **options)


def replicate_units(model: nn.Module, fsdp: Any) -> None:
    for block in model:
        replicate(block, mesh=mesh()["dp"])
    replicate(model, mesh=mesh()["dp"])


def shard_inside(model: nn.Module, fsdp: Any) -> None:
    """The stage's module itself is not wrapped."""
    for block in model:
        fsdp.fully_shard(block, mesh=mesh()["dp"])


def pipeline(shard: Any) -> Pair:
    index = mesh().get_local_rank("pp")
    return Pair(lambda: stage_model(index), shard, tolerance=CLOSE)


def train(side: Side, kind: Any) -> list[Tensor]:
    dp = mesh().get_local_rank("dp")
    return run(make_schedule(side.model, kind), batch(dp), target(dp))


def check_gradients(side: Side) -> None:
    expected = expected_gradients()
    index = mesh().get_local_rank("pp")
    for name, shard in side.shards.items():
        compare_values(full(shard.grad), expected[f"{index}.{name}"], CLOSE, name)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@on_ranks(4)
def test_pp2_gradients_equal_the_whole_model(rank: int, n_ranks: int, kind: Any) -> None:
    """Reduced once, after the last micro-batch; the same when the schedule runs again."""
    pair = pipeline(shard_units)
    for _ in range(2):
        losses = pair.both(lambda side: train(side, kind))
        assert len(losses) == (N_MICRO if mesh().get_local_rank("pp") == 1 else 0)
        check_gradients(pair.theirs)
        check_gradients(pair.ours)
        pair.do(lambda side: side.optimizer.zero_grad())


@on_ranks(4)
def test_pp1_micro_batches_are_not_reduced(rank: int, n_ranks: int) -> None:
    pair = pipeline(shard_units)

    def flags(side: Side) -> list[Any]:
        seen: list[Any] = []
        for name in ("set_is_last_backward", "set_requires_gradient_sync"):
            original = getattr(side.model, name)

            def record(value: bool, name: str = name, original: Any = original) -> None:
                seen.append((name, value))
                original(value)

            object.__setattr__(side.model, name, record)
        train(side, ScheduleGPipe)
        return seen

    seen = pair.both(flags)
    assert [value for name, value in seen if name == "set_requires_gradient_sync"][-1] is True
    assert ("set_requires_gradient_sync", False) in seen
    check_gradients(pair.ours)


@on_ranks(4)
def test_pp3_idle_and_sharded_afterwards(rank: int, n_ranks: int) -> None:
    pair = pipeline(shard_units)

    def left(side: Side) -> Any:
        train(side, Schedule1F1B)
        states = [unit._get_fsdp_state() for unit in (side.model, *side.model)]
        training = {state._training_state.name for state in states}
        return training, all(isinstance(p, DTensor) for p in side.model.parameters())

    training, is_sharded = pair.both(left)
    assert training == {"IDLE"} and is_sharded


@on_ranks(2)
def test_pp4_unshard_handles_and_reshard(rank: int, n_ranks: int) -> None:
    """What schedules do around their computations, on units with parameters and without."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model.blocks[0])
        fsdp.fully_shard(model.blocks[1])
        fsdp.fully_shard(model)

    pair = Pair(lambda: Net(2, own=False), shard)
    pair.step(data(rank))

    def around(side: Side) -> list[bool]:
        units = [m for m in side.model.modules() if isinstance(m, FSDPModule)]
        handles = [unit.unshard(async_op=True) for unit in units]
        for handle in handles:
            handle.wait()
        gathered = [isinstance(p, DTensor) for p in side.model.parameters()]
        for unit in units:
            unit.reshard()
        return gathered + [isinstance(p, DTensor) for p in side.model.parameters()]

    n_parameters = len(pair.ours.shards)
    assert pair.both(around) == [False] * n_parameters + [True] * n_parameters
    pair.step(data(rank, 1))


@on_ranks(2)
def test_pp5_nothing_is_left_of_a_discarded_pass(rank: int, n_ranks: int) -> None:
    """As schedules do to find shapes: forward and backward, reshard, drop the gradients."""
    pair = Pair(
        Net,
        lambda model, fsdp: [fsdp.fully_shard(b) for b in model.blocks] and fsdp.fully_shard(model),
    )

    def discard(side: Side) -> None:
        total(side.model(data(rank, 5))).backward()
        for module in side.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for parameter in side.model.parameters():
            parameter.grad = None

    pair.do(discard)
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("shard", [replicate_units, shard_inside])
@on_ranks(4)
def test_pp6_replicated_and_unwrapped_stages(rank: int, n_ranks: int, shard: Any) -> None:
    pair = pipeline(shard)
    pair.both(lambda side: train(side, Schedule1F1B))
    check_gradients(pair.theirs)
    check_gradients(pair.ours)


@on_ranks(2)
def test_pp9_forward_reshards_what_was_unsharded_by_hand(rank: int, n_ranks: int) -> None:
    """So every micro-batch gathers again; what is unsharded by hand changes no results."""
    pair = Pair(Net, shard_blocks, tolerance=CLOSE)
    pair.step(data(rank))

    def micro_batch(side: Side, step: int) -> Any:
        units = [m for m in side.model.modules() if isinstance(m, FSDPModule)]
        for handle in [unit.unshard(async_op=True) for unit in units]:
            handle.wait()
        before = registered(side.model)
        side.kept = side.model(data(rank, step))
        return before, registered(side.model), side.kept

    for step in (1, 2):
        before, after, _ = pair.both(lambda side, step=step: micro_batch(side, step))
        assert before == ["unsharded"] * 4 and after == ["unsharded", *["sharded"] * 3]
        pair.backward()
        pair.optimize()


@on_ranks(2)
def test_pp10_several_forwards_before_the_first_backward(rank: int, n_ranks: int) -> None:
    pair = Pair(
        Net,
        lambda model, fsdp: [fsdp.fully_shard(b) for b in model.blocks] and fsdp.fully_shard(model),
        tolerance=CLOSE,
    )
    plain = Plain(Net)

    def fifo(side: Side) -> list[Tensor]:
        losses = [total(side.model(data(rank, step))) for step in range(3)]
        for index, loss in enumerate(losses):
            side.model.set_is_last_backward(index == 2)
            loss.backward()
        return [loss.detach() for loss in losses]

    pair.both(fifo)
    for step in range(3):
        plain.backward([total(plain.model(data(r, step))) for r in range(2)], 2)
    plain.check(pair.ours, CLOSE)
