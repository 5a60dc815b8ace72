"""clone: a copy holds the same, trains by itself, and follows as an average of weights."""

import copy
from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import WIDTH, Block, Net, Tied, data, shard_blocks, shard_grouped, tokens
from parity import full, on_ranks, sgd, total
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fsdp_c


class Mixed(nn.Module):
    """A recurrent layer, a frozen one, parameters that stay whole, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.cell = nn.LSTM(WIDTH, 5, batch_first=True)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(3))
        self.blocks[0].down.weight.muon = True
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.cell(x.unsqueeze(0))[0]) * self.gain


def shard_mixed(model: Any, fsdp: Any) -> None:
    for block in model.blocks:
        fsdp.fully_shard(block, reshard_after_forward=False)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.fully_shard(model.frozen, mp_policy=policy)
    fsdp.fully_shard(
        model,
        ignored_params={model.gain},
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == WIDTH else None,
    )


def describe(model: nn.Module) -> list[Any]:
    return [
        (name, param.dtype, param.shape, param.stride(), param.requires_grad, type(param))
        + ((param.placements, param._local_tensor.shape) if isinstance(param, DTensor) else ())
        for name, param in model.named_parameters(remove_duplicate=False)
    ]


def steps(model: Any, inputs: Any, rank: int, n: int) -> None:
    optimizer = sgd([param for param in model.parameters() if param.requires_grad])
    for step in range(n):
        total(model(inputs(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    "blocks": (Net, shard_blocks, data),
    "grouped": (Net, shard_grouped, data),
    "tied": (Tied, shard_blocks, tokens),
    "mixed": (Mixed, shard_mixed, data),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, 3)
def test_copies_are_alike_and_apart(rank: int, n_ranks: int, case: str) -> None:
    build, shard, inputs = CASES[case]
    torch.manual_seed(1)
    model: Any = build()
    shard(model, fsdp_c)
    steps(model, inputs, rank, 2)
    twin = fsdp_c.clone(model)
    again = fsdp_c.clone(twin)
    assert describe(twin) == describe(model) == describe(again)
    assert type(twin) is type(model) and fsdp_c.explain(twin).units
    values = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}
    steps(twin, inputs, rank, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(full(tensor), values[name]), name
    for other in (model, again):
        steps(other, inputs, rank, 2)
        for name, tensor in twin.state_dict().items():
            assert torch.equal(full(tensor), full(other.state_dict()[name])), name
    if case == "mixed":
        assert twin.blocks[0].down.weight.muon and again.seen.item() == 4
        assert twin.blocks[0].up.weight is twin.blocks[1].up.weight
        assert {id(p) for p in twin.parameters()}.isdisjoint(map(id, model.parameters()))


@on_ranks(3)
def test_average_of_weights(rank: int, n_ranks: int) -> None:
    """Of uneven shards too, and of a part of a model; as without sharding."""
    torch.manual_seed(1)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    shard_blocks(model, fsdp_c)
    average = fsdp_c.clone(model).requires_grad_(False)
    expected = copy.deepcopy(plain)
    update = get_ema_multi_avg_fn(0.9)
    for step in range(2):
        steps(model, lambda rank, _, step=step: data(0, step), rank, 1)
        steps(plain, lambda rank, _, step=step: data(0, step), rank, 1)
        update(list(average.parameters()), list(model.parameters()), None)
        update([p.data for p in expected.parameters()], [p.data for p in plain.parameters()], None)
    for param, wanted in zip(average.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(param), wanted.detach())
    with torch.no_grad():
        torch.testing.assert_close(average(data(0)), expected(data(0)))
    part = fsdp_c.clone(model.blocks[1])
    with torch.no_grad():
        torch.testing.assert_close(part(data(0)), plain.blocks[1](data(0)))


@on_ranks(2)
def test_mistakes(rank: int, n_ranks: int) -> None:
    with pytest.raises(TypeError, match="not SGD: pass the model"):
        fsdp_c.clone(torch.optim.SGD([torch.ones(1)]))
    with pytest.raises(ValueError, match=r"Net has no units: copy\.deepcopy"):
        fsdp_c.clone(Net())
    model: Any = Net()
    torch.distributed.fsdp.fully_shard(model.blocks[0])
    fsdp_c.fully_shard(model)
    with pytest.raises(ValueError, match=r"'blocks\.0' was not sharded by fsdp_c\.fully_shard"):
        fsdp_c.clone(model)
    model = Net()
    shard_grouped(model, fsdp_c)
    with pytest.raises(ValueError, match="a unit of the model has modules outside of it"):
        fsdp_c.clone(model.blocks[0])
    with pytest.raises(AssertionError, match=r"does not support deepcopy.*fsdp_c\.clone"):
        copy.deepcopy(model)


class Named(Net):
    """Entered by another name than forward."""

    def run(self, x: Tensor) -> Tensor:
        return self.forward(x)


@on_ranks(2)
def test_what_comes_along(rank: int, n_ranks: int) -> None:
    """Methods that count as forward, checkpointing, replicas, no memory yet."""
    model: Any = fsdp_c.shard(Named(), "zero2", precision="bf16", checkpoint=True, units=Block)
    fsdp_c.register_fsdp_forward_method(model, "run")
    twin = fsdp_c.clone(model)
    with torch.no_grad():
        twin.blocks[0].down.bias.fill_(1)
        assert not torch.equal(twin.run(data(rank)), model.run(data(rank)))
        model.blocks[0].down.bias.fill_(1)
    for other in (model, twin):
        other.reshard()
        total(other.run(data(rank))).backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))

    mesh = cached_mesh((n_ranks, 1), ("replicate", "shard"))
    for options in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        model = Net()
        shard_blocks(model, fsdp_c, **options)
        twin = fsdp_c.clone(model)
        for other in (model, twin):
            total(other(data(rank))).backward()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(ours.grad), full(theirs.grad)), options

    with torch.device("meta"):
        model = Net()
    shard_blocks(model, fsdp_c)
    twin = fsdp_c.clone(model)
    assert all(param.is_meta for param in twin.parameters())
