"""torch's pipeline schedules with sharded stages: several a rank, low precision, split tensors."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import data
from parity import Pair, Side, Tolerance, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

CLOSE = Tolerance(relative=1e-4, scaled=1e-4, realign=True)
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
N_MICRO, ROWS, WIDTH = 4, 8, 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stages(nn.Module):
    """A rank's stages, whose numbers are as far apart as there are ranks in the pipeline."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Mlp(), Mlp()) for _ in range(n))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run(side: Side, mesh: Any, kind: Any, step: int = 0) -> list[Tensor]:
    """A schedule over both ranks of the pipeline; the losses of its last stage."""
    place, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    stages = [
        PipelineStage(
            module,
            place + index * size,
            size * len(side.model.stages),
            torch.device("cpu"),
            group=mesh.get_group("pp"),
        )
        for index, module in enumerate(side.model.stages)
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], N_MICRO, loss_fn=loss_of)
    replica = mesh.get_local_rank("dp")
    losses: list[Tensor] = []
    inputs = [data(replica, step, ROWS, WIDTH)] if place == 0 else []
    is_last = place == size - 1
    target = data(replica, 7 + step, ROWS, WIDTH) if is_last else None
    schedule.step(*inputs, target=target, losses=losses if is_last else None)
    return [loss.detach() for loss in losses]


def pipeline(mesh: Any, n_stages: int, is_parallel: bool = False, **options: Any) -> Pair:
    def shard(model: nn.Module, fsdp: Any) -> None:
        for stage in model.stages:
            for block in stage:
                if is_parallel:
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, mesh["tp"], plan)
                fsdp.fully_shard(block, mesh=mesh["dp"], **options)
            fsdp.fully_shard(stage, mesh=mesh["dp"], **options)

    tolerance = Tolerance.of(8, torch.bfloat16) if "mp_policy" in options else CLOSE
    return Pair(lambda: Stages(n_stages), shard, tolerance=tolerance)


def train(pair: Pair, mesh: Any, kind: Any, n_steps: int = 2) -> None:
    for step in range(n_steps):
        pair.both(lambda side: run(side, mesh, kind, step), "schedule")
        pair.optimize()


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleLoopedBFS])
@on_ranks(4)
def test_several_stages_a_rank(rank: int, n_ranks: int, kind: Any) -> None:
    mesh = cached_mesh((2, 2), ("pp", "dp"))
    train(pipeline(mesh, 2), mesh, kind)


@on_ranks(4)
def test_stages_in_low_precision(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("pp", "dp"))
    train(pipeline(mesh, 1, mp_policy=BF16, reshard_after_forward=False), mesh, Schedule1F1B)


@on_ranks(4)
def test_stages_with_tensor_parallelism(rank: int, n_ranks: int) -> None:
    """Three dims, of which data has one rank."""
    mesh = cached_mesh((2, 1, 2), ("pp", "dp", "tp"))
    train(pipeline(mesh, 1, is_parallel=True), mesh, Schedule1F1B)
