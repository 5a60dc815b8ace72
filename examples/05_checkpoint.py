"""Checkpoints: each rank writes its shards, and a run on any number of ranks reads them.

  torchrun --nproc_per_node 2 examples/05_checkpoint.py FOLDER

Run it again, with more or fewer ranks if you like: it goes on from what FOLDER holds.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import fully_shard


class Training(dcp.stateful.Stateful):
    """What is saved: the parameters, the optimizer's state and the number of steps done."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.n_steps = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "n_steps": self.n_steps}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.n_steps = state["n_steps"]


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    # The file .metadata is written last: a folder without it is not a checkpoint.
    saved = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if saved:
        dcp.load({"training": training}, checkpoint_id=saved[-1])
        if rank == 0:
            print(f"goes on after step {training.n_steps}")

    for _ in range(20):
        torch.manual_seed(training.n_steps * n_ranks + rank)
        x = torch.randn(32, 64)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.n_steps += 1
    dcp.save({"training": training}, checkpoint_id=folder / f"step-{training.n_steps:04d}")
    if rank == 0:
        print(f"saved after step {training.n_steps}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
