"""Mixed precision: forward and backward in bfloat16, shards and their reduction in float32.

torchrun --nproc_per_node 2 examples/02_mixed_precision.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import MixedPrecisionPolicy, fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # The root's policy also says in which dtype the model's result is handed out.
    root_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)
    for step in range(50):
        x = torch.randn(32, 64)
        y = model(x)
        loss = (y - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            gradient = model[0][0].weight.grad
            print(f"step {step + 1}: loss {loss.item():.4f}, gradients {gradient.dtype}")
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
