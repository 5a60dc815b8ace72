"""Waits for other ranks: under the unit and the kind where they happened, and for whom."""

import time

import torch
from harness import cached_mesh
from models import WIDTH, Net, data, shard_blocks
from parity import on_ranks
from torch import Tensor, nn

import fsdp_c

SLEEP = 0.08
SEEN = SLEEP / 4  # of it, at least: a rank may come to its wait late itself


class Slow(nn.Module):
    """Sleeps in forward, or in backward, on the rank that is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.sleeps_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps_in == "forward":
            time.sleep(SLEEP)
        y = self.inner(x)
        if self.sleeps_in == "backward":
            y.register_hook(lambda _: time.sleep(SLEEP))
        return y


def make_model(n_ranks: int) -> Net:
    torch.manual_seed(0)
    model = Net(n_blocks=2)
    model.blocks[0] = Slow(model.blocks[0])
    shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)))
    return model


def step(model: Net, rank: int) -> None:
    model(data(rank, 0)).square().sum().backward()


def seconds_of(waits: fsdp_c.WaitStats, kind: str) -> float:
    return sum(wait.seconds for wait in waits.waits if wait.kind == kind)


@on_ranks(2, 3)
def test_waits_are_charged_to_who_makes_others_wait(rank: int, n_ranks: int) -> None:
    model = make_model(n_ranks)
    slow = n_ranks - 1
    step(model, rank)
    fsdp_c.stats(model, reset=True)
    assert fsdp_c.stats(model).waits == fsdp_c.WaitStats()

    # Late at the first read of a forward, which is the root's.
    time.sleep(SLEEP if rank == slow else 0)
    step(model, rank)
    waits = fsdp_c.stats(model, reset=True).waits
    assert (waits.forwards, waits.backwards) == (1, 1)
    if rank != slow:
        late = [wait for wait in waits.waits if wait.kind == "forward gather"]
        assert [wait.unit for wait in late] == ["(root)"]
        assert late[0].longest >= SEEN and late[0].longest_rank == slow
        assert waits.by_rank[slow] >= late[0].longest
        assert seconds_of(waits, "forward gather") == late[0].seconds
        assert "forward gather" in str(waits) and f"for rank {slow}" in str(waits)

    # Late at the end of forward.
    model.blocks[0].sleeps_in = "forward" if rank == slow else ""
    step(model, rank)
    waits = fsdp_c.stats(model, reset=True).waits
    if rank != slow:
        assert seconds_of(waits, "end of forward") >= SEEN
        assert max(waits.by_rank, key=waits.by_rank.__getitem__) == slow

    # Late in backward: of the first block, whose gradients come last.
    model.blocks[0].sleeps_in = "backward" if rank == slow else ""
    step(model, rank)
    step(model, rank)
    waits = fsdp_c.stats(model, reset=True).waits
    assert (waits.forwards, waits.backwards) == (2, 2)
    if rank != slow:
        late = [wait for wait in waits.waits if wait.kind == "reduction"]
        assert late[0].unit in ("blocks.0", "(root)") and late[0].longest_rank == slow
        assert sum(wait.seconds for wait in late) >= 2 * SEEN
        assert waits.seconds_per_step == waits.seconds / 2


@on_ranks(4)
def test_waits_between_replicas(rank: int, n_ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    for layer in model:
        fsdp_c.fully_shard(layer, mesh=mesh)
    fsdp_c.fully_shard(model, mesh=mesh)
    model(torch.ones(1, WIDTH)).sum().backward()
    fsdp_c.stats(model, reset=True)
    y = model(torch.ones(1, WIDTH)).sum()
    y.register_hook(lambda _: time.sleep(SLEEP if rank >= 2 else 0))
    y.backward()
    waits = fsdp_c.stats(model, reset=True).waits
    if rank < 2:  # its replica comes late
        kinds = ("reduction of replicas", "end of backward of replicas")
        assert sum(seconds_of(waits, kind) for kind in kinds) >= SEEN
        assert waits.by_rank[rank + 2] >= SEEN


@on_ranks(1)
def test_one_rank_waits_for_nobody(rank: int, n_ranks: int) -> None:
    model = make_model(n_ranks)
    step(model, rank)
    waits = fsdp_c.stats(model).waits
    assert (waits.waits, waits.by_rank, waits.forwards) == ((), {}, 1)
