"""An FSDP1 script that knows torch only; says whose objects it got, here and in a spawned child."""

import json
import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Own(FullyShardedDataParallel):
    """A user's subclass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, device_id=torch.device("cpu"))
        self.is_own = True


def home(model: nn.Module) -> str:
    return next(c.__module__ for c in type(model).__mro__ if c.__module__ != __name__).split(".")[0]


def look() -> dict[str, Any]:
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP

    dist.init_process_group("gloo")
    models = [FSDP(nn.Linear(3, 2), device_id=torch.device("cpu")), Own(nn.Linear(3, 2))]
    for model in models:
        assert isinstance(model, FSDP)
        with FSDP.summon_full_params(model):
            assert model.weight.shape == (2, 3)
        model(torch.ones(1, 3)).sum().backward()
    assert isinstance(models[1], Own) and models[1].is_own
    dist.destroy_process_group()
    return {"homes": [home(model) for model in models]}


def child(queue: Any) -> None:
    queue.put(look())


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    os.environ["MASTER_PORT"] = "0"
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    answers = [look(), queue.get()]
    process.join()
    print(json.dumps(answers))
