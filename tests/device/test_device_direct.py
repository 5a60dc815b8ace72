"""Units on a device that a group of all-gathers brings straight into their parameters."""

import pytest
import torch
from models import Block
from nccl_stand_in import built, chosen
from parity import Pair, Side, Tolerance, on_ranks
from test_device_nccl import BLOCKS, OVER_NCCL, STAGED, implementations
from test_device_schedule import is_on_device, shard_blocks
from torch.distributed.tensor import DTensor

import fsdp_c

DIRECT = f"{OVER_NCCL}, gathered in place"


@pytest.fixture
def path() -> str:
    return built()


EVEN = 48  # by 2 and by 3, in parts of 16 bytes of either type


class Even(torch.nn.Module):
    """Two blocks whose rows are even, one of them in part frozen, and one with odd rows; the root
    has a weight that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(EVEN, hidden) for hidden in (EVEN, EVEN, EVEN + 1))
        self.blocks[1].up.requires_grad_(False)
        self.stem = torch.nn.Linear(EVEN, EVEN)
        self.head = torch.nn.Linear(EVEN, EVEN, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, EVEN, generator=generator)


def gathers_of(n_visits: dict[str, int]) -> tuple[int, int]:
    """All-gathers, and groups of them, in so many gathers of the root and of a block."""
    calls = 2 * n_visits["root"] + (6 + 6 + 1) * n_visits["block"]
    return calls, n_visits["root"] + 2 * n_visits["block"]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_direct_gathers(
    rank: int, n_ranks: int, path: str, dtype: torch.dtype, reshard: bool
) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy()
    if dtype is not torch.float32:
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(dtype, torch.float32)
    shard = shard_blocks(mp_policy=policy, reshard_after_forward=reshard)
    with chosen(path) as control:
        pair = Pair(Even, shard, tolerance=Tolerance.of(n_ranks, dtype))
        for step in range(3):
            before = (control.n_collectives, control.n_groups)
            pair.step(inputs(rank, step))
            calls, groups = gathers_of({"root": 1 + reshard, "block": 1 + reshard})
            expected = (calls + BLOCKS + 1, groups)  # a reduction each
            assert (control.n_collectives - before[0], control.n_groups - before[1]) == expected
            pair.eval_forward(inputs(rank, 10 + step))
            pair.do(reshard_all, "reshard")
        assert is_on_device(pair)
        rows = {row.unit: row.road for row in fsdp_c.explain(pair.ours.model).units}
        assert rows.pop("blocks.2") == STAGED
        assert set(rows.values()) == {DIRECT}


def reshard_all(side: Side) -> None:
    for module in side.model.modules():
        if isinstance(module, side.fsdp.FSDPModule):
            module.reshard()


@on_ranks(2)
def test_direct_gathers_of_what_users_ask_for(rank: int, n_ranks: int, path: str) -> None:
    """unshard() and prefetches; gradients that add up; offloaded shards."""

    def prefetch(side: Side) -> None:
        first, second, _ = side.model.blocks
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])

    def unshard(side: Side) -> list[torch.Tensor]:
        handle = side.model.blocks[0].unshard(async_op=True)
        handle.wait()
        whole = [p.detach().clone() for p in side.model.blocks[0].parameters()]
        side.model.blocks[0].reshard()
        return whole

    offloaded = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    for options in ({}, {"offload_policy": offloaded}):
        with chosen(path):
            pair = Pair(Even, shard_blocks(**options))
            pair.step(inputs(rank))
            pair.do(prefetch)
            pair.both(unshard)
            for step in (1, 2):
                pair.forward(inputs(rank, step))
                pair.backward()
            pair.optimize()
            pair.both(unshard)
            pair.step(inputs(rank, 3))
            assert is_on_device(pair)
            assert implementations(pair.ours.model) == {STAGED, DIRECT}


@on_ranks(2)
def test_direct_units_that_stay_unsharded(rank: int, n_ranks: int, path: str) -> None:
    """After backward, until the next forward gathers what the optimizer has written."""

    def losses(is_resharded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Even()
        shard_blocks()(model, fsdp_c)
        model.set_reshard_after_backward(is_resharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        for step in range(3):
            loss = model(inputs(rank, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        assert implementations(model) == {STAGED, DIRECT}
        assert isinstance(model.stem.weight, DTensor) is is_resharded
        return seen

    with chosen(path):
        assert torch.equal(torch.stack(losses(True)), torch.stack(losses(False)))


@on_ranks(4, apart=True)
def test_direct_gathers_with_slices(rank: int, n_ranks: int, path: str) -> None:
    def step(side: Side) -> torch.Tensor:
        loss = side.model(inputs(rank)).square().mean()
        loss.backward()
        return loss.detach()

    with chosen(path):
        pair = Pair(Even, shard_blocks(reshard_after_forward=2))
        for _ in range(2):
            pair.both(step)
            pair.optimize()
        assert is_on_device(pair)
        assert implementations(pair.ours.model) == {STAGED, f"{DIRECT}, slices copied out"}
