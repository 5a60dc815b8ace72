"""The smallest sharded training: wrap the blocks, wrap the model, train as ever.

torchrun --nproc_per_node 2 examples/01_minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,))

    torch.manual_seed(0)  # every rank starts from the same weights
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # After fully_shard, so that the optimizer sees the sharded parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)  # every rank draws its own data
    for step in range(50):
        x = torch.randn(32, 64)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    weight = model[0][0].weight
    print(f"rank {rank} holds {tuple(weight.to_local().shape)} of {tuple(weight.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
