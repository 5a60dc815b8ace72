"""check_replicas: copies that drifted apart are named on all ranks, and can be made equal."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Net, data, shard_blocks
from parity import full, on_ranks, total
from torch import nn

import fsdp_c


class Rotary(Net):
    """With a buffer that no state dict holds, and a parameter that no unit does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.free = nn.Parameter(torch.ones(2))


@on_ranks(4)
def test_replicas(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    torch.manual_seed(1)
    model: Any = Rotary()
    shard_blocks(model, fsdp_c, mesh=mesh, ignored_params={model.free})
    assert fsdp_c.check_replicas(model) == ()
    total(model(data(rank))).backward()
    assert fsdp_c.check_replicas(model) == ()
    weight = model.blocks[1].up.weight
    before = full(weight)
    with torch.no_grad():
        if rank == 3:
            weight.to_local().add_(1)
        if rank == 2:
            model.angles[1] = 5
            model.free.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        fsdp_c.check_replicas(model)
    for name, other, first in (("blocks.1.up.weight", 3, 1), ("free", 2, 0), ("angles", 2, 0)):
        assert f"'{name}' (rank {other} not as rank {first})" in str(caught.value)
    with pytest.raises(RuntimeError, match="'free'") as caught:
        fsdp_c.check_replicas(model, buffers=False)
    assert "angles" not in str(caught.value)
    repaired = fsdp_c.check_replicas(model, repair=True)
    assert set(repaired) == {"blocks.1.up.weight", "free", "angles"}
    assert fsdp_c.check_replicas(model) == ()
    assert torch.equal(full(weight), before)
    assert (model.angles == 1).all() and (model.free == 1).all()
    with torch.no_grad():
        assert model(data(0)).isfinite().all()


@on_ranks(1, 2)
def test_shards_are_no_copies(rank: int, n_ranks: int) -> None:
    """Nor is a model without units, or one without memory, in the way."""
    model: Any = Net()
    model.offset.fill_(rank)
    shard_blocks(model, fsdp_c)
    with torch.no_grad():
        model.stem.bias.to_local().add_(rank)
    assert fsdp_c.check_replicas(model, buffers=False) == ()
    if n_ranks == 2:
        with pytest.raises(RuntimeError, match="'offset' .rank 1 not as rank 0"):
            fsdp_c.check_replicas(model)
    with torch.device("meta"):
        assert fsdp_c.check_replicas(nn.Linear(2, 2)) == ()
    with pytest.raises(TypeError, match="expects a module, not list"):
        fsdp_c.check_replicas([model])
