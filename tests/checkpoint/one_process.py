"""Snapshots of one process: a small model, and lives that end after some steps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import fsdp_c
from fsdp_c._snapshots import _files

LARGE = 60_000  # elements that are copied beside the next step


class Net(nn.Module):
    """A layer and a large vector."""

    def __init__(self, width: int = 4, numel: int = LARGE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, width)
        self.wide = nn.Parameter(torch.randn(numel))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum() + (self.wide * x.sum()).square().mean()


def trained(n_steps: int = 1, **options: Any) -> tuple[Net, optim.Optimizer]:
    model = Net(**options)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, n_steps)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, n_steps: int = 1) -> None:
    for _ in range(n_steps):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


def leave(folder: Path, *steps: int, extra: Any = None, **options: Any) -> list[Tensor]:
    """What a killed process leaves after steps; the last one's parameters."""
    model, optimizer = trained(0, **options)
    try:
        with fsdp_c.Snapshots(model, optimizer, folder=folder, extra=extra) as snapshots:
            assert snapshots.resume() == 0
            for step in steps:
                train(model, optimizer)
                snapshots.take(step)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return [param.detach().clone() for param in model.parameters()]


def resumed(folder: Path, model: Any = None, optimizer: Any = None, **options: Any) -> int:
    if model is None:
        model, optimizer = trained(0)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=folder, **options)
    with snapshots:
        return snapshots.resume()


def by_step(folder: Path) -> dict[int | None, Path]:
    return {found.step: found.path for found in _files.find(folder)}
