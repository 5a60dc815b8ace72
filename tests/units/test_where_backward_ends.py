"""Where a unit's backward ends: at its input's producer from the second step on, with torch's bits.

In the first step, and where somebody else reads the input too, an identity node tells it, as
torch's does.
"""

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import models
import pytest
import torch
from harness import implementation, seed_everything
from models import WIDTH, Block, data
from parity import Pair, Side, Tolerance, on_ranks, total
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_c._comm import _device

NODE = "RegisterPostBackwardFunctionBackward"


def chain(net: "Net", x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def recurrent(net: "Net", x: Tensor) -> Tensor:
    for _ in range(3):
        x = net.blocks[0](x)
    return net.blocks[1](x)


def parallel(net: "Net", x: Tensor) -> Tensor:
    return sum(block(x) for block in net.blocks)


def read_later(net: "Net", x: Tensor) -> Tensor:
    """A block's input is in the loss as well: three gradients meet there."""
    y = net.blocks[0](x)
    return torch.cat([net.blocks[1](y), y, x])


def read_before(net: "Net", x: Tensor) -> Tensor:
    residual = x.exp().tanh() + x.sin()
    return net.blocks[1](net.blocks[0](x) + residual)


def views(net: "Net", x: Tensor) -> Tensor:
    return net.blocks[1](net.blocks[0](x.view(2, -1, WIDTH)).view(-1, WIDTH)[1:])


def parts(net: "Net", x: Tensor) -> Tensor:
    """Both inputs have one producer."""
    one, two = x.unbind()[:2]
    return net.blocks[0](one[None]) + net.blocks[1](two[None])


def detached_inside(net: "Net", x: Tensor) -> Tensor:
    """No gradient goes through the first block, but its parameters have theirs."""
    y = x * 2
    return net.blocks[1](net.blocks[0](x=y, detach=True) + y)


def skipped_at_times(net: "Net", x: Tensor) -> Tensor:
    net.n_calls += 1
    y = net.blocks[net.n_calls % 2](x)
    return net.blocks[2](y) if net.n_calls % 3 else y


def read_at_times(net: "Net", x: Tensor) -> Tensor:
    net.n_calls += 1
    y = net.blocks[0](x)
    z = net.blocks[1](y)
    return torch.cat([z, y, y * 2]) if net.n_calls > 2 else z


def kept_producer(net: "Net", x: Tensor) -> Tensor:
    """What the block reads was computed in the first step, whose graph lives on."""
    if net.kept is None:
        net.kept = x.tanh()
    return net.blocks[0](net.kept)


KINDS = [chain, recurrent, parallel, read_later, read_before, views, parts, detached_inside]
KINDS += [skipped_at_times]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


class Inner(Block):
    def forward(self, x: Tensor, detach: bool = False) -> Tensor:
        return super().forward(x.detach() if detach else x)


class Net(nn.Module):
    def __init__(self, kind: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.n_calls = 0
        self.kept: Tensor | None = None
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(self, self.stem(x))


def identity_nodes(output: Tensor) -> int:
    seen, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(next_node for next_node, _ in node.next_functions)
    return sum(node.name() == NODE for node in seen)


@pytest.mark.parametrize("shard", [models.shard_blocks, models.shard_deep])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_steps(rank: int, n_ranks: int, kind: Callable[..., Tensor], shard: Any) -> None:
    pair = Pair(lambda: Net(kind), shard)
    for step in range(4):
        pair.step(data(rank, step))


@on_ranks(1, 2)
def test_reader_that_comes_later(rank: int, n_ranks: int) -> None:
    """Who reads a unit's input from the third step on adds to it in another order."""
    rounded = Tolerance(relative=1e-5, scaled=1e-5, realign=True)
    pair = Pair(lambda: Net(read_at_times), models.shard_blocks, tolerance=rounded)
    for step in range(5):
        pair.step(data(rank, step))


@pytest.mark.parametrize(("kind", "expected"), [(chain, 0), (parallel, 3), (read_later, 2)])
@on_ranks(1, 2)
def test_number_of_nodes(
    rank: int, n_ranks: int, kind: Callable[..., Tensor], expected: int
) -> None:
    """Parts of torch's graph, and none where a unit alone reads what another one has made."""
    for is_strict in (True, False):
        with mock.patch.dict(os.environ, FSDP_C_STRICT=str(int(is_strict))):
            model = Net(kind)
            models.shard_blocks(model, implementation())
        found = []
        for step in range(3):
            output = model(data(rank, step))
            found.append(identity_nodes(output))
            output.sum().backward()
        first = 2 if kind is read_later else 3
        later = first if is_strict else expected
        assert found == [first, later, later], is_strict


def twice(side: Side) -> None:
    loss = total(side.kept)
    loss.backward(retain_graph=True)
    loss.backward()


def some_inputs(side: Side) -> None:
    """The producer is not asked for."""
    own = list(side.model.blocks[2].parameters())
    total(side.kept).backward(inputs=own)


def input_gradient(side: Side) -> None:
    loss = total(side.kept)
    (side.extra,) = torch.autograd.grad(loss, [side.leaf], retain_graph=True)
    loss.backward()


def one_row_each(side: Side) -> None:
    for row in side.kept:
        row.sum().backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [chain, recurrent, read_later])
@pytest.mark.parametrize("backward", [twice, some_inputs, input_gradient, one_row_each])
@on_ranks(1, 2)
def test_backwards(
    rank: int, n_ranks: int, backward: Callable[[Side], None], kind: Callable[..., Tensor]
) -> None:
    pair = Pair(lambda: Net(kind), models.shard_blocks)

    def forward(side: Side) -> Tensor:
        side.leaf = data(rank).requires_grad_()
        side.kept = side.model(side.leaf)
        return side.kept

    for _ in range(3):
        pair.both(forward)
        pair.do(backward)
        pair.optimize()


@on_ranks(1, 2)
def test_producer_that_lives_on(rank: int, n_ranks: int) -> None:
    pair = Pair(lambda: Net(kept_producer), models.shard_blocks)
    for step in range(4):
        pair.forward(data(rank, step))
        pair.backward(retain_graph=True)
        pair.both(lambda side: side.optimizer.zero_grad(), "zero_grad")


@on_ranks(1)
def test_order_of_gradients(rank: int, n_ranks: int) -> None:
    """Gradients are there, and their hooks run, unit by unit as under torch."""
    pair = Pair(lambda: Net(chain), models.shard_deep)
    for side in (pair.theirs, pair.ours):
        side.order = []
        for name, parameter in side.shards.items():
            parameter.register_post_accumulate_grad_hook(
                lambda _, side=side, name=name: side.order.append(name)
            )
    for step in range(3):
        pair.step(data(rank, step))
        pair.both(lambda side: side.order, "order of hooks")


def watched(net: "Net", x: Tensor) -> Tensor:
    """Hooks on what goes from unit to unit say whether the units around them are sharded."""
    for block, following in zip(net.blocks, [*net.blocks[1:], net.blocks[0]], strict=True):
        x = block(x) * 1 if block is net.blocks[0] else block(x)
        x.register_hook(lambda _, units=(block, following): net.seen.append(sharded(units)))
    return x


def sharded(units: Any) -> list[bool]:
    return [isinstance(unit.norm.weight, DTensor) for unit in units]


@on_ranks(1, 2)
def test_hooks_between_units(rank: int, n_ranks: int) -> None:
    """A unit is through, and the next one of the backward is there, before anybody's hook runs."""
    pair = Pair(lambda: Net(watched), models.shard_blocks)
    for step in range(3):
        pair.step(data(rank, step))
        pair.both(lambda side: side.model.seen, "what hooks saw")


ON_DEVICE: list[tuple[Any, ...]] = [
    *(("test_steps", kind, models.shard_deep) for kind in KINDS),
    *(("test_number_of_nodes", *each) for each in ((chain, 0), (parallel, 3), (read_later, 2))),
    *(
        ("test_backwards", backward, kind)
        for backward in (twice, some_inputs, input_gradient, one_row_each)
        for kind in (chain, recurrent)
    ),
    ("test_reader_that_comes_later",),
    ("test_producer_that_lives_on",),
    ("test_order_of_gradients",),
    ("test_hooks_between_units",),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: "-".join(map(name_of, case)))
@on_ranks(1)
def test_on_a_device(rank: int, n_ranks: int, case: tuple[Any, ...]) -> None:
    """One rank alone has nothing to give back at the end of a unit: the same holds there."""
    with _device.on_cpu():
        globals()[case[0]].on_rank(rank, n_ranks, *case[1:])


@on_ranks(2)
def test_units_with_memory_on_a_device(rank: int, n_ranks: int) -> None:
    """It goes, and the reduction starts, at the end of the unit's own backward."""
    with _device.on_cpu():
        model = Net(chain)
        models.shard_blocks(model, implementation())
        for step in range(3):
            output = model(data(rank, step))
            assert identity_nodes(output) == 3
            output.sum().backward()


class Scaled(nn.Module):
    """Its parameters' nodes come after those of its input, in the order of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).tanh()


@on_ranks(1, 2)
def test_producer_of_another_thread(rank: int, n_ranks: int) -> None:
    """Threads count their nodes apart: there the producer may come before the unit's own nodes."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled())

    def shard(model: nn.Module, fsdp: Any) -> None:
        fsdp.fully_shard(model[1])
        fsdp.fully_shard(model)

    def elsewhere(module: nn.Module, x: Tensor) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(nn.Module.__call__, module, x).result()

    class Threaded(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return elsewhere(self[1], self[0](x))

    pair = Pair(lambda: Threaded(*net()), shard)
    for step in range(4):
        pair.step(data(rank, step))


class Writer(nn.Module):
    """Changes its input in place, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2) if self.writes else x)


@on_ranks(1)
def test_input_changed_in_place(rank: int, n_ranks: int) -> None:
    """Torch refuses it, as does the identity node; without one it is what it is in any module."""

    def net() -> nn.Sequential:
        seed_everything(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Writer())

    for is_strict in (True, False):
        plain, model = net(), net()
        with mock.patch.dict(os.environ, FSDP_C_STRICT=str(int(is_strict))):
            implementation().fully_shard(model[1])
            implementation().fully_shard(model)
        for each in (plain, model):
            each(data(0)).sum().backward()
            each[1].writes = True
        if is_strict:
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                model(data(0))
            continue
        for each in (plain, model):
            each(data(0)).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)
