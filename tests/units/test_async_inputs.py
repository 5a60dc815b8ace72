"""Inputs of units that a collective has not finished, where tensor parallelism leaves them so.

torch.compile loses the gradient of such an input. torch's fully_shard then goes on with zeros for
all that is behind it; here blocks that are compiled train as those that are not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh
from models import data
from parity import full, on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp_c

WIDTH = 8
Call = Callable[[nn.Module, Tensor], Tensor]
Grads = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[tuple[type, bool]] = []

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append((type(x), x.requires_grad))
        if y is not None:
            x = x * y
        if isinstance(x, DTensor):
            x = x.to_local()
        return x + torch.tanh(self.w(x))


class Net(nn.Module):
    """Between the embedding and the block, sequences are sharded."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.block, self.embedding(x))


CALLS: dict[str, Call] = {
    "args": lambda block, x: block(x),
    "kwargs": lambda block, x: block(x=x),
    "two inputs": lambda block, x: block(x, y=x),
    "another reader": lambda block, x: block(x) * x,
    "one of two needs no gradient": lambda block, x: block(x, y=torch.ones_like(x)),
    "no gradient": lambda block, x: block(x.detach()),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
}


def compile_block(net: Any) -> None:
    net.block.compile(backend="aot_eager")


def replace_block(net: Any) -> None:
    net.block = torch.compile(net.block, backend="aot_eager")


def leave(net: Any) -> None:
    pass


def trained(
    fsdp: Any, call: str, before: Any = leave, after: Any = leave, use_local_output: bool = True
) -> tuple[list[Tensor], Grads, list[tuple[type, bool]]]:
    """Losses and gradients of two steps, and what the block saw where it is not compiled."""
    torch._dynamo.reset()
    mesh = cached_mesh((1, 2), ("dp", "tp"))
    torch.manual_seed(5)
    net = Net(CALLS[call])
    block = net.block
    plan = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=use_local_output
    )
    parallelize_module(net, mesh["tp"], {"embedding": plan})
    before(net)
    fsdp.fully_shard(net.block, mesh=mesh["dp"])
    after(net)
    fsdp.fully_shard(net, mesh=mesh["dp"])
    losses = []
    for step in range(2):
        loss = net(data(0, step, 2 * 4, WIDTH).view(2, 4, WIDTH)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    names = {name.replace("_orig_mod.", ""): p.grad for name, p in net.named_parameters()}
    grads = {name: full(grad) for name, grad in names.items() if grad is not None}
    return losses, grads, block.seen


def check_equal(ours: tuple[Any, Grads, Any], theirs: tuple[Any, Grads, Any]) -> None:
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0)


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_blocks_see_what_they_see_under_torch(rank: int, n_ranks: int, call: str) -> None:
    ours, theirs = (trained(fsdp, call) for fsdp in (fsdp_c, torch_fsdp))
    check_equal(ours, theirs)
    assert ours[2] == theirs[2] and ours[2]
    if call in ("args", "kwargs", "another reader"):
        assert ours[2][0] == (AsyncCollectiveTensor, True)


@on_ranks(2)
def test_dtensors_stay(rank: int, n_ranks: int) -> None:
    ours, theirs, compiled = (
        trained(fsdp, "args", before, use_local_output=False)
        for fsdp, before in (
            (fsdp_c, leave),
            (torch_fsdp, leave),
            (fsdp_c, compile_block),
        )
    )
    check_equal(ours, theirs)
    check_equal(compiled, theirs)
    assert ours[2] == theirs[2] == [(DTensor, True)] * 2


WAYS = {
    "compiled, then sharded": (compile_block, leave),
    "sharded, then compiled": (leave, compile_block),
    "replaced, then sharded": (replace_block, leave),
    "sharded, then replaced": (leave, replace_block),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_compiled_blocks_train_as_others(rank: int, n_ranks: int, call: str) -> None:
    check_equal(trained(fsdp_c, call, compile_block), trained(torch_fsdp, call))


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_ways_to_compile(rank: int, n_ranks: int, way: str, strict: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_C_STRICT", strict)
        check_equal(trained(fsdp_c, "args", *WAYS[way]), trained(torch_fsdp, "args"))


@on_ranks(2)
def test_torch_loses_the_gradient(rank: int, n_ranks: int) -> None:
    """A torch that does better is noticed."""
    for way in WAYS.values():
        losses, grads, _ = trained(torch_fsdp, "args", *way)
        assert torch.isfinite(losses[0])
        assert grads["block.w.weight"].any() and not grads["embedding.weight"].any()
