"""Snapshots of a device's tensors: copied beside what computes, in any order of streams."""

from pathlib import Path
from typing import Any

import fake_device
import harness
import pytest
import torch
from fake_device import LAZY, Kind, Order, ahead, shuffled
from harness import run_ranks, seed_everything
from models import data
from torch import Tensor, nn

import fsdp_c

# Whoever copies to the host reads as soon as it may, and compute does what somebody waits for.
COPIES_AHEAD = ahead(*range(1, 50))
ENV = {"FSDP_C_DEVICES": "privateuseone", "FSDP_C_QUIET": "1"}


class Counting(nn.Module):
    """Its forward writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        return self.layers(x)


def make(n_ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    seed_everything(3)
    model = Counting().to(fake_device.NAME)
    harness.implementation().fully_shard(model, mesh=fake_device.mesh_of((n_ranks,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def held(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), model.seen, *states]
    return [getattr(t.detach(), "_local_tensor", t.detach()).clone() for t in tensors]


class Left(Exception):
    """What a run ends with."""


def trained(
    rank: int, n_ranks: int, folder: Path, order: Order, kind: Kind, dropped: int
) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """What the run held after the last snapshot's step, what a new one has, and what was said."""
    model, optimizer = make(n_ranks)
    expected: list[Tensor] = []
    said: list[Any] = []
    with fake_device.order(order) as device:
        snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder, name="device")
        assert snapshots.resume() == 0
        try:
            with snapshots:
                for step in range(3):
                    loss = model(data(rank, step).to(fake_device.NAME)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 2:
                        expected = held(model, optimizer)  # nobody waits for these copies
                        device.watch(kind, dropped)
                    snapshots.take(step + 1)
                model(data(rank, 9).to(fake_device.NAME)).sum().backward()
                optimizer.step()  # waits until nothing is read any more
                said = device.said()
                device.watch(Kind.WAIT, -1)
                raise Left
        except Left:
            pass
        model, optimizer = make(n_ranks)
        again = fsdp_c.Snapshots(model, optimizer, folder=folder, name="device")
        assert again.resume() == 3
        loaded = held(model, optimizer)
        again.close()
    return expected, loaded, said


def is_alike(outcome: tuple[list[Tensor], list[Tensor], list[Any]]) -> bool:
    expected, loaded, _ = outcome
    assert len(expected) == len(loaded) > 9
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, loaded, strict=True))


def in_orders(rank: int, n_ranks: int, folder: Path) -> None:
    fake_device.load()
    for number, order in enumerate((LAZY, COPIES_AHEAD, *map(shuffled, range(2)))):
        outcome = trained(rank, n_ranks, folder / f"{number}", order, Kind.WAIT, -1)
        assert is_alike(outcome), order


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    fake_device.build()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_resumes_what_was_there_when_it_was_taken(tmp_path: Path, n_ranks: int) -> None:
    run_ranks(in_orders, n_ranks, tmp_path, timeout=120, apart=True, env=ENV)


def without_a_wait(rank: int, n_ranks: int, folder: Path, kind: Kind) -> int:
    """How many of the waits in a snapshot and the step behind it show when they are ignored."""
    fake_device.load()
    order = COPIES_AHEAD if kind is Kind.WAIT else LAZY
    n = len([w for w in trained(rank, n_ranks, folder / "n", order, kind, -1)[2] if w[0] == kind])
    outcomes = [trained(rank, n_ranks, folder / f"{k}", order, kind, k) for k in range(n)]
    return sum(not is_alike(outcome) for outcome in outcomes)


@pytest.mark.parametrize("kind", [Kind.WAIT, Kind.HOST_WAIT])
def test_waits_are_needed(tmp_path: Path, kind: Kind) -> None:
    """The copies' stream waits for what compute has written, and the host for the copies."""
    (n_seen,) = run_ranks(without_a_wait, 1, tmp_path, kind, timeout=120, apart=True, env=ENV)
    assert n_seen >= 1
