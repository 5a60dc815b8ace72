"""A script that knows torch only: trains through every spelling of fully_shard, then reports."""

import json
import os
import sys
from functools import partial

IS_TORCH_LOADED = "torch" in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import _composable  # noqa: E402
from torch.distributed._composable.fsdp import fully_shard as composable  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard import fully_shard as private  # noqa: E402

submodule = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
bound = partial(fully_shard)
seed = 0


def with_default(module: nn.Module, shard=fully_shard) -> nn.Module:
    return shard(module)


SPELLINGS = {
    "public": lambda module: fully_shard(module),
    "composable": lambda module: composable(module),
    "submodule": lambda module: submodule.fully_shard(module),
    "attribute": lambda module: _composable.fsdp.fully_shard(module),
    "private": lambda module: private(module),
    "partial": bound,
    "default": with_default,
}


def main() -> None:
    dist.init_process_group("gloo")
    implementations = {}
    for name, shard in SPELLINGS.items():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        shard(model[0])
        shard(model)
        model(torch.ones(2, 3)).sum().backward()
        assert isinstance(model, FSDPModule)
        state = fully_shard.state(model)
        assert state is model._get_fsdp_state() is composable.state(model)
        implementations[name] = type(state).__module__.split(".")[0]
    if dist.get_rank() == 0:
        facts = {
            "argv": sys.argv,
            "name": __name__,
            "file": __file__,
            "path": sys.path[0],
            "is_main": sys.modules["__main__"].__dict__ is globals(),
            "is_torch_loaded": IS_TORCH_LOADED,
            "implementations": implementations,
        }
        print(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
