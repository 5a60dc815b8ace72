"""Hybrid sharding: shards within a group of ranks, and copies of the model across the groups.

torchrun --nproc_per_node 4 examples/03_hsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    if n_ranks % 2:
        raise SystemExit("03_hsdp.py needs an even number of ranks")
    # Rows are copies, columns are shards: gradients are reduced over a row, then over a column.
    mesh = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)
    for step in range(50):
        x = torch.randn(32, 64)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    weight = model[0][0].weight
    shape = tuple(weight.to_local().shape)
    print(f"rank {rank} holds {shape} of {tuple(weight.shape)}, placed {weight.placements}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
