"""torch.distributed.checkpoint: state dicts, files for other world sizes, bit-equal resuming."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, batch, check_trains
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

FULL = StateDictOptions(full_state_dict=True)


def sharded(net: nn.Module | None = None, api: Any = None) -> nn.Module:
    net, api = net or Net(), api or implementation()
    mesh = cached_mesh((dist.get_world_size(),))
    api.fully_shard(net.first, mesh=mesh)
    return api.fully_shard(net, mesh=mesh)


def adam(net: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, **kwargs)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = net(batch(dist.get_rank(), step)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_equal(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(state[name], value)
        elif isinstance(value, torch.Tensor):
            pair = [t.full_tensor() if isinstance(t, DTensor) else t for t in (state[name], value)]
            assert torch.equal(*pair), name
        else:
            assert state[name] == value, name


# --- the model ---


def get_model(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net().state_dict()
    for _ in range(2):
        state = get_model_state_dict(net)
        for name, param in net.named_parameters():
            assert isinstance(state[name], DTensor)
            assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
        assert_equal(state, reference)
        full = get_model_state_dict(net, options=FULL)
        assert not any(isinstance(value, DTensor) for value in full.values())
        assert_equal(full, reference)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        on_first = get_model_state_dict(net, options=options)
        assert_equal(on_first, reference if rank == 0 else {})
        net(batch(rank))
    net.first.weight.requires_grad_(False)
    state = get_model_state_dict(net, options=StateDictOptions(ignore_frozen_params=True))
    assert "first.weight" not in state and "first.bias" in state


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_get_model_state_dict(n_ranks: int) -> None:
    run_ranks(get_model, n_ranks)


def set_model(rank: int, n_ranks: int) -> None:
    source = Net(seed=1)
    full = source.state_dict()
    for after_forward in (False, True):
        for from_first in (False, True):
            net = sharded()
            if after_forward:
                train(net, adam(net), range(1))
            params = dict(net.named_parameters())
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
            # torch fills the dict that it is given.
            given = dict(full) if rank == 0 or not from_first else {}
            set_model_state_dict(net, given, options=options)
            assert all(params[name] is param for name, param in net.named_parameters())
            assert_equal(net.state_dict(), full)
            check_trains(net, Net(seed=1))


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_set_model_state_dict(n_ranks: int) -> None:
    run_ranks(set_model, n_ranks)


def set_meta_model(rank: int, n_ranks: int) -> None:
    with torch.device("meta"):
        net = Net()
    sharded(net)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = {name: value.bfloat16() for name, value in Net(seed=1).state_dict().items()}
    set_model_state_dict(net, dict(given) if rank == 0 else {}, options=options)
    assert not any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert all(param.dtype is torch.bfloat16 for param in net.parameters())
    assert_equal(get_model_state_dict(net, options=FULL), given)
    net(batch(rank).bfloat16()).sum().backward()

    net = sharded()
    set_model_state_dict(net, dict(given) if rank == 0 else {}, options=options)
    assert all(param.dtype is torch.float32 for param in net.parameters())


def test_set_meta_model_state_dict() -> None:
    run_ranks(set_meta_model, 2)


# --- the optimizer ---


def optimizer_round_trip(rank: int, n_ranks: int, flags: dict[str, bool]) -> None:
    net = sharded()
    optimizer = adam(net, **flags)
    train(net, optimizer, range(2))
    net.reshard()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(net, optimizer)
    moment = state["state"]["first.weight"]["exp_avg"]
    assert isinstance(moment, DTensor) and moment.placements == net.first.weight.placements
    assert not isinstance(state["state"]["first.weight"]["step"], DTensor)
    full = get_optimizer_state_dict(net, optimizer, options=FULL)
    assert type(full["state"]["first.weight"]["exp_avg"]) is torch.Tensor
    assert full["state"]["first.weight"]["exp_avg"].shape == (5, 4)

    local = optimizer.state_dict()
    again = sharded()
    before = {name: param.full_tensor() for name, param in again.named_parameters()}
    fresh = adam(again, **flags)
    set_optimizer_state_dict(again, fresh, state)
    assert all(
        torch.equal(param.full_tensor(), before[name]) for name, param in again.named_parameters()
    )
    assert all(param.grad is None for param in again.parameters())
    assert_equal(get_optimizer_state_dict(again, fresh, options=FULL), full)
    received = adam(again, **flags)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = copy.deepcopy(full) if rank == 0 else {}
    set_optimizer_state_dict(again, received, given, options=options)
    assert_equal(get_optimizer_state_dict(again, received, options=FULL)["state"], full["state"])
    other = adam(again, **flags)
    other.load_state_dict(local)
    assert_equal(get_optimizer_state_dict(again, other, options=FULL)["state"], full["state"])


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_optimizer_state_dict(kind: str, n_ranks: int) -> None:
    flags = {"foreach": False} if kind == "loop" else {kind: True}
    run_ranks(optimizer_round_trip, n_ranks, flags)


def resume(rank: int, n_ranks: int, way: str) -> None:
    net = sharded()
    optimizer = adam(net)
    train(net, optimizer, range(3))
    optimizer.zero_grad()
    options = FULL if way == "full" else StateDictOptions()
    if way == "local":
        states = net.state_dict(), optimizer.state_dict()
    else:
        states = get_state_dict(net, optimizer, options=options)
    # What was saved aliases the training state, so a file or a copy has to come between.
    model_state, optimizer_state = copy.deepcopy(states)
    losses = train(net, optimizer, range(3, 6))

    again = sharded(Net(seed=1))
    fresh = adam(again)
    if way == "local":
        again.load_state_dict(model_state)
        fresh.load_state_dict(optimizer_state)
    else:
        set_state_dict(
            again,
            fresh,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=options,
        )
    assert torch.equal(torch.stack(losses), torch.stack(train(again, fresh, range(3, 6))))
    assert_equal(again.state_dict(), net.state_dict())


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("way", ["local", "sharded", "full"])
def test_resume_is_bit_equal(way: str, n_ranks: int) -> None:
    run_ranks(resume, n_ranks, way)


# --- files ---


def api_of(name: str) -> Any:
    return torch_fsdp if name == "torch" else implementation()


def save(rank: int, n_ranks: int, path: str, api: str) -> tuple[dict, list]:
    """Saves after two steps; returns the whole model and the losses of two steps more."""
    net = sharded(api=api_of(api))
    optimizer = adam(net)
    train(net, optimizer, range(2))
    optimizer.zero_grad()
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
    full = get_model_state_dict(net, options=FULL)
    full = {name: value.numpy().copy() for name, value in full.items()}
    return full, [loss.item() for loss in train(net, optimizer, range(2, 4))]


def load(rank: int, n_ranks: int, path: str, api: str) -> tuple[dict, list]:
    net = sharded(Net(seed=1), api_of(api))
    params = dict(net.named_parameters())
    optimizer = adam(net)
    model, optim = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    # The model's part was read in place.
    assert all(params[name] is param for name, param in net.named_parameters())
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    full = get_model_state_dict(net, options=FULL)
    full = {name: value.numpy().copy() for name, value in full.items()}
    return full, [loss.item() for loss in train(net, optimizer, range(2, 4))]


def load_in_place(rank: int, n_ranks: int, path: str) -> dict:
    net = sharded(Net(seed=1))
    train(net, adam(net), range(1))
    dcp.load({"model": net.state_dict()}, checkpoint_id=path)
    net(batch(rank))
    return {
        name: value.numpy().copy()
        for name, value in get_model_state_dict(net, options=FULL).items()
    }


def load_plain(rank: int, n_ranks: int, path: str) -> dict:
    net = Net(seed=1)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=path)
    net.load_state_dict(state["model"])
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


def assert_same_arrays(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    assert all((left[name] == right[name]).all() for name in left)


def test_save_and_load_over_world_sizes(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    full, losses = run_ranks(save, 2, path, "ours")[0]
    for n_ranks in (1, 2, 3):
        for loaded in run_ranks(load_in_place, n_ranks, path):
            assert_same_arrays(loaded, full)
        restored, later = run_ranks(load, n_ranks, path, "ours")[0]
        assert_same_arrays(restored, full)
        if n_ranks == 2:
            assert later == losses
    assert_same_arrays(run_ranks(load_plain, 1, path)[0], full)


@pytest.mark.parametrize(("writer", "reader"), [("torch", "ours"), ("ours", "torch")])
def test_checkpoints_travel_to_and_from_torch(writer: str, reader: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    full, losses = run_ranks(save, 2, path, writer)[0]
    restored, later = run_ranks(load, 2, path, reader)[0]
    assert_same_arrays(restored, full)
    assert later == pytest.approx(losses, rel=1e-6)
