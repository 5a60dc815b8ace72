"""The small training that ranks run while they are killed, starved or lied to."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import fsdp_c

WIDTH = 24
N_STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + self.odd.square().sum()


class Training:
    """A model, its optimizer and its snapshots, as a script has them."""

    def __init__(self, folder: Path | None, mesh: Any = None) -> None:
        self.model = Net()
        for layer in self.model.layers:
            fsdp_c.fully_shard(layer, mesh=mesh)
        fsdp_c.fully_shard(self.model, mesh=mesh)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)
        self.snapshots: Any = None
        if folder is not None:
            self.snapshots = fsdp_c.Snapshots(self.model, self.optimizer, folder=folder)
            self.snapshots.resume()

    def gradients(self, rank: int, step: int) -> float:
        """Clipped, and once at their owners; gives the loss."""
        torch.manual_seed(100 * step + rank)
        loss = self.model(torch.randn(4, WIDTH))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        owned = fsdp_c.gather_to_owner([p.grad for p in self.model.parameters()])
        fsdp_c.scatter_from_owner(owned)
        return loss.item()

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.snapshots is not None:
            self.snapshots.take(step + 1)

    def step(self, rank: int, step: int) -> float:
        loss = self.gradients(rank, step)
        self.update(step)
        return loss

    def close(self) -> None:
        if self.snapshots is not None:
            self.snapshots.close()


def train(rank: int, folder: Path | None, n_steps: int = N_STEPS, mesh: Any = None) -> list[float]:
    training = Training(folder, mesh)
    losses = [training.step(rank, step) for step in range(n_steps)]
    training.close()
    return losses


def end_as_a_script(error: BaseException, note: str) -> None:
    """The traceback, when it came after the death in the note, and the end of the process."""
    traceback.print_exception(error)
    died = Path(note).read_text() if note and os.path.exists(note) else ""
    if died:
        print(f"\nnoticed after {time.monotonic() - float(died):.2f} s", flush=True)
    os._exit(1)
