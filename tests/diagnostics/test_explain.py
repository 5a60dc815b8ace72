"""explain: the table of units and its warnings."""

import re
import warnings
from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Branches, Net, data, shard_blocks
from parity import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import Shard

import fsdp_c
from fsdp_c._fully_shard import _visibility


@on_ranks(2)
def test_table(rank: int, n_ranks: int) -> None:
    model = fsdp_c.shard(Net(n_blocks=2), "zero2", precision="bf16")
    assert {row.road for row in fsdp_c.explain(model).units} == {"core, from the first forward on"}
    model(data(rank)).sum().backward()
    columns = [re.split("  +", line) for line in str(fsdp_c.explain(model)).splitlines()]
    kept = "kept for backward (reshard_after_forward=False)"
    words = ["(Shard(dim=0),)", kept, "float32 -> bfloat16 (inputs too), reduced in float32"]
    words += [f"mean of {n_ranks} ranks", "core over shared memory", "sharded"]
    here = [f"{row.local_bytes} B" for row in fsdp_c.explain(model).units]
    assert columns[:-2] == [
        ["strategy zero2: " + fsdp_c.STRATEGIES["zero2"].summary],
        [
            *["unit", "params", "size", "of it here", "placements", "reshard", "dtypes"],
            *["gradients", "road", "state"],
        ],
        ["blocks.0", "109", "436 B", here[0], *words],
        ["blocks.1", "109", "436 B", here[1], *words],
        ["(root)", "45", "180 B", here[2], *words],
    ]
    calls = [line[0] for line in columns[-2:]]
    policy = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
    assert [call.split(policy)[0] for call in calls] == [
        "= fully_shard(unit, mesh=(2,), reshard_after_forward=False, ",
        "= fully_shard(model, mesh=(2,), reshard_after_forward=False, ",
    ]
    rows = fsdp_c.explain(model).units
    assert sum(row.params for row in rows) == sum(p.numel() for p in Net(n_blocks=2).parameters())
    assert rows[0].bytes == 4 * rows[0].params
    local = sum(p.to_local().numel() for p in model.parameters())
    assert sum(row.local_bytes for row in rows) == 4 * local
    with pytest.raises(ValueError, match="Net has no units to explain: call fully_shard"):
        fsdp_c.explain(Net())
    with pytest.raises(TypeError, match="explain expects a module, not SGD"):
        fsdp_c.explain(torch.optim.SGD(model.parameters()))


@on_ranks(4)
def test_rules_and_implementations(rank: int, n_ranks: int) -> None:
    """When a unit is given up, and why; what takes a model to torch's implementation."""
    mesh = cached_mesh((n_ranks,))
    model = Net(n_blocks=3)
    fsdp_c.fully_shard(model.blocks[0], mesh=mesh)
    fsdp_c.fully_shard(model.blocks[1], mesh=mesh, reshard_after_forward=2)
    fsdp_c.fully_shard(
        model.blocks[2],
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=lambda p: Shard(0),
    )
    model.stem.requires_grad_(False)
    fsdp_c.fully_shard(model.stem, mesh=mesh)
    fsdp_c.fully_shard(model, mesh=mesh)
    for block, factor in zip(model.blocks, (1, 4, 3), strict=True):
        block.set_gradient_divide_factor(factor)
    before = fsdp_c.explain(model)
    assert before.choice is None
    assert [row.gradients for row in before.units] == [
        *("sum of 4 ranks", "mean of 4 ranks", "sum of 4 ranks / 3", "none, frozen"),
        "mean of 4 ranks",
    ]
    assert [row.reshard for row in before.units[:3]] == [
        "after forward (the default)",
        "after forward to groups of 2 (reshard_after_forward=2)",
        "after forward (reshard_after_forward=True)",
    ]
    model(data(rank))
    after = {row.unit: row for row in fsdp_c.explain(model).units}
    assert after["(root)"].reshard == "kept for backward (the root, backward begins with it)"
    assert all(row.road.startswith("core") for row in after.values())
    assert after["(root)"].state == "unsharded" and after["blocks.0"].state == "sharded"
    assert after["blocks.1"].state == "sharded over 2 ranks"
    model = torch.distributed.fsdp.fully_shard(Net(), mesh=mesh)
    assert fsdp_c.explain(model).units[0].road == "torch: torch's fully_shard made it"
    model = fsdp_c.shard(Net(), "hybrid", mesh=(2, 2))
    assert fsdp_c.explain(model).units[0].placements == "(Replicate(), Shard(dim=0))"


@pytest.mark.parametrize(
    ("all_gather", "memory"),
    [
        ("ProcessGroupAllocAllGather", "memory of the process group"),
        ("SymmMemAllGather", "symmetric memory"),
    ],
)
@on_ranks(2)
def test_memory_of_collectives(rank: int, n_ranks: int, all_gather: str, memory: str) -> None:
    """The class is what torch's setters choose, on a GPU or not."""
    if not hasattr(_fsdp_collectives, all_gather):
        pytest.skip("this torch has no such memory")
    model = Net(n_blocks=1)
    shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)))
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    chosen = getattr(_fsdp_collectives, all_gather)
    group._all_gather_comm = chosen.__new__(chosen)
    assert _visibility.why_visible(group) == f"its collectives use {memory}"


def advice(model: nn.Module) -> str:
    return "\n".join(fsdp_c.explain(model).advice)


@on_ranks(2)
def test_warnings(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    model = Branches()
    shard_blocks(model, fsdp_c, mesh=mesh)
    assert advice(model) == "", "nothing has run yet"
    model(data(rank), use=(0, 2))
    assert "no forward has used unit blocks.1:" in advice(model)
    model(data(rank))
    assert advice(model) == ""
    replicas = fsdp_c.shard(Branches(), "ddp")
    replicas(data(rank), use=(0, 2))
    assert "no forward has used unit blocks.1:" in advice(replicas)

    def huge() -> nn.Module:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(3)]
        return nn.Sequential(nn.Sequential(*layers), nn.Linear(512, 8))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model = fsdp_c.shard(huge(), units=lambda m: isinstance(m, nn.Sequential))
    told = [str(w.message) for w in seen if "fsdp_c.shard" in str(w.message)]
    assert len(told) == (rank == 0), "once, on rank 0"
    assert "unit '0' holds 99% of the model" in advice(model)
    assert advice(fsdp_c.shard(huge(), units=nn.Linear)) == ""
    big = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    assert advice(fsdp_c.shard(big, units=None)) == "", "most of it is one layer"


@on_ranks(2)
def test_parameters_that_no_unit_holds(rank: int, n_ranks: int) -> None:
    """Names, bytes and the cure: where only blocks are sharded, and of ignored ones."""
    mesh = cached_mesh((n_ranks,))
    model = Net(n_blocks=2)
    for block in model.blocks:
        fsdp_c.fully_shard(block, mesh=mesh)
    names = [n for n, _ in model.named_parameters() if not n.startswith("blocks.")]
    size = sum(p.numel() * 4 for n, p in model.named_parameters() if n in names)
    told = advice(model)
    for when in ("before", "in a gathered state"):
        assert told == advice(model), when
        assert told.startswith(f"parameters '{names[0]}', '{names[1]}'"), told
        assert f"({size} B on each rank): held by no FSDP unit: each rank trains a copy" in told
        assert told.endswith("call fully_shard on the whole Net too, after its blocks")
        for block in model.blocks:
            block.unshard()
    assert advice(model.blocks[0]) == "", "its own are held"
    for block in model.blocks:
        block.reshard()
    fsdp_c.fully_shard(model, mesh=mesh)
    assert advice(model) == ""
    model(data(rank)).sum().backward()
    assert advice(model) == "" and advice(model.blocks) == ""

    model = Net(n_blocks=2)
    frozen = model.blocks[0].up.weight.requires_grad_(False)
    fsdp_c.fully_shard(model, mesh=mesh, ignored_params={frozen})
    assert advice(model) == (
        f"parameter 'blocks.0.up.weight' ({frozen.numel() * 4} B on each rank): frozen and held by"
        " no FSDP unit: each rank keeps them whole. Unless that is meant, take them out of"
        " ignored_params, or add them before fully_shard"
    )


@on_ranks(1)
def test_alone_nothing_drifts(rank: int, n_ranks: int) -> None:
    model = Net(n_blocks=2)
    fsdp_c.fully_shard(model.blocks[0], mesh=cached_mesh((1,)))
    assert advice(model) == ""


@on_ranks(4)
def test_swapped_mesh(rank: int, n_ranks: int) -> None:
    ranks = torch.arange(4).view(2, 2)
    right = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    for mesh, is_wrong in [
        (right, False),
        (DeviceMesh("cpu", ranks.t(), mesh_dim_names=("a", "b")), True),
        (DeviceMesh("cpu", ranks, mesh_dim_names=("shard", "replicate")), True),
    ]:
        model = Net()
        shard_blocks(model, fsdp_c, mesh=mesh)
        assert ("looks swapped" in advice(model)) is is_wrong


def test_thousands_of_tiny_units() -> None:
    """From sizes alone: so many modules would take seconds to shard."""
    from fsdp_c.strategy import _advice

    def told(n_units: int, n_bytes: int) -> Any:
        return _advice.on_sizes([_advice.Size(str(i), n_bytes, True) for i in range(n_units)])

    assert "2000 units of 4.00 KiB" in told(2000, 4096)[0]
    assert told(2000, 1 << 20) == told(20, 4096) == []
