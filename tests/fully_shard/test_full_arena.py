"""Gradients of a backward that do not fit into the memory by which ranks of one host pass them."""

import time

import torch
import torch.distributed as dist
from parity import Pair, Side, on_ranks
from torch import Tensor, nn

N_BLOCKS = 6


class Wide(nn.Module):
    """Blocks of 2 MiB; each one's gradient is summed over the ranks as it passes, if `sums`."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)) for _ in range(N_BLOCKS)
        )
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.sums and x.requires_grad:
                x.register_hook(summed)
        return x


def summed(grad: Tensor) -> Tensor:
    total = grad / dist.get_world_size()
    dist.all_reduce(total)
    return total


def shard(model: Wide, fsdp: object) -> None:
    for block in model.blocks:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)


def inputs(rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * rank + step)
    return torch.randn(4, 64)


@on_ranks(2, 4)
def test_a_rank_is_far_behind(rank: int, n_ranks: int) -> None:
    """The others go on, though it reads nothing of theirs."""
    pair = Pair(lambda: Wide(False), shard)

    def sleep(side: Side) -> None:
        if rank == n_ranks - 1:
            side.model.blocks[-1].register_full_backward_pre_hook(lambda *_: time.sleep(0.7))

    pair.both(sleep)
    for step in range(2):
        pair.step(inputs(rank, step))


@on_ranks(4)
def test_collectives_in_backward(rank: int, n_ranks: int) -> None:
    """Of tensor parallel layers and the like: who waits for room would wait for who waits there."""
    pair = Pair(lambda: Wide(True), shard)

    def sleep(side: Side) -> None:
        for place, block in enumerate(side.model.blocks):
            seconds = (rank * 7 + place * 5) % 4 * 0.01
            block.register_full_backward_pre_hook(lambda *_, s=seconds: time.sleep(s))

    pair.both(sleep)
    for step in range(4):
        pair.step(inputs(rank, step))
