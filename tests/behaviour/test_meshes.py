"""PM, DM: a mesh per parameter, and data-parallel dims named in one mesh of everything."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh
from models import data
from parity import Pair, Plain, Side, Tolerance, compare_values, full, on_ranks, total
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from behaviour.accumulation import micro_batches
from behaviour.records import collectives, names

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)
WIDTH = 6


class Experts(nn.Module):
    """A dense layer, and experts that are sharded over a mesh of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return x + torch.einsum("bi,eij->bj", torch.tanh(self.dense(x)), experts)


class Layers(nn.Module):
    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def per_parameter(model: nn.Module, info: Any, placement: Shard | None = None) -> Any:
    experts = {id(p) for name, p in model.named_parameters() if name.endswith("experts")}

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(placement, info) if id(parameter) in experts else None

    return place


def shard_experts(info: Any, placement: Shard | None = None, **options: Any) -> Any:
    def shard(model: nn.Module, fsdp: Any) -> None:
        place = per_parameter(model, info, placement)
        for layer in model.layers:
            fsdp.fully_shard(layer, shard_placement_fn=place, **options)
        fsdp.fully_shard(model, **options)

    return shard


@functools.cache
def expert_info(n_ranks: int) -> FSDPMeshInfo:
    """Over all ranks again, with a process group of its own."""
    group = dist.new_group(range(n_ranks))
    return FSDPMeshInfo(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("experts",)), 0)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "dim 1"])
@on_ranks(2)
def test_pm1_a_mesh_per_parameter(rank: int, n_ranks: int, kind: str) -> None:
    if kind == "hsdp":
        info = HSDPMeshInfo(cached_mesh((2, 1), ("replica", "experts")), 1, 0)
    else:
        info = expert_info(n_ranks)
    pair = Pair(Layers, shard_experts(info, Shard(1) if kind == "dim 1" else None))
    placements = pair.both(lambda side: side.shards["layers.0.experts"].placements)
    expected = {"fsdp": (Shard(0),), "hsdp": (Replicate(), Shard(0)), "dim 1": (Shard(1),)}
    assert placements == expected[kind]
    for step in range(2):
        pair.step(data(rank, step))


def groups(side: Side) -> list[list[str]]:
    groups = side.model.layers[0]._get_fsdp_state()._fsdp_param_groups
    return [[p._module_info.param_name for p in group.fsdp_params] for group in groups]


@on_ranks(2)
def test_pm2_groups_in_order_of_appearance(rank: int, n_ranks: int) -> None:
    pair = Pair(Layers, shard_experts(expert_info(n_ranks)))
    # The layer's own parameter comes last: modules are walked from below.
    assert pair.both(groups) == [["weight", "bias"], ["experts"]]
    pair.step(data(rank))

    def everywhere(model: nn.Module, fsdp: Any) -> None:
        info = expert_info(n_ranks)
        for layer in model.layers:
            fsdp.fully_shard(layer, shard_placement_fn=lambda _: ShardPlacementResult(None, info))
        fsdp.fully_shard(model)

    pair = Pair(Layers, everywhere)
    assert pair.both(groups) == [["weight", "bias", "experts"]]
    pair.step(data(rank))


@on_ranks(4)
def test_pm6_expert_parallel(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("efsdp", "ep"))
    info = FSDPMeshInfo(mesh["efsdp"], 0)

    def build() -> nn.Module:
        model = Layers(1)
        experts = distribute_tensor(model.layers[0].experts.detach(), mesh["ep"], [Shard(0)])
        model.layers[0].experts = nn.Parameter(experts)
        return model

    pair = Pair(build, shard_experts(info, Shard(1)))
    experts = pair.ours.shards["layers.0.experts"]
    assert experts.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert experts.placements == (Shard(1), Shard(0))
    for step in range(2):
        pair.step(data(rank, step))


@on_ranks(2)
def test_pm7_each_group_averages_over_its_own_shards(rank: int, n_ranks: int) -> None:
    """Experts that one rank shards alone keep their gradient; a factor applies to all groups."""
    alone = FSDPMeshInfo(cached_mesh((2, 1), ("replica", "experts"))["experts"], 0)
    pair = Pair(Layers, shard_experts(alone), tolerance=CLOSE)
    plain = Plain(Layers)
    losses = [total(plain.model(data(r))) for r in range(2)]
    mean = torch.autograd.grad(sum(losses) / 2, list(plain.model.parameters()), retain_graph=True)
    mine = torch.autograd.grad(losses[rank], list(plain.model.parameters()))

    def gradients(side: Side) -> dict[str, Tensor]:
        total(side.model(data(rank))).backward()
        found = {name: full(shard.grad) for name, shard in side.shards.items()}
        side.optimizer.zero_grad()
        return found

    found = pair.both(gradients)
    for (name, _), m, o in zip(plain.model.named_parameters(), mean, mine, strict=True):
        compare_values(found[name], o if name.endswith("experts") else m, CLOSE, name)

    def factor(side: Side) -> None:
        for layer in side.model.layers:
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                assert group.gradient_divide_factor is None
            layer.set_gradient_divide_factor(4.0)
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                assert group.gradient_divide_factor == 4.0

    pair.do(factor)


@on_ranks(2)
def test_pm8_order_of_gathers_and_reductions(rank: int, n_ranks: int) -> None:
    """Forward gathers group 0 then 1 of a unit; backward ascends too and reduces descending."""
    info = expert_info(n_ranks)
    pair = Pair(Layers, shard_experts(info))

    def order(side: Side) -> tuple[list[str], list[str]]:
        seen: list[str] = []
        names = {}
        for index, layer in enumerate(side.model.layers):
            for group, letter in zip(layer._get_fsdp_state()._fsdp_param_groups, "DE", strict=True):
                names[id(group)] = f"{index}{letter}"
                watch(group, "unshard", seen, "AG", names)
                watch(group, "post_backward", seen, "RS", names)
        out = side.model(data(rank))
        forward = [call for call in seen if call.startswith("AG")]
        seen.clear()
        total(out).backward()
        return forward, [call for call in seen if call.startswith("RS")]

    forward, backward = pair.both(order)
    first = list(dict.fromkeys(forward))
    assert first == [f"AG {i}{letter}" for i in range(3) for letter in "DE"]
    assert backward == [f"RS {i}{letter}" for i in (2, 1, 0) for letter in "ED"]


def watch(group: Any, name: str, seen: list[str], label: str, names: dict[int, str]) -> None:
    original = getattr(group, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(f"{label} {names[id(group)]}")
        return original(*args, **kwargs)

    setattr(group, name, call)


@on_ranks(2)
def test_pm11_setters_with_several_groups(rank: int, n_ranks: int) -> None:
    pair = Pair(Layers, shard_experts(expert_info(n_ranks)))
    pair.step(data(rank))

    def refuse(side: Side) -> None:
        layer = side.model.layers[0]
        groups = layer._get_fsdp_state()._fsdp_param_groups
        for name, value in (
            ("set_all_reduce_hook", print),
            ("set_custom_all_gather", groups[0]._all_gather_comm),
            ("set_custom_reduce_scatter", groups[0]._reduce_scatter_comm),
        ):
            with pytest.raises(ValueError):
                getattr(layer, name)(value)
        layer.set_requires_gradient_sync(False)
        assert [group.reduce_grads for group in groups] == [False, False]
        layer.set_requires_gradient_sync(True)

    pair.do(refuse)
    pair.step(data(rank, 1))


# --- one mesh of everything -----------------------------------------------------------------------


class Local(nn.Module):
    """Multiplies by weights that may be DTensors."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(rows))
        self.kinds: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor):
            self.kinds.append((weight.device_mesh.mesh_dim_names, weight.placements))
            x = DTensor.from_local(x, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
        y = torch.tanh(nn.functional.linear(x, weight, bias))
        if isinstance(y, DTensor):
            y = y.redistribute(placements=[Replicate()] * y.device_mesh.ndim).to_local()
        return y


def spmd(mesh: DeviceMesh, placements: list[Any], rows: int = 8) -> Any:
    def build() -> nn.Module:
        model = Local(rows)
        for name, parameter in list(model.named_parameters()):
            setattr(
                model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
            )
        return model

    return build


def shard_dims(mesh: DeviceMesh, shard: Any = None, replicate: Any = None, **options: Any) -> Any:
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)

    def apply(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)

    return apply


@on_ranks(4)
def test_dm1_placements_on_the_same_mesh(rank: int, n_ranks: int) -> None:
    """Strided where a sharding dim stands to the right, plain where it stands to the left."""
    mesh = cached_mesh((2, 2), ("dp", "tp"))
    pair = Pair(spmd(mesh, [Replicate(), Shard(0)]), shard_dims(mesh, "dp"))
    expected = (_StridedShard(0, split_factor=2), Shard(0))
    assert pair.both(lambda side: side.shards["weight"].placements) == expected
    pair.step(data(mesh.get_local_rank("dp")))

    mesh = cached_mesh((2, 2), ("tp", "dp"))
    pair = Pair(spmd(mesh, [Shard(0), Replicate()]), shard_dims(mesh, "dp"))
    assert pair.both(lambda side: side.shards["weight"].placements) == (Shard(0), Shard(0))
    pair.step(data(mesh.get_local_rank("dp")))


@on_ranks(2)
def test_dm1_only_dtensors_that_are_replicated(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 1), ("dp", "tp"))

    def refuse(side: Side) -> None:
        with pytest.raises(ValueError, match="all parameters must be DTensors"):
            shard_dims(mesh, "dp")(Local(), side.fsdp)
        with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP shard dim"):
            shard_dims(mesh, "dp")(spmd(mesh, [Shard(0), Replicate()])(), side.fsdp)

    Pair(spmd(mesh, [Replicate(), Shard(0)]), shard_dims(mesh, "dp")).do(refuse)


@on_ranks(2)
def test_dm2_forward_sees_dtensors_on_the_whole_mesh(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 1), ("dp", "tp"))
    pair = Pair(spmd(mesh, [Replicate(), Shard(0)]), shard_dims(mesh, "dp"))
    pair.step(data(rank))
    seen = pair.both(lambda side: side.model.kinds)
    assert seen == [(("dp", "tp"), (Replicate(), Shard(0)))]


@on_ranks(2)
def test_dm3_gradients_equal_the_unsharded_model(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 1), ("dp", "tp"))
    pair = Pair(spmd(mesh, [Replicate(), Shard(0)]), shard_dims(mesh, "dp"), tolerance=CLOSE)
    pair.forward(data(rank))
    pair.backward()
    plain = Plain(Local)
    plain.backward([total(plain.model(data(r))) for r in range(2)], 2)
    plain.check(pair.ours, CLOSE)


@on_ranks(2)
def test_dm4_several_shard_dims_are_flattened(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 1, 1), ("dp", "cp", "tp"))
    placements = [Replicate(), Replicate(), Shard(0)]
    pair = Pair(spmd(mesh, placements), shard_dims(mesh, ("dp", "cp")))
    names = pair.both(lambda side: side.shards["weight"].device_mesh.mesh_dim_names)
    assert names == ("dp_cp", "tp")
    pair.step(data(rank))
    assert pair.both(lambda side: side.model.kinds[0][0]) == ("dp", "cp", "tp")


@on_ranks(2)
def test_dm4_replicate_dim_directly_before_the_shard_dim(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((1, 2, 1), ("rep", "dp", "cp"))
    pair = Pair(spmd(mesh, [Replicate()] * 3), shard_dims(mesh, ("dp", "cp"), "rep"))
    shard = pair.ours.shards["weight"]
    assert shard.device_mesh.mesh_dim_names == ("rep", "dp_cp")
    assert shard.placements == (Replicate(), Shard(0))
    pair.step(data(rank))


@on_ranks(2)
def test_dm7_replicate_only(rank: int, n_ranks: int) -> None:
    """One all-reduce per unit, nothing gathered; still a plain unit of fully_shard."""
    mesh = cached_mesh((2, 1), ("dp", "tp"))
    build = spmd(mesh, [Replicate(), Shard(0)])
    pair = Pair(build, shard_dims(mesh, replicate="dp"))
    assert type(pair.ours.model).__name__ == type(pair.theirs.model).__name__ == "FSDPLocal"
    assert isinstance(pair.ours.model._get_fsdp_state(), FSDPState)

    def issued(side: Side) -> list[str]:
        with collectives() as seen:
            total(side.model(data(rank))).backward()
        return names(seen)

    assert pair.both(issued) == ["AR"]
    assert pair.ours.shards["weight"].placements == (Replicate(), Shard(0))
    pair.do(lambda side: side.optimizer.zero_grad())
    pair.step(data(rank, 1))


@on_ranks(4)
def test_dm8_partial_sums_over_the_replicas(rank: int, n_ranks: int) -> None:
    """Without the all-reduce the gradient stays away and is added at the next one."""
    mesh = cached_mesh((2, 2), ("replica", "shard"))
    pair = Pair(Local, lambda model, fsdp: fsdp.fully_shard(model, mesh=mesh), tolerance=CLOSE)

    def partial_sum(side: Side) -> Tensor | None:
        return side.model._get_fsdp_state()._fsdp_param_group._partial_reduce_output

    for is_last in micro_batches(pair, Local, rank, FSDPModule.set_requires_all_reduce, CLOSE):
        assert (pair.ours.shards["weight"].grad is not None) is is_last
        assert (pair.both(partial_sum) is None) is is_last


@on_ranks(4)
def test_dm9_partial_sums_that_are_dropped_by_hand(rank: int, n_ranks: int) -> None:
    """Uneven rows: what is shown has the padding that torch's buffer has."""
    mesh = cached_mesh((2, 2), ("replica", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    pair = Pair(
        lambda: Local(5),
        lambda model, fsdp: fsdp.fully_shard(model, mesh=mesh, mp_policy=policy),
        tolerance=Tolerance.of(n_ranks, torch.bfloat16),
    )

    def drop(side: Side) -> Tensor:
        group = side.model._get_fsdp_state()._fsdp_param_group
        side.model.set_requires_all_reduce(False)
        total(side.model(data(rank))).backward()
        shown = group._partial_reduce_output
        group._partial_reduce_output = None
        assert group._partial_reduce_output is None
        side.model.set_requires_all_reduce(True)
        return shown

    assert pair.both(drop).dtype is torch.float32
    pair.step(data(rank, 1))


@on_ranks(2)
def test_dm9_zero_grad_keeps_accumulated_gradients(rank: int, n_ranks: int) -> None:
    """A micro-batch without sync comes back in the next reduction, whatever zero_grad does."""
    mesh = cached_mesh((2, 1), ("replica", "shard"))
    pair = Pair(Local, lambda model, fsdp: fsdp.fully_shard(model, mesh=mesh), tolerance=CLOSE)
    for is_last in micro_batches(pair, Local, rank, FSDPModule.set_requires_all_reduce, CLOSE):
        if not is_last:
            pair.do(lambda side: side.optimizer.zero_grad())
