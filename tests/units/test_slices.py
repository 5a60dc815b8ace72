"""reshard_after_forward as an int where torch goes wrong; the unsharded model is the judge.

Each body runs on the core, over shared memory and over messages, and under torch, expected to fail.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, failure_of, run_ranks
from parity import full
from test_features_torch_fails import WIDTH, Net, batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_c


class Special(Net):
    """Parameters without dims and of other strides."""

    def __init__(self, rows: int = 6) -> None:
        super().__init__(rows)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(WIDTH, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) @ self.turned.t()


class Case:
    """A unit below a root, and the same module unsharded."""

    def __init__(self, fsdp: Any, build: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(5)
        self.plain = build()
        self.unit: Any = copy.deepcopy(self.plain)
        self.model: Any = nn.Sequential(self.unit)
        mesh = cached_mesh((dist.get_world_size(),))
        fsdp.fully_shard(self.unit, mesh=mesh, **{"reshard_after_forward": 2, **options})
        fsdp.fully_shard(self.model, mesh=mesh)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.unit, self.plain)]

    def forward(self, step: int = 0) -> Tensor:
        return self.model(batch(dist.get_rank(), step)).square().sum()

    def check_slices(self) -> None:
        for name, param in self.plain.named_parameters():
            shard = self.unit.get_parameter(name)
            placement = Shard(shard.placements[1].dim) if param.ndim else Replicate()
            assert isinstance(shard, DTensor) and shard.device_mesh.ndim == 2
            assert shard.placements == (Replicate(), placement)
            torch.testing.assert_close(full(shard), param.detach(), rtol=1e-5, atol=1e-5)

    def check_gradients(self, step: int = 0) -> None:
        self.plain.zero_grad()
        n_ranks = dist.get_world_size()
        for peer in range(n_ranks):
            (self.plain(batch(peer, step)).square().sum() / n_ranks).backward()
        for name, param in self.plain.named_parameters():
            grad = full(self.unit.get_parameter(name).grad)
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-5, msg=name)

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, n_steps: int = 2) -> None:
        for step in range(n_steps):
            loss = self.forward(step)
            self.check_slices()
            loss.backward()
            self.check_gradients(step)
            self.optimize()


def df17_r4_int_reshard_on_dim_1(fsdp: Any, rank: int) -> None:
    Case(fsdp, lambda: Net(8), shard_placement_fn=lambda p: Shard(p.ndim - 1)).train()


def df5_r5_int_reshard_of_uneven_rows(fsdp: Any, rank: int) -> None:
    for rows in (5, 6, 9):
        Case(fsdp, lambda rows=rows: Net(rows)).train()


def fewer_rows_than_ranks(fsdp: Any, rank: int) -> None:
    for rows in (3, 1):
        Case(fsdp, lambda rows=rows: Net(rows)).train()


def special_parameters(fsdp: Any, rank: int) -> None:
    Case(fsdp, Special).train()


def steps_after_validation(fsdp: Any, rank: int) -> None:
    """Torch's next forward gathers what the validation has left, from before the step."""
    case = Case(fsdp, lambda: Net(8))
    for step in range(3):
        loss = case.forward(step)
        loss.backward()
        case.check_gradients(step)
        with torch.no_grad():
            case.forward(step + 1)
        case.optimize()


def changed_requires_grad(fsdp: Any, rank: int) -> None:
    """What is set on a slice counts for its parameter."""
    case = Case(fsdp, lambda: Net(8))
    with torch.no_grad():
        case.forward()
    for module in (case.unit, case.plain):
        module.up.requires_grad_(False)
    case.forward().backward()
    for name, param in case.plain.named_parameters():
        assert case.unit.get_parameter(name).requires_grad == param.requires_grad, name


def loss_of_slices(fsdp: Any, rank: int) -> None:
    """A graph that has used slices has their values, whatever is shown later."""
    case = Case(fsdp, lambda: Net(8))
    loss = case.forward()
    kept = [param for param in case.unit.parameters()]
    penalty = sum(param.to_local().square().sum() for param in kept)
    loss.backward()
    case.optimize()
    case.forward().backward()
    penalty.backward()
    for param, now in zip(kept, case.unit.parameters(), strict=True):
        assert param is not now
        torch.testing.assert_close(param.grad.to_local(), 2 * param.detach().to_local())
    assert fsdp is not torch_fsdp, "torch does it, too"


def one_rank_saves(fsdp: Any, rank: int) -> None:
    """A state_dict of one rank alone between forward and backward."""
    assert fsdp is not torch_fsdp, "its backward would gather among other ranks, and hang"
    case = Case(fsdp, lambda: Net(8))
    for step in range(3):
        loss = case.forward(step)
        if rank == 1:
            state = case.unit.state_dict()
            assert all(v.device_mesh.ndim == 1 for v in state.values())
        loss.backward()
        case.check_gradients(step)
        case.optimize()


BODIES = [
    df17_r4_int_reshard_on_dim_1,
    df5_r5_int_reshard_of_uneven_rows,
    special_parameters,
    steps_after_validation,
    changed_requires_grad,
    loss_of_slices,
    one_rank_saves,
]
TORCH_DOES = [fewer_rows_than_ranks]


def run_ours(rank: int, n_ranks: int, name: str) -> str:
    return failure_of(globals()[name], fsdp_c, rank)


def run_torch(rank: int, n_ranks: int) -> dict[str, str]:
    return {body.__name__: failure_of(body, torch_fsdp, rank) for body in BODIES}


@pytest.mark.parametrize("transport", ["shared", "callback"])
@pytest.mark.parametrize("name", [body.__name__ for body in BODIES + TORCH_DOES])
def test_trains(name: str, transport: str) -> None:
    env = {"FSDP_C_TRANSPORT": transport} if transport == "callback" else None
    errors = run_ranks(run_ours, 4, name, env=env)
    assert not any(errors), "\n".join(errors)


def test_torch_fails() -> None:
    for outcome in run_ranks(run_torch, 4, fresh=True):
        assert outcome.ok, outcome
        assert [name for name, error in outcome.value.items() if not error] == []
