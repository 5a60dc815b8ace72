"""offload and onload: the same bits as without, the memory gone meanwhile, mistakes named."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh
from models import Net, data, shard_blocks
from parity import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c._native import _C

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
HINT = r"(?s)fsdp_c.offload.*onload"


def make(policy: MixedPrecisionPolicy, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(n_blocks=2, hidden=50)
    shard_blocks(model, fsdp_c, mesh=mesh, mp_policy=policy)
    return model, ADAMW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(data(rank, number)).float().square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = param
        found[f"{name}.grad"] = param.grad
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {
        name: tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        for name, tensor in found.items()
    }


def mapped_segments() -> int:
    """Bytes of shared memory of fsdp_c that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fsdp_c" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


@on_ranks(1, 2)
def test_trains_on_with_the_same_bits(rank: int, n_ranks: int, tmp_path: Path) -> None:
    mesh = cached_mesh((n_ranks,))
    for policy in (MixedPrecisionPolicy(), BF16):
        expected, expected_optimizer = make(policy, mesh)
        model, optimizer = make(policy, mesh)
        for number in range(2):
            step(expected, expected_optimizer, rank, number)
            step(model, optimizer, rank, number)
        for to in (None, tmp_path / str(rank)):
            before = locals_of(model, optimizer)
            objects = [(p, p.grad, dict(optimizer.state[p])) for p in model.parameters()]
            values = {name: tensor.clone() for name, tensor in before.items()}
            fsdp_c.offload(model, optimizer, to=to)
            assert fsdp_c.stats(model, optimizer).rank["gradients"] == 0
            assert (to is None) or len(list(to.iterdir())) == 1
            fsdp_c.onload(model)
            assert to is None or list(to.iterdir()) == []
            after = locals_of(model, optimizer)
            for name, tensor in after.items():
                assert tensor is before[name] and torch.equal(tensor, values[name]), name
            for param, grad, state in objects:
                assert param.grad is grad and param in set(model.parameters())
                assert all(optimizer.state[param][key] is value for key, value in state.items())
            step(expected, expected_optimizer, rank, 2)
            step(model, optimizer, rank, 2)
        wanted = locals_of(expected, expected_optimizer)
        for name, tensor in locals_of(model, optimizer).items():
            assert torch.equal(tensor, wanted[name]), name
        assert "core" in str(fsdp_c.status())


@on_ranks(2)
def test_memory_goes(rank: int, n_ranks: int, tmp_path: Path) -> None:
    """Mapped shared memory and the core's account, at each stage."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    bytes_of_shards = 2 * 256 * 256 * 4 // n_ranks
    before = mapped_segments()
    for layer in model:
        fsdp_c.fully_shard(layer, mesh=cached_mesh((n_ranks,)))
    fsdp_c.fully_shard(model, mesh=cached_mesh((n_ranks,)))
    optimizer = ADAMW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    dist.barrier()
    live, account = mapped_segments(), _C.Domain.account()
    assert live - before >= 2 * n_ranks * bytes_of_shards  # shared, and its private view
    for to in (None, tmp_path / str(rank)):
        assert fsdp_c.offload(model, optimizer, to=to) >= 4 * bytes_of_shards
        away = _C.Domain.account()
        assert live - mapped_segments() >= 2 * n_ranks * bytes_of_shards
        assert account["shared"] - away["shared"] >= n_ranks * bytes_of_shards
        if to is not None:  # else the gradients are kept where they are
            assert account["gradients"] - away["gradients"] >= bytes_of_shards
        held = fsdp_c.stats(model, optimizer).rank
        assert held["parameters"] == held["gradients"] == held["reduce slots"] == 0
        assert held["optimizer"] < 1024
        fsdp_c.onload(model)
        assert mapped_segments() == live
        assert fsdp_c.stats(model, optimizer).rank["parameters"] == bytes_of_shards
        assert _C.Domain.account()["shared"] == account["shared"]


@on_ranks(2)
def test_use_meanwhile(rank: int, n_ranks: int) -> None:
    model, optimizer = make(MixedPrecisionPolicy(), cached_mesh((n_ranks,)))
    step(model, optimizer, rank, 0)
    fsdp_c.offload(model, optimizer)
    weight = next(model.parameters())
    for use in (
        lambda: model(data(rank, 0)),
        lambda: model.blocks[0](data(rank, 0)),
        lambda: model.unshard(),
        lambda: optimizer.step(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: weight._local_tensor.sum(),
        lambda: weight.detach().zero_(),
        lambda: fsdp_c.offload(model),
    ):
        with pytest.raises(RuntimeError, match=HINT):
            use()
    assert all(p.grad is not None for p in model.parameters())
    fsdp_c.onload(model)
    step(model, optimizer, rank, 1)
    with pytest.raises(ValueError, match="was not moved away"):
        fsdp_c.onload(model)
    with pytest.raises(ValueError, match="pass its root"):
        fsdp_c.offload(model.blocks)
    with pytest.raises(ValueError, match="sharded by fsdp_c"):
        fsdp_c.offload(nn.Linear(1, 1))


@on_ranks(2)
def test_in_a_step(rank: int, n_ranks: int) -> None:
    model, optimizer = make(MixedPrecisionPolicy(), cached_mesh((n_ranks,)))
    loss = model(data(rank, 0)).sum()
    with pytest.raises(RuntimeError, match=r"unit '.*' is in a step"):
        fsdp_c.offload(model)
    loss.backward()
    model.set_requires_gradient_sync(False)
    model(data(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="without synchronization"):
        fsdp_c.offload(model)
    model.set_requires_gradient_sync(True)
    model(data(rank, 0)).sum().backward()
    fsdp_c.offload(model)
    fsdp_c.onload(model)
    step(model, optimizer, rank, 1)


@on_ranks(2, 4)
def test_one_rank_fails(rank: int, n_ranks: int, tmp_path: Path) -> None:
    shape = ((2, 2), ("replicate", "shard")) if n_ranks == 4 else ((2,), None)
    model, optimizer = make(MixedPrecisionPolicy(), cached_mesh(*shape))
    step(model, optimizer, rank, 0)
    weight = next(model.parameters())._local_tensor
    value = weight.clone()
    to = tmp_path / str(rank)
    to.mkdir()
    file = to / f"offload-rank-{rank}.safetensors"
    if rank == 1:
        file.touch()
    error = FileExistsError if rank == 1 else RuntimeError
    with pytest.raises(error, match="is there already") as caught:
        fsdp_c.offload(model, optimizer, to=to)
    assert rank == 1 or "on rank 1" in str(caught.value)
    assert torch.equal(weight, value) and (rank == 1 or not file.exists())
    step(model, optimizer, rank, 1)
    value = weight.clone()
    file.unlink(missing_ok=True)
    fsdp_c.offload(model, optimizer, to=to)
    moved = file.rename(to / "moved") if rank == 1 else None
    with pytest.raises((OSError, RuntimeError), match="offload-rank-1"):
        fsdp_c.onload(model)
    with pytest.raises(RuntimeError, match=HINT):
        model(data(rank, 0))
    if moved is not None:
        moved.rename(file)
    fsdp_c.onload(model)
    assert torch.equal(weight, value)
    step(model, optimizer, rank, 2)


@on_ranks(2)
def test_where_torch_runs_and_before_the_first_forward(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    expected, expected_optimizer = make(MixedPrecisionPolicy(), mesh)
    model, optimizer = make(MixedPrecisionPolicy(), mesh)
    fsdp_c.offload(model)
    with pytest.raises(RuntimeError, match=HINT):
        model(data(rank, 0))
    fsdp_c.onload(model)
    for unit in model.blocks:
        state = fsdp_c.fully_shard.state(unit)
        state._fsdp_param_groups[0].set_allocate_memory_from_process_group(True)
    step(model, optimizer, rank, 0)
    step(expected, expected_optimizer, rank, 0)
    assert "torch" in str(fsdp_c.status())
    fsdp_c.offload(model, optimizer)
    with pytest.raises(RuntimeError, match=HINT):
        model(data(rank, 0))
    fsdp_c.onload(model)
    step(model, optimizer, rank, 1)
    step(expected, expected_optimizer, rank, 1)
    wanted = locals_of(expected, expected_optimizer)
    for name, tensor in locals_of(model, optimizer).items():
        torch.testing.assert_close(tensor, wanted[name], msg=name)
