"""A, N, P: arguments of fully_shard, where its names are found, its policies and small objects."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp as composable
from harness import implementation
from models import Net, data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.tensor import Shard

from behaviour.pairs import agree, backward, gradients, local, own, raised, shards


@on_ranks(2)
def test_a1_members_of_a_list_are_one_unit(rank: int, n_ranks: int) -> None:
    """The very list comes back; a member inside of another is none of its own."""

    def see(fsdp: Any) -> Any:
        net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
        seen: list[Any] = []
        for members in ([net[0], net[0][1], net[1]], (nn.Linear(2, 2), nn.Linear(2, 2))):
            seen.append(fsdp.fully_shard(members) is members)
            kinds = [isinstance(member, fsdp.FSDPModule) for member in members]
            state = members[0]._get_fsdp_state()
            shared = [fsdp.fully_shard.state(member) is state for member in members]
            seen.append((kinds, shared, len(state._fsdp_param_group.fsdp_params)))
        seen.append(fsdp.fully_shard(net) is net)
        parameters = shards(net)
        backward(net, data(rank, 0, 2, 4))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == [
        True,
        ([True, False, True], [True, False, True], 6),
        True,
        ([True, True], [True, True], 4),
        True,
    ]


@on_ranks(2)
def test_a4_placements_are_asked_of_the_originals(rank: int, n_ranks: int) -> None:
    """More than once each; a dim may be counted from the last."""

    def see(fsdp: Any) -> Any:
        net = nn.Linear(4, 3)
        originals = {id(parameter) for parameter in net.parameters()}
        asked: set[int] = set()

        def place(parameter: nn.Parameter) -> Any:
            asked.add(id(parameter))
            return Shard(-1) if parameter.ndim == 2 else None

        model = fsdp.fully_shard(net, shard_placement_fn=place)
        placements = [str(p.placements) for p in model.parameters()]
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        return asked == originals, placements, local(model.weight), gradients(parameters)

    is_asked, placements, *_ = agree(see)
    assert is_asked and placements[1] == "(Shard(dim=0),)" and "dim=1" in placements[0]


def test_n9_n10_n12_where_names_are_found() -> None:
    """All names say that they are of torch.distributed.fsdp; a function is also a submodule."""
    ours = implementation()
    for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"):
        assert getattr(ours, name).__module__ == "torch.distributed.fsdp", name
    for name in ("CPUOffloadPolicy", "UnshardHandle", "DataParallelMeshDims", "share_comm_ctx"):
        assert getattr(ours, name).__module__ == "torch.distributed.fsdp", name
    assert callable(composable.fully_shard) or hasattr(composable.fully_shard, "fully_shard")
    submodule = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    for name in ("FSDPModule", "fully_shard", "register_fsdp_forward_method", "UnshardHandle"):
        assert hasattr(submodule, name)
    api = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api")
    common = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    assert api.AllGather and api.ReduceScatter and api.Comm
    assert common.ShardPlacementResult and common.FSDPMeshInfo and common.DDPMeshInfo


@on_ranks(1)
def test_n11_asking_for_a_state(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        plain = nn.Linear(2, 2)
        found = fsdp.fully_shard.state(plain)
        model = fsdp.fully_shard(nn.Linear(2, 2))
        state = fsdp.fully_shard.state(model)
        return found, STATE_KEY in vars(plain), state is model._get_fsdp_state()

    assert agree(see) == (None, True, True)


def test_p1_p2_p3_policies() -> None:
    def see(fsdp: Any) -> Any:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, False)
        same = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, False)
        frozen = raised(lambda: setattr(policy, "param_dtype", None))
        dims = fsdp.DataParallelMeshDims("a", ("b", "c")), fsdp.DataParallelMeshDims(shard="a")
        return (
            (policy == same, hash(policy) == hash(same), frozen, policy.reduce_dtype),
            fsdp.CPUOffloadPolicy() == fsdp.CPUOffloadPolicy(pin_memory=True),
            issubclass(fsdp.CPUOffloadPolicy, fsdp.OffloadPolicy),
            raised(lambda: hash(fsdp.OffloadPolicy()), "unhashable"),
            [dataclasses.is_dataclass(x) for x in (policy, fsdp.OffloadPolicy())],
            [(each.shard_names, each.replicate_names) for each in dims],
            raised(lambda: fsdp.DataParallelMeshDims(), "At least one"),
        )

    seen = agree(see)
    assert seen[0] == (True, True, "FrozenInstanceError", torch.bfloat16) and seen[1] and seen[2]
    assert seen[3] == "TypeError" and seen[-1] == "ValueError"
    assert seen[5] == [(("a",), ("b", "c")), (("a",), ())]


@on_ranks(2)
def test_p4_handles_are_waited_for_once(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = fsdp.fully_shard(nn.Linear(4, 4))
        handle = model.unshard(async_op=True)
        assert isinstance(handle, fsdp.UnshardHandle) and fsdp.UnshardHandle().wait() is None
        seen = [own(model)]
        for _ in range(2):
            handle.wait()
            seen.append(own(model))
        model.reshard()
        handle.wait()  # has nothing left to wait for
        return [*seen, own(model)]

    assert agree(see) == ["sharded", "unsharded", "unsharded", "sharded"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)


@on_ranks(2)
def test_p5_methods_that_count_as_forward(rank: int, n_ranks: int) -> None:
    """The method is set on the module itself; other modules are left alone without a word."""

    def see(fsdp: Any) -> Any:
        plain, model = Encoder(), fsdp.fully_shard(Encoder(), reshard_after_forward=True)
        fsdp.register_fsdp_forward_method(plain, "missing")
        missing = raised(lambda: fsdp.register_fsdp_forward_method(model, "missing"))
        without = raised(lambda: model.encode(torch.ones(1, 4)), "mixed torch.Tensor and DTensor")
        fsdp.register_fsdp_forward_method(model, "encode")
        fsdp.register_fsdp_forward_method(model, "encode")  # around the first wrapper
        parameters = shards(model)
        model.encode(data(rank, 0, 2, 4)).sum().backward()
        names = ["encode" in vars(module) for module in (plain, model)]
        return missing, without, names, own(model.layer), gradients(parameters)

    assert agree(see)[:4] == ("ValueError", "RuntimeError", [False, True], "sharded")


@pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
@on_ranks(2)
def test_a3_what_stays_after_forward(rank: int, n_ranks: int, reshard: Any) -> None:
    """None differs between a root and the units below it; an int of all ranks is True, 1 False."""

    def see(fsdp: Any) -> Any:
        model = Net(1)
        fsdp.fully_shard(model.blocks[0], reshard_after_forward=reshard)
        fsdp.fully_shard(model, reshard_after_forward=reshard)
        parameters = shards(model)
        output = model(data(rank))
        after = own(model.stem), own(model.blocks[0].up)
        output.sum().backward()
        return after, gradients(parameters)

    after = agree(see)[0]
    kept = ("unsharded", "unsharded")
    expected = {"None": ("unsharded", "sharded"), "False": kept, "1": kept}
    assert after == expected.get(str(reshard), ("sharded", "sharded"))
