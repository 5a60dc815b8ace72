"""FSDP_C_STRICT=1: what torch refuses is refused again, where no other test says so."""

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, failure_of, implementation, run_ranks
from parity import on_ranks
from test_mistakes_torch_ignores import df28_equal_mesh_infos_are_one, df28_equal_mesh_made_again
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard


def list_of_ignored_parameters(fsdp: Any, rank: int, n_ranks: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp.fully_shard(net, ignored_params=[net[0].weight])


def foreach_over_plain_and_sharded(fsdp: Any, rank: int, n_ranks: int) -> None:
    net = nn.Linear(4, 4)
    fsdp.fully_shard(net, ignored_params={net.bias})
    net(torch.ones(2, 4)).sum().backward()
    net.reshard()
    torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True).step()


def clipping_over_plain_and_sharded(fsdp: Any, rank: int, n_ranks: int) -> None:
    net = nn.Linear(4, 4)
    fsdp.fully_shard(net, ignored_params={net.bias})
    net(torch.ones(2, 4)).sum().backward()
    net.reshard()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def clipping_over_two_meshes(fsdp: Any, rank: int, n_ranks: int) -> None:
    info = FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",)), 0)
    net = nn.Linear(4, 4)
    fsdp.fully_shard(
        net,
        mesh=cached_mesh((n_ranks,)),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), info) if p.ndim == 1 else None,
    )
    net(torch.ones(2, 4)).sum().backward()
    net.reshard()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


BODIES: dict[Callable[..., None], str] = {
    list_of_ignored_parameters: "RuntimeError",
    foreach_over_plain_and_sharded: "RuntimeError",
    clipping_over_plain_and_sharded: "RuntimeError",
    clipping_over_two_meshes: "RuntimeError",
    df28_equal_mesh_infos_are_one: "ValueError",
    df28_equal_mesh_made_again: "ValueError",
}


class Viewing(nn.Linear):
    """Its output is a view, whatever torch makes of linear layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


def view_warnings(fsdp: Any, is_strict: bool) -> list[str]:
    """Warnings about outputs of a unit that are views; without gradients there are none."""
    net = Viewing(4, 4)
    with mock.patch.dict(os.environ, FSDP_C_STRICT=str(int(is_strict))):
        fsdp.fully_shard(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                net(torch.ones(2, 4))
    return [str(w.message) for w in caught if "returned a view tensor" in str(w.message)]


@on_ranks(1)
def test_df21_warning_of_views(rank: int, n_ranks: int) -> None:
    assert len(view_warnings(torch_fsdp, False)) == 1
    ours = implementation()
    if ours is torch_fsdp:
        return
    (warning,) = view_warnings(ours, True)
    assert "FSDP2-wrapped module (FSDPViewing)" in warning
    assert not view_warnings(ours, False)


@on_ranks(1)
def test_df26_shallow_copies(rank: int, n_ranks: int) -> None:
    """torch makes them of modules that are built without arguments."""
    for fsdp in (torch_fsdp, implementation()):
        with mock.patch.dict(os.environ, FSDP_C_STRICT="1"):
            net = nn.Sequential(nn.Linear(4, 4))
            fsdp.fully_shard(net[0])
            fsdp.fully_shard(net)
            copied = copy.copy(net)
            assert type(copied) is nn.Sequential and copied[0] is net[0]
            with pytest.raises(TypeError, match="missing 2 required positional arguments"):
                copy.copy(net[0])


def run_all(rank: int, n_ranks: int, is_strict: bool, is_torch: bool) -> dict[str, str]:
    fsdp = torch_fsdp if is_torch else implementation()
    with mock.patch.dict(os.environ, FSDP_C_STRICT=str(int(is_strict))):
        return {body.__name__: failure_of(body, fsdp, rank, n_ranks) for body in BODIES}


@pytest.mark.parametrize("who", ["torch", "strict", "fsdp_c"])
def test_refusals(who: str) -> None:
    """In processes of their own: torch's clipping changes with the first model of fsdp_c."""
    for outcome in run_ranks(run_all, 2, who == "strict", who == "torch", fresh=True):
        assert outcome.ok, outcome
        for body, error in BODIES.items():
            failure = outcome.value[body.__name__]
            if who == "fsdp_c":
                assert not failure, failure
            else:
                assert f"\n{error}: " in failure, (body.__name__, failure)
