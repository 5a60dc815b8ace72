"""Bytes that the core counts: those of theory, for every strategy, dtype and way of reducing."""

import pytest
import torch
from harness import cached_mesh, run_ranks
from models import Net, data, shard_blocks
from parity import on_ranks
from torch import nn

import fsdp_c
from fsdp_c import STRATEGIES, Traffic

WIDTH = 8


def make() -> nn.Sequential:
    """All parameters in units of sizes that 2 and 4 divide; the root has none."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


N_PARAMS = 3 * (WIDTH * WIDTH + WIDTH)


def step(model: nn.Module, rank: int, width: int = WIDTH) -> Traffic:
    """What a training step moves."""
    before = fsdp_c.stats(model).traffic_total
    model(data(rank, 0, 4, width)).float().square().sum().backward()
    return fsdp_c.stats(model).traffic_total - before


@on_ranks(1, 2, 4)
def test_strategies_move_what_theory_says(rank: int, n_ranks: int) -> None:
    for name, strategy in STRATEGIES.items():
        if strategy.is_hybrid and n_ranks == 1:
            continue
        n_shards = {"ddp": 1}.get(name, min(n_ranks, 2) if strategy.is_hybrid else n_ranks)
        mesh = (n_ranks // n_shards, n_shards) if strategy.is_hybrid else None
        for precision, gathered, reduced in (("fp32", 4, 4), ("bf16", 2, 4)):
            model = fsdp_c.shard(make(), name, mesh=mesh, precision=precision)
            replicas = n_ranks // n_shards
            for _ in range(2):
                moved = step(model, rank)
                over_shards = N_PARAMS * (n_shards - 1) // n_shards
                assert moved.gathered == strategy.gathers * gathered * over_shards, name
                assert moved.reduced == reduced * over_shards
                part = N_PARAMS // n_shards * reduced
                assert moved.all_reduced == 2 * (replicas - 1) * part // replicas
                if precision == "fp32":
                    theory = strategy.volume(n_shards, replicas) * N_PARAMS * 4
                    assert moved.payload == theory
            units = fsdp_c.stats(model).traffic
            assert [unit.unit for unit in units] == ["0", "1", "2"]
            assert {unit.gathers for unit in units} == {2 * strategy.gathers * (n_shards > 1)}
            assert {unit.reductions for unit in units} == {2 * (n_shards > 1)}
            assert {unit.all_reductions for unit in units} == {2 * (replicas > 1)}


@on_ranks(2, 3)
def test_uneven_and_partly_unused(rank: int, n_ranks: int) -> None:
    """Without padding: ranks together receive n-1 times the model; unused units send nothing."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)), reshard_after_forward=False)
    moved = step(model, rank, 6)
    sums = torch.tensor([moved.gathered, moved.reduced])
    torch.distributed.all_reduce(sums)
    assert sums.tolist() == [4 * (n_ranks - 1) * total, 4 * (n_ranks - 1) * trained]
    text = str(fsdp_c.stats(model))
    assert "4 all-gathers" in text and "3 reduce-scatters" in text and "0 all-reduces" in text


@on_ranks(2)
def test_what_is_really_copied(rank: int, n_ranks: int) -> None:
    """No byte of an all-gather without a cast; with one, a rank's own chunk."""
    whole, half = 4 * N_PARAMS, 2 * N_PARAMS
    model = fsdp_c.shard(make(), "zero3")
    moved = step(model, rank)
    assert moved.gathered == 2 * whole // 2 and moved.copied <= whole
    with torch.no_grad():
        before = fsdp_c.stats(model).traffic_total
        model(data(rank, 0, 4, WIDTH))
    evaluated = fsdp_c.stats(model).traffic_total - before
    assert evaluated.gathered == whole // 2 and evaluated.copied == 0
    model = fsdp_c.shard(make(), "zero3", precision="bf16")
    with torch.no_grad():
        model(data(rank, 0, 4, WIDTH))
    evaluated = fsdp_c.stats(model).traffic_total
    assert evaluated.gathered == half // 2 and evaluated.copied == half // 2
    model = fsdp_c.shard(make(), "ddp")
    moved = step(model, rank)
    assert moved.payload == moved.copied == whole, "each gradient is written once, for the replicas"


@on_ranks(2)
def test_counts_outlive_a_rebuild_and_cover_waiting_gradients(rank: int, n_ranks: int) -> None:
    model = fsdp_c.shard(make(), "zero2")
    first = step(model, rank)
    model.to(torch.float64)
    model(data(rank, 0, 4, WIDTH, dtype=torch.float64)).sum().backward()
    assert fsdp_c.stats(model).traffic_total.gathered == 3 * first.gathered
    for name, n_waiting in (("zero1", 0), ("zero2", 1)):
        model = fsdp_c.shard(make(), name)
        with fsdp_c.no_sync(model):
            assert step(model, rank).reductions == 3 * n_waiting
        assert step(model, rank).reductions == 3


class Halves(nn.Module):
    """Two weights of a unit, of 28 and of 20 bytes; a step uses those it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(7))
        self.b = nn.Parameter(torch.ones(5))

    def forward(self, used: str) -> torch.Tensor:
        return torch.stack([getattr(self, name).sum() for name in used]).sum()


@on_ranks(3)
def test_all_reductions_that_differ(rank: int, n_ranks: int) -> None:
    """Each is rounded on its own: of 48 bytes, then of 28."""
    model = fsdp_c.fully_shard(Halves(), mesh=cached_mesh((3, 1), ("replicate", "shard")))
    for used in ("ab", "a"):
        model(used).backward()
    moved = fsdp_c.stats(model).traffic_total
    assert moved.all_reductions == 2
    assert moved.all_reduced == 4 * 48 // 3 + 4 * 28 // 3


def over_messages(rank: int, n_ranks: int) -> list[int]:
    moved = [step(fsdp_c.shard(make(), name), rank).payload for name in ("ddp", "zero3")]
    assert {tree.transports for tree in fsdp_c.status().trees} == {("callback",)}
    return moved


def test_payload_is_that_of_any_transport() -> None:
    model = N_PARAMS * 4
    wanted = [STRATEGIES["ddp"].volume(1, 2) * model, STRATEGIES["zero3"].volume(2) * model]
    answers = run_ranks(over_messages, 2, env={"FSDP_C_TRANSPORT": "callback"})
    assert answers == [wanted] * 2


def test_of_an_unsharded_model() -> None:
    assert fsdp_c.stats(nn.Linear(2, 2)).traffic_total == Traffic("all")
    with pytest.raises(AttributeError):
        Traffic("all").gathers = 1  # type: ignore[misc]
