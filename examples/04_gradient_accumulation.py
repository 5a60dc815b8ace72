"""Gradient accumulation: several small batches for one step, with one reduction at the end.

torchrun --nproc_per_node 2 examples/04_gradient_accumulation.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import fully_shard

MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)
    for step in range(50):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            # Until the last micro-batch each rank keeps its gradients whole and sends nothing.
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            x = torch.randn(8, 64)
            loss = (model(x) - x.flip(1)).square().mean() / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {total:.4f}, gradient norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
