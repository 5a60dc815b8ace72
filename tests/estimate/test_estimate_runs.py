"""Estimates beside runs: what `stats` counts of memory and collectives is what was estimated."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, Block, Net, data
from parity import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_c
from fsdp_c._estimate import HARDWARE, _volume
from fsdp_c.strategy import find_units

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MESHES = {1: None, 2: None, 3: None, 4: (2, 2)}


def hardware(n_ranks: int) -> fsdp_c.Hardware:
    return replace(HARDWARE["a100"], engine="core", per_host=n_ranks, cores=2)


def net() -> Net:
    torch.manual_seed(0)
    model = Net(n_blocks=5, hidden=50)
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def trained(
    model: nn.Module, rank: int, n_steps: int = 2, micro_batches: int = 1, inputs: Any = None
) -> Any:
    """The optimizer, and what collectives moved in the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before: Any = None
    for step in range(n_steps):
        before = fsdp_c.stats(model).traffic_total
        optimizer.zero_grad()
        for _ in range(micro_batches):
            x = data(rank, step) if inputs is None else inputs
            model(x).float().square().sum().backward()
        optimizer.step()
    return optimizer, fsdp_c.stats(model).traffic_total - before


def counted(traffic: Any) -> dict[str, tuple[int, int]]:
    found = {
        "all-gather": (traffic.gathers, traffic.gathered),
        "reduce-scatter": (traffic.reductions, traffic.reduced),
        "all-reduce": (traffic.all_reductions, traffic.all_reduced),
    }
    return {kind: numbers for kind, numbers in found.items() if numbers[1]}


@on_ranks(1, 2, 3, 4)
def test_runs_hold_and_move_what_was_estimated(rank: int, n_ranks: int) -> None:
    plain = MixedPrecisionPolicy()
    cases: list[tuple[Any, ...]] = [("zero3", plain, 1), ("zero3", BF16, 2), ("zero2", BF16, 1)]
    if n_ranks == 2:
        cases += [("ddp", plain, 1), ("ddp", BF16, 1)]
        cases += [("zero3", plain, 1, {"units": nn.Linear, "checkpoint": Block})]
    if n_ranks == 3:  # no whole number of bytes per rank and step
        cases += [("ddp", plain, 1, {"units": nn.Linear})]
    if n_ranks == 4:
        cases = [("hybrid", plain, 1), ("hybrid_zero2", BF16, 1)]
    for strategy, policy, micro_batches, *more in cases:
        options = more[0] if more else {}
        fsdp_c.release_buffers(nn.Linear(1, 1))  # free slots of other models
        with torch.device("meta"):
            unsharded = net()
        found = fsdp_c.estimate(
            unsharded,
            world_size=n_ranks,
            strategy=strategy,
            hardware=hardware(n_ranks),
            inputs=torch.zeros(4, WIDTH),
            precision=policy,
            shards=2 if n_ranks == 4 else None,
            micro_batches=micro_batches,
            **options,
        )
        model = net()
        fsdp_c.shard(model, strategy, mesh=MESHES[n_ranks], precision=policy, **options)
        optimizer, moved = trained(model, rank, micro_batches=micro_batches)
        setting = found.setting
        modules = find_units(unsharded, setting.units)
        units = _volume.units_of(unsharded, modules, policy, setting.n_shards)
        traffic = _volume.traffic_of(
            units,
            "core",
            setting.strategy,
            setting.n_shards,
            setting.n_replicas,
            micro_batches,
            rank % setting.n_shards,
        )
        expected = {one.kind: (one.count, one.received) for one in traffic}
        assert counted(moved) == expected, (strategy, options)
        if rank == 0:
            assert traffic == found.traffic
        held = fsdp_c.stats(model, optimizer).rank
        for name, n_bytes in held.items():
            if name in ("gradients", "optimizer", "parameters"):
                # The last ranks hold less of uneven parameters; states are not padded.
                slack = 4096 * found.n_units  # gradients of a unit begin a page
                assert 0.4 * found.memory[name] - slack <= n_bytes <= found.memory[name], name
            else:
                assert n_bytes == found.memory[name], (strategy, name, n_bytes, found.memory[name])


class Uneven(nn.Module):
    """A frozen beginning, blocks that run twice (one on inputs that want no gradient) or never,
    half of one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(64, 64).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(64, 64) for _ in range(6))
        self.entry, self.twice, self.never = Block(64, 64), Block(64, 64), Block(64, 64)
        self.part = nn.ModuleDict({"used": nn.Linear(64, 2), "not": nn.Linear(64, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.entry(x) + self.entry(-x)
        for block in self.blocks:
            x = block(x)
        return self.part["used"](self.twice(self.twice(x)))


@on_ranks(2)
def test_units_count_as_often_as_they_run(rank: int, n_ranks: int) -> None:
    x = torch.randn(4, 64)
    for strategy, units in (("zero3", Block), ("zero2", [Block, nn.Linear]), ("ddp", Block)):
        with torch.device("meta"):
            found = fsdp_c.estimate(
                Uneven(),
                world_size=n_ranks,
                strategy=strategy,
                hardware=hardware(n_ranks),
                inputs=x,
                precision="fp32",
                units=units,
            )
        assert "No gradient reaches never.down.bias" in str(found) and "5 more" in str(found)
        model = fsdp_c.shard(Uneven(), strategy, units=units)
        optimizer, moved = trained(model, rank, inputs=x)
        expected = {one.kind: (one.count, one.received) for one in found.traffic}
        assert counted(moved) == expected, strategy
        held = fsdp_c.stats(model, optimizer).rank
        for name, n_bytes in held.items():
            # Gradients of a unit are planned in whole pages.
            slack = 4096 * found.n_units if name == "gradients" else 0
            assert 0 <= found.memory[name] - n_bytes <= slack, (strategy, name)


def most_allocated(step: Any) -> int:
    """Bytes of tensors that torch's allocator had handed out at most."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(n for _, n in sorted(changes, key=lambda one: one[0])))


@on_ranks(1, 2)
def test_a_step_takes_what_was_estimated(rank: int, n_ranks: int) -> None:
    x = torch.randn(256, 64)
    for options in ({}, {"checkpoint": True}, {"precision": "bf16"}, {"strategy": "zero2"}):
        given = {"precision": "fp32", "units": Block} | options
        with torch.device("meta"):
            found = fsdp_c.estimate(
                Uneven(), world_size=n_ranks, hardware=hardware(n_ranks), inputs=x, **given
            )
        model = fsdp_c.shard(Uneven(), **given)

        def step(model: nn.Module = model) -> None:
            model(x).float().square().mean().backward()

        step()
        model.zero_grad()
        estimated = found.memory["activations"] + found.memory["in backward"]
        allocated = most_allocated(step)
        if "checkpoint" in options:  # each keeps the number generator's state, which is not traced
            allocated -= 11 * torch.get_rng_state().nbytes  # seven blocks run once, two twice
        # Where a peer is late, a unit's gradients stay while the next one's are made.
        late = 16384 * 3 if n_ranks > 1 else 0
        scratch = 0.05 if "precision" in options else 0.01  # of products in bf16, as they are small
        excess = estimated - allocated
        assert -scratch * allocated <= excess <= 0.01 * allocated + late, (options, allocated)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 48, num_layers=3)
        self.head = nn.Linear(48, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0])


class Images(nn.Module):
    """Channels that are no multiple of the library's blocks; up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 40, 3, padding=1)])
        self.up = nn.ConvTranspose2d(40, 24, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.down:
            x = nn.functional.max_pool2d(layer(x).relu(), 2)
        return self.up(x)


def test_libraries_of_the_cpu_hold_what_was_estimated() -> None:
    """By a step outside of ranks; of more time steps than the LSTM's library is tried with."""
    for build, x in ((Recurrent, torch.randn(50, 8, 64)), (Images, torch.randn(4, 3, 32, 32))):
        found = fsdp_c.estimate(
            build(), world_size=1, hardware=hardware(1), inputs=x, precision="fp32"
        )
        model = build()

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).square().mean().backward()

        step()
        model.zero_grad()
        allocated = most_allocated(step)
        estimated = found.memory["activations"] + found.memory["in backward"]
        assert abs(estimated - allocated) < 0.01 * allocated, (build, estimated, allocated)
        if build is Recurrent:
            products = 4 * 48 * (64 + 48) + 2 * 4 * 48 * (48 + 48) + 48 * 2000  # of one input
            assert found.model_flops == 3 * 2 * 50 * 8 * products


def test_activations_are_what_autograd_saves() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    x = torch.randn(32, 64)
    saved: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()} | {x.untyped_storage()._cdata}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    expected = (
        sum(n for key, n in saved.items() if key not in own) + loss.untyped_storage().nbytes()
    )
    found = fsdp_c.estimate(
        model, world_size=1, inputs=x, loss=torch.Tensor.sum, precision="fp32", units=None
    )
    assert found.memory["activations"] == expected


BENCH = """
import bench_estimate as bench
rates = {"flops": {"float32": 5e10}, "bandwidth": 1e10, "per_op": 5e-6}
rows = []
for name in ("mlp", "convolutions"):
    for ranks in (2, 4):
        row = {"model": name, "ranks": ranks, "scale": 1, "rates": rates}
        estimate = bench.estimated(name, ranks, 1)
        seconds = 3 * bench.step_seconds(row, row)
        one = {"held": bench.held(estimate), "peak_mib": estimate.total / bench.MIB}
        one["lent"] = estimate.memory["activations"] + estimate.memory["in backward"]
        one["traffic"] = {each.kind: each.received for each in estimate.traffic}
        one |= {"messages": sum(e.count for e in estimate.traffic), "seconds": seconds}
        rows.append(row | {"by_rank": [one] * ranks})
bench.check(rows)
memory, times = bench.tables(None, rows)
assert all(row[6] == row[8] == "1.000" and row[10] == "equal" for row in memory.rows), memory
assert all(row[4] == "0.33" for row in times.rows), times
assert [row[6] for row in times.rows] == ["-", "1.00"] * 2, times
rows[0]["by_rank"][0]["traffic"]["all-gather"] += 1
try:
    bench.check(rows)
except AssertionError as error:
    assert "mlp on 2 ranks: collectives brought" in str(error)
else:
    raise SystemExit("not refused")
rows[0]["by_rank"][0]["lent"] *= 2
try:
    bench.check(rows)
except AssertionError as error:
    assert "mlp on 2 ranks: estimated memory is 0." in str(error)
else:
    raise SystemExit("not refused")
"""


@pytest.mark.usefixtures("quick_scripts")
def test_the_benchmark_recovers_what_made_its_rows() -> None:
    """Rows of the model itself, on a machine three times as slow; wrong bytes are refused."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", BENCH], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
