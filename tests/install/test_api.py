"""Small calls of the public functions, and what sharded modules look like."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, batch
from torch.distributed.tensor import DTensor, Shard

# --- a sharded module ---


def look_at_classes(rank: int, n_ranks: int) -> None:
    api, mesh = implementation(), cached_mesh((n_ranks,))
    net = Net()
    assert api.fully_shard(net.first, mesh=mesh) is net.first
    layers = [net.second]
    assert api.fully_shard(layers, mesh=mesh) is layers
    assert api.fully_shard(net) is net  # the default mesh
    for module in (net.first, net.second, net):
        assert isinstance(module, api.FSDPModule) and isinstance(module, torch_fsdp.FSDPModule)
    cls = type(net.first)
    assert cls.__name__ == "FSDPLinear" and type(net).__name__ == "FSDPNet"
    assert cls.__mro__[2] is nn.Linear and type(net).__mro__[2] is Net
    assert cls is type(net.second)
    assert repr(net).splitlines() == [
        "FSDPNet(",
        "  (first): FSDPLinear(in_features=4, out_features=5, bias=True)",
        "  (second): FSDPLinear(in_features=5, out_features=3, bias=True)",
        ")",
    ]
    assert net._is_fsdp_managed_module and net._fsdp_use_orig_params
    assert isinstance(net.first.weight, DTensor)
    assert net.first.weight.placements == (Shard(0),)


def test_classes_and_repr() -> None:
    run_ranks(look_at_classes, 2)


def slice_sequential(rank: int, n_ranks: int) -> None:
    api, mesh = implementation(), cached_mesh((n_ranks,))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    api.fully_shard(net[0], mesh=mesh)
    api.fully_shard(net, mesh=mesh)
    part = net[:2]
    assert type(part) is nn.Sequential
    assert part[0] is net[0] and len(part) == 2


def refuse_copies(rank: int, n_ranks: int) -> None:
    api = implementation()
    net = Net()
    api.fully_shard(net.first, mesh=cached_mesh((n_ranks,)))
    for module in (net.first, net):
        with pytest.raises(AssertionError, match="does not support deepcopy"):
            copy.deepcopy(module)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(net.first)


def look_at_state(rank: int, n_ranks: int) -> None:
    api = implementation()
    net = Net()
    assert api.fully_shard.state(net) is None
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)))
    assert api.fully_shard.state(net) is not None
    assert api.fully_shard.state(net) is net._get_fsdp_state()
    assert api.fully_shard.state(net.first) is None


def group_with_nested_entries(rank: int, n_ranks: int) -> None:
    api, mesh = implementation(), cached_mesh((n_ranks,))
    outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    modules = (outer[0], outer[0][0], outer[1])
    assert api.fully_shard(modules, mesh=mesh) is modules
    api.fully_shard(outer, mesh=mesh)
    assert isinstance(outer[0], api.FSDPModule) and type(outer[0][0]) is nn.Linear
    assert api.fully_shard.state(outer[0]) is api.fully_shard.state(outer[1])
    outer(batch(rank)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in outer.parameters())


@pytest.mark.parametrize(
    "fn", [slice_sequential, refuse_copies, look_at_state, group_with_nested_entries]
)
def test_sharded_module(fn: Any) -> None:
    run_ranks(fn, 2)


# --- small calls ---


class TwoWays(Net):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sum()


def use_forward_method(rank: int, n_ranks: int) -> None:
    api = implementation()
    net, plain = TwoWays(), TwoWays()
    api.register_fsdp_forward_method(plain, "score")
    assert "score" not in vars(plain)
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)))
    with pytest.raises(ValueError, match="missing"):
        api.register_fsdp_forward_method(net, "missing")
    api.register_fsdp_forward_method(net, "score")
    net.score(batch(rank)).backward()
    assert all(isinstance(param.grad, DTensor) for param in net.parameters())


def use_handles(rank: int, n_ranks: int) -> None:
    api = implementation()
    net = Net()
    api.fully_shard(net.first, mesh=cached_mesh((n_ranks,)))
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)))
    assert net.unshard() is None
    handle = net.first.unshard(async_op=True)
    assert isinstance(handle, api.UnshardHandle) and isinstance(handle, torch_fsdp.UnshardHandle)
    assert isinstance(net.first.weight, DTensor)
    assert handle.wait() is None and handle.wait() is None
    assert not isinstance(net.first.weight, DTensor)
    net.first.reshard()
    net.reshard()
    assert all(isinstance(param, DTensor) for param in net.parameters())


def refuse_wrong_settings(rank: int, n_ranks: int) -> None:
    api = implementation()
    net = Net()
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)))
    for value in ("x", 2, None):
        with pytest.raises(ValueError):
            net.set_reshard_after_forward(value)
    for setter in (net.set_modules_to_forward_prefetch, net.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError):
            setter([nn.Linear(2, 2)])
    for value, error in ((True, TypeError), ("1", TypeError), (0, ValueError)):
        with pytest.raises(error):
            net.set_reduce_scatter_max_input_buffers(value)
    api.share_comm_ctx([])
    with pytest.raises(ValueError):
        api.share_comm_ctx([net, nn.Linear(2, 2)])


@pytest.mark.parametrize("fn", [use_forward_method, use_handles, refuse_wrong_settings])
def test_calls(fn: Any) -> None:
    run_ranks(fn, 2)


def test_policies() -> None:
    api = implementation()
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False)
    assert policy == torch_fsdp.MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float32, False
    )
    assert hash(policy) == hash(copy.copy(policy))
    assert (
        isinstance(api.CPUOffloadPolicy(), api.OffloadPolicy) and api.CPUOffloadPolicy().pin_memory
    )
    dims = api.DataParallelMeshDims(shard="a", replicate=("b", "c"))
    assert dims.shard_names == ("a",) and dims.replicate_names == ("b", "c")
    with pytest.raises(ValueError):
        api.DataParallelMeshDims()
