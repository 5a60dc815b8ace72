"""TP: parameters that are DTensors on a tensor-parallel mesh before they are sharded."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import data
from parity import Pair, Plain, Side, Tolerance, compare_values, full, on_ranks, total
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_c
from behaviour.records import collectives, names

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)
WIDTH, HIDDEN = 6, 8


def mesh_2d(dp: int, tp: int) -> DeviceMesh:
    return cached_mesh((dp, tp), ("dp", "tp"))


class Mlp(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlps(nn.Module):
    def __init__(self, n_blocks: int = 2, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden) for _ in range(n_blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: nn.Module, tp: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_2d(mesh: DeviceMesh, **options: Any) -> Any:
    def shard(model: nn.Module, fsdp: Any) -> None:
        parallelize(model, mesh["tp"])
        dp = mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")]
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=dp, **options)
        fsdp.fully_shard(model, mesh=dp, **options)

    return shard


def dp_data(mesh: DeviceMesh, step: int = 0) -> Tensor:
    return data(mesh.get_local_rank("dp"), step, 4, WIDTH)


def layouts(side: Side) -> dict[str, tuple[Any, Any]]:
    return {
        name: (shard.device_mesh.mesh_dim_names, shard.placements)
        for name, shard in side.shards.items()
    }


@on_ranks(4)
def test_tp1_meshes_are_concatenated(rank: int, n_ranks: int) -> None:
    mesh = mesh_2d(2, 2)
    pair = Pair(Mlps, shard_2d(mesh))
    found = pair.both(layouts)
    assert found["blocks.0.down.weight"] == (("dp", "tp"), (Shard(0), Shard(1)))
    assert found["blocks.0.down.bias"] == (("dp", "tp"), (Shard(0), Replicate()))
    assert found["head.weight"][1] == (Shard(0),)
    for step in range(2):
        pair.step(dp_data(mesh, step))


@on_ranks(2)
def test_tp1_hsdp_puts_the_replicas_first(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((1, 2, 1), ("replica", "dp", "tp"))
    pair = Pair(Mlps, shard_2d(mesh))
    found = pair.both(layouts)
    expected = (("replica", "dp", "tp"), (Replicate(), Shard(0), Shard(1)))
    assert found["blocks.0.down.weight"] == expected
    for step in range(2):
        pair.step(dp_data(mesh, step))


@on_ranks(4)
def test_tp2_strided_where_both_shard_a_dim(rank: int, n_ranks: int) -> None:
    strided = _StridedShard(0, split_factor=2)
    found = Pair(Mlps, shard_2d(mesh_2d(2, 2))).both(layouts)
    assert found["blocks.0.up.weight"][1] == (strided, Shard(0))
    assert found["blocks.0.down.weight"][1] == (Shard(0), Shard(1))

    def on_dim_1(parameter: nn.Parameter) -> Shard:
        return Shard(parameter.ndim - 1)

    found = Pair(Mlps, shard_2d(mesh_2d(2, 2), shard_placement_fn=on_dim_1)).both(layouts)
    assert found["blocks.0.up.weight"][1] == (Shard(1), Shard(0))
    assert found["blocks.0.down.weight"][1] == (_StridedShard(1, split_factor=2), Shard(1))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 9])
@on_ranks(4)
def test_tp3_the_local_part_is_chunked(rank: int, n_ranks: int, rows: int) -> None:
    """Tensor parallel first, then the shards; the whole is the original for any rows."""
    mesh = mesh_2d(2, 2)
    original = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)

    def build() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(original, mesh["tp"], [Shard(0)]))
        return model

    pair = Pair(build, lambda model, fsdp: fsdp.fully_shard(model, mesh=mesh["dp"]))

    def whole(side: Side) -> tuple[Any, Any]:
        weight = side.shards["weight"]
        return weight.full_tensor().detach(), weight.shape

    tensor, shape = pair.both(whole)
    assert torch.equal(tensor, original)
    assert shape == (rows, 3)
    mine = original.chunk(2)[mesh.get_local_rank("tp") :][:1] if rows > 1 else ()
    if rows in (2, 6):
        part = mine[0].chunk(2)[mesh.get_local_rank("dp") :][:1]
        assert torch.equal(
            pair.ours.shards["weight"].to_local(), part[0] if part else original.new_empty(0, 3)
        )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_tp4_unsharded_on_the_tensor_parallel_mesh(
    rank: int, n_ranks: int, dtype: torch.dtype | None
) -> None:
    mesh = mesh_2d(1, 2)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    pair = Pair(Mlps, shard_2d(mesh, mp_policy=policy))

    def unsharded(side: Side) -> Any:
        block = side.model.blocks[0]
        block.unshard()
        weight = block.up.weight
        found = weight.device_mesh == mesh["tp"], weight.placements, weight._spec.tensor_meta.dtype
        block.reshard()
        return found

    assert pair.both(unsharded) == (True, (Shard(0),), dtype or torch.float32)


class Partly(nn.Module):
    """A parallel block between norms whose inputs are split over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(self.norm(x))))
        return x.full_tensor() if isinstance(x, DTensor) else x


@on_ranks(2)
def test_tp5_partial_gradients_are_summed_over_tp(rank: int, n_ranks: int) -> None:
    """Under sequence parallelism each rank has a part of the norm's gradient."""
    mesh = mesh_2d(1, 2)
    seen: list[Any] = []

    def shard(model: nn.Module, fsdp: Any) -> None:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh["tp"], plan)
        fsdp.fully_shard(model, mesh=mesh["dp"])

    pair = Pair(Partly, shard, tolerance=CLOSE)
    plain = Plain(Partly)
    inputs = data(0, 0, 3, 4, WIDTH)

    def watch(side: Side) -> None:
        side.model.unshard()
        side.model.norm.weight.register_hook(lambda grad: seen.append(grad.placements[0]))

    pair.do(watch)
    pair.forward(inputs.chunk(2, dim=1)[rank])
    pair.backward()
    assert len(seen) == 2, seen
    assert all(placement.is_partial() for placement in seen)
    plain.backward([total(plain.model(inputs))], 1)
    plain.check(pair.ours, CLOSE)
    assert pair.ours.shards["norm.weight"].grad.placements == (Shard(0), Replicate())


@on_ranks(4)
def test_tp6_average_over_data_parallel_only(rank: int, n_ranks: int) -> None:
    mesh = mesh_2d(2, 2)
    pair = Pair(Mlps, shard_2d(mesh), tolerance=CLOSE)
    plain = Plain(Mlps)
    pair.forward(dp_data(mesh))
    pair.backward()
    plain.backward([total(plain.model(data(r, 0, 4, WIDTH))) for r in range(2)], 2)
    plain.check(pair.ours, CLOSE)


@on_ranks(2)
def test_tp6_loss_parallel(rank: int, n_ranks: int) -> None:
    mesh = mesh_2d(1, 2)

    def shard(model: nn.Module, fsdp: Any) -> None:
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(
            model,
            mesh["tp"],
            {
                "0": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Replicate()
                ),
                "1": head,
            },
        )
        fsdp.fully_shard(model, mesh=mesh["dp"])

    def build() -> nn.Module:
        return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, HIDDEN))

    pair = Pair(build, shard, tolerance=CLOSE)
    targets = torch.arange(4)

    def loss_of(side: Side) -> float:
        with loss_parallel():
            logits = side.model(data(0, 0, 4, WIDTH))
            assert logits.placements == (Shard(1),)
            loss = nn.functional.cross_entropy(logits, targets)
            loss.backward()
        return loss.full_tensor().detach()

    loss = pair.both(loss_of)
    plain = Plain(build)
    expected = nn.functional.cross_entropy(plain.model(data(0, 0, 4, WIDTH)), targets)
    compare_values(loss, expected.detach(), CLOSE, "loss")
    plain.backward([expected], 1)
    plain.check(pair.ours, CLOSE)


@on_ranks(4)
def test_tp7_meshes_without_a_common_root(rank: int, n_ranks: int) -> None:
    dp = cached_mesh((2, 2), ("outer", "unused"))["outer"]
    tp = cached_mesh((2, 2), ("other", "inner"))["inner"]

    def shard(model: nn.Module, fsdp: Any) -> None:
        parallelize(model, tp)
        fsdp.fully_shard(model, mesh=dp)

    pair = Pair(Mlps, shard, tolerance=CLOSE)
    pair.step(data(rank // 2, 0, 4, WIDTH))
    assert pair.both(layouts)["blocks.0.up.weight"][0] == ("outer", "inner")


@on_ranks(4)
def test_tp10_states_between_equal_layouts(rank: int, n_ranks: int) -> None:
    """Bitwise; AdamW and clipping equal the unsharded model's."""
    mesh = mesh_2d(2, 2)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, foreach=False)

    def shard(model: nn.Module, fsdp: Any) -> None:
        parallelize(model, mesh["tp"])
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        fsdp.fully_shard(model, mesh=mesh["dp"])

    pair = Pair(Mlps, shard, tolerance=CLOSE, optimizer=adamw)
    plain = Plain(Mlps)
    plain.optimizer = adamw(plain.model.parameters())
    for step in range(2):
        pair.forward(dp_data(mesh, step))
        pair.backward()
        norm = pair.both(lambda side: full(nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)))
        plain.backward([total(plain.model(data(r, step, 4, WIDTH))) for r in range(2)], 2)
        expected = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        compare_values(norm, expected, CLOSE, "norm")
        pair.do(lambda side: side.optimizer.step())
        plain.optimizer.step()
        plain.check(pair.ours, CLOSE)
        pair.do(lambda side: side.optimizer.zero_grad())
        plain.optimizer.zero_grad()

    def reload(side: Side) -> None:
        state = {name: value.detach().clone() for name, value in side.model.state_dict().items()}
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.zero_()
        side.model.load_state_dict(state)
        for name, value in side.model.state_dict().items():
            assert torch.equal(value.to_local(), state[name].to_local())

    pair.do(reload)
    pair.step(dp_data(mesh, 2))


@on_ranks(4)
def test_tp10_full_state_dict(rank: int, n_ranks: int) -> None:
    """Gathered from a 2-D layout and loaded into it again, with rows that divide."""
    mesh = mesh_2d(2, 2)
    pair = Pair(Mlps, shard_2d(mesh))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def save(side: Side) -> Any:
        return dict(
            get_model_state_dict(side.model, options=StateDictOptions(full_state_dict=True))
        )

    saved = pair.both(save)
    torch.manual_seed(1)
    for name, value in Mlps().state_dict().items():
        assert torch.equal(saved[name], value)

    def load(side: Side) -> None:
        state = {name: value + 1 for name, value in saved.items()} if rank == 0 else {}
        set_model_state_dict(side.model, state, options=options)

    pair.do(load)
    pair.recapture()
    assert torch.equal(pair.both(save)["head.bias"], saved["head.bias"] + 1)
    pair.step(dp_data(mesh))


@pytest.mark.parametrize("hidden", [9, 10])
@on_ranks(4)
def test_tp11_a_whole_state_dict_into_uneven_rows(rank: int, n_ranks: int, hidden: int) -> None:
    """Where torch.distributed.checkpoint fails, load_full computes the rows."""
    torch.manual_seed(3)
    state = {name: value + 1 for name, value in Mlps(hidden=hidden).state_dict().items()}
    model = Mlps(hidden=hidden)
    shard_2d(mesh_2d(2, 2))(model, fsdp_c)
    with pytest.raises(AssertionError):
        set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    fsdp_c.load_full(model, state)
    for name, param in model.named_parameters():
        assert torch.equal(full(param), state[name]), name


@on_ranks(2)
def test_tp13_no_collective_for_one_shard(rank: int, n_ranks: int) -> None:
    mesh = mesh_2d(1, 2)
    pair = Pair(Mlps, shard_2d(mesh))

    def issued(side: Side) -> list[str]:
        with collectives() as seen:
            total(side.model(dp_data(mesh))).backward()
        return names(seen)

    assert pair.both(issued) == []


@on_ranks(4)
def test_r3_tp9_int_reshard_is_refused_in_the_first_forward(rank: int, n_ranks: int) -> None:
    """With the parameter's name, and before anything is gathered; True is taken then."""
    mesh = mesh_2d(4, 1)
    torch.manual_seed(1)
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp_c.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"'up.weight' is a DTensor.*pass True"):
            model(data(rank))
        assert all(p.device_mesh.ndim == 2 for p in model.parameters())
    model.set_reshard_after_forward(True)
    total(model(data(rank))).backward()
    torch.manual_seed(1)
    plain = Mlp()
    for r in range(n_ranks):
        (total(plain(data(r))) / n_ranks).backward()
    for name, parameter in plain.named_parameters():
        compare_values(full(model.get_parameter(name).grad), parameter.grad, CLOSE, name)


WRITES: dict[str, Any] = {
    "the DTensor": lambda weight: weight.detach().mul_(2.0),
    "its local tensor": lambda weight: weight.to_local().detach().mul_(2.0),
    "data": lambda weight: weight.data.mul_(2.0),
    "data of its local tensor": lambda weight: weight._local_tensor.data.mul_(2.0),
}


@pytest.mark.parametrize("how", WRITES)
@on_ranks(2)
def test_tp1_writes_in_forward_are_gone_in_backward(rank: int, n_ranks: int, how: str) -> None:
    """They last until the unit is resharded, and only where they were made."""
    mesh = mesh_2d(2, 1)
    pair = Pair(Mlps, shard_2d(mesh))

    def write(module: nn.Module, args: Any) -> None:
        if rank == 0:
            WRITES[how](module.up.weight)

    pair.step(dp_data(mesh, 0))
    assert all(row.road.startswith("core") for row in fsdp_c.explain(pair.ours.model).units)
    pair.do(lambda side: side.model.blocks[0].register_forward_pre_hook(write))
    for step in range(1, 4):
        pair.step(dp_data(mesh, step))
