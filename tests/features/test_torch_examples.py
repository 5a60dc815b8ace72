"""PyTorch's own examples and tutorials of two parallelisms at once."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import data
from parity import Pair, Side, Tolerance, full, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

CLOSE = Tolerance(relative=1e-4, scaled=1e-4, realign=True)


class ToyModel(nn.Module):
    """Of examples/distributed/tensor_parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.relu(self.in_proj(x)))


class MLP(nn.Module):
    """Of torch's test of 2-D parallelism: layers that are split, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 16)
        self.net2 = nn.Linear(16, 14)
        self.net3 = nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.net1(x))
        return nn.functional.sigmoid(self.net3(nn.functional.relu(self.net2(x))))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # The example says foreach=True; torch refuses that for parameters on several meshes.
    return torch.optim.AdamW(parameters, lr=3e-3, foreach=False)


def mesh_2d(n_ranks: int) -> Any:
    return cached_mesh((n_ranks // 2, 2), ("dp", "tp"))


def pair_2d(n_ranks: int, build: Any, plan: dict[str, Any], **options: Any) -> Pair:
    mesh = mesh_2d(n_ranks)

    def shard(model: nn.Module, fsdp: Any) -> None:
        parallelize_module(model, mesh["tp"], plan)
        fsdp.fully_shard(model, mesh=mesh["dp"], **options)

    return Pair(build, shard, tolerance=CLOSE, optimizer=adamw)


@pytest.mark.parametrize("offloads", [False, True])
@on_ranks(2, 4)
def test_fsdp_tp_example(rank: int, n_ranks: int, offloads: bool) -> None:
    plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}
    pair = pair_2d(n_ranks, ToyModel, plan, **options)
    place = mesh_2d(n_ranks).get_local_rank("dp")
    for step in range(3):
        pair.step(data(place, step, 4, 10))


@on_ranks(4)
def test_2d_state_dicts(rank: int, n_ranks: int) -> None:
    """Of the model and its optimizer, whole, after a step."""
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    pair = pair_2d(n_ranks, MLP, plan)
    place = mesh_2d(n_ranks).get_local_rank("dp")
    pair.step(data(place, 0, 4, 10))
    options = StateDictOptions(full_state_dict=True)
    pair.do(lambda side: side.model.reshard())
    pair.both(lambda side: dict(get_model_state_dict(side.model, options=options)))

    def moments(side: Side) -> Any:
        state = get_optimizer_state_dict(side.model, side.optimizer, options=options)
        return state["state"]["net1.weight"]["exp_avg"]

    pair.both(moments)
    pair.step(data(place, 1, 4, 10))


@on_ranks(4)
def test_2d_forward_prefetch_and_evaluation(rank: int, n_ranks: int) -> None:
    """Units of layers, as the tutorial of fully_shard has them."""
    mesh = mesh_2d(n_ranks)

    def shard(model: nn.Module, fsdp: Any) -> None:
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        layers = [model.net1, model.net2, model.net3]
        for layer in layers:
            fsdp.fully_shard(layer, mesh=mesh["dp"])
        fsdp.fully_shard(model, mesh=mesh["dp"])
        layers[0].set_modules_to_forward_prefetch([layers[1]])
        layers[2].set_modules_to_backward_prefetch([layers[1]])

    pair = Pair(MLP, shard, tolerance=CLOSE, optimizer=adamw)
    place = mesh.get_local_rank("dp")
    pair.eval_forward(data(place, 9, 4, 10))
    for step in range(2):
        pair.step(data(place, step, 4, 10))
    pair.both(lambda side: full(side.shards["net3.weight"]))
