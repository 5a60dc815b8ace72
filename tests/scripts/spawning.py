"""A script that knows torch only and trains in processes that it spawns."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def train(rank: int, n_ranks: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks
    )
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 5))
    model(torch.ones(2, 3)).sum().backward()
    with open(f"{folder}/{rank}", "w") as file:
        file.write(type(model._get_fsdp_state()).__module__.split(".")[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (2, folder), nprocs=2, start_method=sys.argv[1])
        print(json.dumps([open(f"{folder}/{rank}").read() for rank in range(2)]))
