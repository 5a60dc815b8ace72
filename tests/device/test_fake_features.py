"""Features of units on a device whose streams do their work as late, or as early, as events allow:
programs as in test_fake_streams.py."""

import contextlib
import functools
import warnings
from types import MethodType
from typing import Any

import fake_device
import harness
import models
import pytest
import torch
import torch.distributed.fsdp
from behaviour.test_extensions import Wrapped
from harness import run_ranks, seed_everything
from models import Net, data
from test_fake_streams import ENV, ORDERS, OnPurpose, Program, Side, in_orders_of
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


def fsdp_of(side: Side) -> Any:
    return torch.distributed.fsdp if side.device == "cpu" else harness.implementation()


def units(model: Any) -> list[Any]:
    return [*model.blocks, model]


def checkpointed(use_reentrant: bool) -> Program:
    def run(side: Side) -> None:
        for options in ({}, {"reshard_after_forward": False}):
            model = side.net(**options)

            def forward(x: Tensor, model: Any = model) -> Tensor:
                x = model.stem(x)
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=use_reentrant)
                return x * model.scale.sum() + model.offset

            model.forward = forward
            side.train(model, range(3))

    return run


PROGRAMS["checkpointed"] = checkpointed(False)
PROGRAMS["checkpointed_reentrant"] = checkpointed(True)


@program
def checkpointed_inside(side: Side) -> None:
    seed_everything(1)
    model = Net(3).to(side.device)
    for block in model.blocks:
        composable_checkpoint(block)
    models.shard_blocks(model, fsdp_of(side), mesh=side.mesh())
    side.train(model, range(3))


@program
def unsharded_by_hand(side: Side) -> None:
    model = side.net()
    for step in range(3):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        if step == 1:
            for handle in handles:
                handle.wait()
        if step == 2:
            handles[0].wait()
            side.keep(*model.blocks[0].parameters())
        side.train(model, range(step, step + 1))
    with side.stream():
        handle = model.blocks[1].unshard(async_op=True)
    handle.wait()
    side.keep(*model.blocks[1].parameters())
    model.blocks[1].reshard()
    side.change(model)
    model.blocks[1].unshard()
    side.keep(*model.blocks[1].parameters())
    model.blocks[1].reshard()
    side.train(model)


@program
def prefetched(side: Side) -> None:
    model = side.net()
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[1].set_modules_to_forward_prefetch(blocks[2:])
    blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[1]])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    side.train(model, range(3))
    with torch.no_grad():
        side.keep(side.loss(model, 9))
    side.change(model)
    side.train(model, range(1))


@program
def sliced(side: Side) -> None:
    model = side.net(reshard_after_forward=1 if side.n_ranks < 4 else 2)
    side.train(model, range(2))
    loss = side.loss(model, 3)
    with torch.no_grad():
        side.keep(side.loss(model, 4))
    loss.backward()
    side.keep(*(p.grad for p in model.parameters()))
    model.zero_grad()
    side.change(model)
    model.set_reshard_after_forward(True)
    side.train(model, range(1))


@program
def sliced_by_model(side: Side) -> None:
    """Two models in a program, whose units reshard each in its way."""
    for n in (1, side.n_ranks):
        model = side.net(reshard_after_forward=n)
        side.train(model)
        model.blocks[0].set_reshard_after_forward(False)
        model.blocks[1].set_reshard_after_backward(False)
        side.train(model, range(2, 4))
        with torch.no_grad():
            side.keep(side.loss(model, 9))
        for unit in units(model):
            unit.reshard()
        side.change(model)
        side.train(model)


@program
def stepped_in_another_stream(side: Side) -> None:
    """The next gathers are behind the event of the step, and nothing else is."""
    model = side.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        side.backward(model, step)
        if side.device == "cpu":
            optimizer.step()
            side.loss(model, step + 5).backward()
        else:
            stream = torch.Stream(device=side.device)
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                optimizer.step()
            model.set_post_optim_event(stream.record_event())
            side.loss(model, step + 5).backward()
            torch.accelerator.current_stream().wait_stream(stream)
        optimizer.zero_grad()
    side.keep(*model.parameters())


@program
def whole_tensors(side: Side) -> None:
    """What DTensors make of shards that units have trained: gathered, and sharded in other rows."""
    model = side.net()
    side.train(model)
    side.keep(*(p.full_tensor() for p in model.state_dict().values() if isinstance(p, DTensor)))
    layer = nn.Linear(8, 8).to(side.device)
    with torch.no_grad():
        for param in layer.parameters():
            param.fill_(0.5)
    fsdp_of(side).fully_shard(
        layer, mesh=side.mesh(), shard_placement_fn=lambda param: Shard(param.ndim - 1)
    )
    x = torch.nn.functional.pad(data(side.rank), (0, 2)).to(side.device)
    layer(x).square().mean().backward()
    side.keep(*(p.grad for p in layer.parameters()))
    side.keep(layer.weight.redistribute(placements=[Shard(0)]))


@program
def replicas_offloaded(side: Side) -> None:
    """Sums of replicas that wait for others, and then go to the host."""
    offload = CPUOffloadPolicy(pin_memory=side.device != "cpu")
    model = side.net((side.n_ranks, 1), offload_policy=offload)
    side.train(model)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        side.loss(model, step).backward()
    side.keep(*(p.grad for p in model.parameters()))
    side.change(model)
    side.train(model)


@program
def mixes(side: Side) -> None:
    """Of what is said about a backward."""
    for shape, options in (
        ((side.n_ranks,), {}),
        ((side.n_ranks,), {"reshard_after_forward": False}),
        ((side.n_ranks, 1), {}),
    ):
        model = side.net(shape, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            model.set_requires_gradient_sync(step % 4 > 1)
            model.set_is_last_backward(step % 4 == 3)
            model.set_reshard_after_backward(step % 3 == 0)
            if len(shape) > 1:
                model.set_requires_all_reduce(step % 4 == 3)
            side.loss(model, step).backward()
            if step % 4 == 3:
                side.keep(*(p.grad for p in model.parameters() if p.grad is not None))
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 8 == 3)
        for unit in units(model):
            unit.reshard()
        side.keep(*model.parameters())


@program
def twice(side: Side) -> None:
    model = side.net(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for step in range(2):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        for unit in units(model):
            unit.reshard()
        side.keep(*(p.grad for p in model.parameters()))
        model.zero_grad()
        side.change(model)


@program
def two_roots(side: Side) -> None:
    """As the two of a GAN."""
    maker, judge = side.net(), side.net(reshard_after_forward=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]
    for step in range(3):
        x = data(side.rank, step).to(side.device)
        made = maker(x)
        loss = judge(made.detach()).square().mean() - judge(x).square().mean()
        loss.backward()
        side.keep(*(p.grad for p in judge.parameters()))
        optimizers[1].step()
        optimizers[1].zero_grad()
        judge.requires_grad_(step % 2 == 0)
        loss = judge(made).square().mean()
        loss.backward()
        judge.requires_grad_(True)
        side.keep(*(p.grad for p in maker.parameters()))
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    side.keep(*maker.parameters(), *judge.parameters())


@program
def shared(side: Side) -> None:
    """A block that runs twice, once in another stream."""
    model = side.net()

    def forward(x: Tensor) -> Tensor:
        x = model.blocks[0](model.stem(x))
        with side.stream():
            y = model.blocks[1](x)
        x = model.blocks[1](x)
        return model.blocks[0](x + y) * model.scale.sum()

    model.forward = forward
    for block in model.blocks[2:]:
        block.requires_grad_(False)
    side.train(model, range(3))


@program
def left_out(side: Side) -> None:
    model = side.net()

    def forward(x: Tensor) -> Tensor:
        x = model.stem(x)
        for index in model.uses:
            x = model.blocks[index](x)
        return x * model.scale.sum()

    model.forward = forward
    for step, uses in enumerate(([0, 1, 2], [0, 2], [1], [2, 0], [0])):
        model.uses = uses
        if step == 2:
            model.blocks[0].up.weight.requires_grad_(False)
        model.set_requires_gradient_sync(step not in (1, 3))
        side.loss(model, step).backward()
        side.keep(*(p.grad for p in model.parameters() if p.grad is not None))
        if step == 3:
            model.blocks[0].up.weight.requires_grad_(True)


@program
def frozen(side: Side) -> None:
    model = side.net()
    model.blocks[1].requires_grad_(False)
    side.train(model, range(2))
    model.blocks[1].requires_grad_(True)
    model.stem.requires_grad_(False)
    side.train(model, range(2))


@program
def offloaded_accumulated(side: Side) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(
            offload_policy=CPUOffloadPolicy(pin_memory=side.device != "cpu"), **options
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 != 0)
            model.set_is_last_backward(step % 3 == 2)
            side.loss(model, step).backward()
            if step % 3 == 2:
                side.keep(*(p.grad for p in model.parameters()))
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 2)
        side.keep(*model.parameters())


@program
def states_loaded(side: Side) -> None:
    """While the streams of a step have all to do."""
    model = side.net()
    first = {k: v.detach().clone() for k, v in model.state_dict().items()}
    side.train(model, range(1))
    model.load_state_dict(first)
    side.backward(model, 1)
    model.zero_grad()
    model.load_state_dict(first, assign=True)
    side.train(model, range(1, 3))
    side.keep(*model.state_dict().values())


@program
def inference_between(side: Side) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(**options)
        other = side.net(**options)
        for step in range(2):
            loss = side.loss(model, step)
            with torch.no_grad(), side.stream():
                side.keep(side.loss(model, 7))
            with torch.inference_mode(step == 1):
                side.keep(side.loss(model, 8).clone())
            with torch.no_grad():
                side.keep(side.loss(other, 8))
            loss.backward()
            side.keep(*(p.grad for p in model.parameters()))
            model.zero_grad()
            side.change(model)
            side.change(other)


@program
def failures(side: Side) -> None:
    """Caught, and the next step."""
    model = side.net()
    params = list(model.parameters())
    where = ""

    def fail_at(place: str) -> Any:
        def hook(*_: Any) -> None:
            if where == place:
                raise OnPurpose

        return hook

    model.blocks[1].register_forward_pre_hook(fail_at("forward"))
    model.blocks[1].register_forward_hook(
        lambda _, args, out: out.register_hook(fail_at("backward")) and None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, where in enumerate(("", "forward", "", "backward", "", "")):
            if not where or side.device != "cpu":  # torch's own does not go on
                try:
                    side.loss(model, step).backward()
                except OnPurpose:
                    pass
                else:
                    side.keep(*(p.grad for p in params))
            with torch.no_grad():
                for param in params:
                    param.grad = None
                    param.mul_(0.9)


@program
def moved(side: Side) -> None:
    model = side.net()
    side.train(model, range(1))
    model.to(torch.float64)
    model.to(torch.float32)
    side.train(model, range(1, 3))


@program
def reduced_by_hook(side: Side) -> None:
    """Of all-reduces of the user's own."""
    model = side.net()
    for unit in units(model):
        unit.set_all_reduce_hook(lambda grad: grad.mul_(2))
    side.train(model, range(2))


@program
def reduced_by_hook_in_its_stream(side: Side) -> None:
    """Which keeps what it was given, padding included, for what it adds in the next step."""
    model = side.net()
    stream = None if side.device == "cpu" else torch.Stream(device=side.device)
    totals: dict[int, Tensor] = {}

    def add_up(index: int, grad: Tensor) -> None:
        totals[index] = totals[index] + grad if index in totals else grad.clone()
        grad.add_(totals[index])

    for i, unit in enumerate(units(model)):
        unit.set_all_reduce_hook(functools.partial(add_up, i), stream=stream)
    side.train(model, range(3))
    if stream is not None:
        torch.accelerator.current_stream().wait_stream(stream)
    side.keep(*totals.values())


class OddlyTyped(nn.Module):
    """Chunks of most parameters begin at no multiple of their elements' bytes, in a pack."""

    def __init__(self) -> None:
        super().__init__()
        self.octets = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        self.halves = nn.Parameter(torch.randn(6).bfloat16(), requires_grad=False)
        self.singles = nn.Parameter(torch.randn(6, 5))
        self.doubles = nn.Parameter(torch.randn(5, 6).double(), requires_grad=False)
        self.pairs = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.singles.to(x) @ self.doubles.to(x)
        pairs = self.pairs
        added = torch.view_as_real(pairs) if pairs.is_complex() else pairs
        return x * self.halves.to(x) + self.octets.to(x).sum() + added.to(x).sum()


@program
def several_types_in_sight(side: Side) -> None:
    """Of units whose chunks lie next to one another, as torch sends them."""
    for dtype in (None, torch.float32):
        seed_everything(1)
        model = nn.Sequential(*(OddlyTyped() for _ in range(3))).to(side.device)
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        for module in (*model, model):
            fsdp_of(side).fully_shard(module, mesh=side.mesh(), mp_policy=policy)
        for block in model:
            block.set_all_reduce_hook(lambda grad: grad.mul_(2))
        for step in range(2):
            loss = side.loss(model, step)
            model[1].unshard()
            side.keep(*model[1].parameters())
            model[1].reshard()
            loss.backward()
            side.keep(*(p.grad for p in model.parameters() if p.grad is not None))
            model.zero_grad()


@program
def divided(side: Side) -> None:
    model = side.net()
    for unit in units(model):
        unit.set_gradient_divide_factor(3.0)
        unit.set_force_sum_reduction_for_comms(True)
    side.train(model, range(2))


@program
def forwards_in_two_streams(side: Side) -> None:
    """Before the backward of both."""
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(**options)
        for step in range(3):
            first = side.loss(model, 2 * step)
            with side.stream():
                second = side.loss(model, 2 * step + 1)
            if step == 2:
                second.backward()
                first.backward()
            else:
                (first + second).backward()
            side.keep(*(p.grad for p in model.parameters()))
            model.zero_grad()
            side.change(model)


@program
def micro_batches_in_streams(side: Side) -> None:
    for shape, options in (((side.n_ranks,), {}), ((side.n_ranks, 1), {})):
        model = side.net(shape, **options)
        for step in range(4):
            is_last = step % 2 == 1
            if len(shape) > 1:
                model.set_requires_all_reduce(is_last)
            else:
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(step == 3)
            with side.stream() if is_last else contextlib.nullcontext():
                side.loss(model, step).backward()
        side.keep(*(p.grad for p in model.parameters()))


@program
def added_up_in_another_stream(side: Side) -> None:
    """By autograd: somebody has the graph of a micro-batch before, and with it the nodes that add
    up gradients, in the stream of its forward."""
    for shape in ((side.n_ranks,), (side.n_ranks, 1)):
        model = side.net(shape, reshard_after_forward=False)
        losses = []
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            with side.stream() if step > 0 else contextlib.nullcontext():
                losses.append(side.loss(model, step))
            losses[-1].backward()
        side.keep(*(p.grad for p in model.parameters()))


@program
def averaged_in_streams(side: Side) -> None:
    """As scripts do that log, clip and step in a stream of their own."""
    model = side.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        with side.stream():
            loss = side.loss(model, step)
        loss.backward()
        with side.stream():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            side.keep(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            optimizer.step()
            optimizer.zero_grad()
    side.keep(*model.parameters())


@program
def reduced_at_the_end(side: Side) -> None:
    """Of a backward, which is called in another stream than units compute in: their inputs need no
    gradient, and for parameters that were not used zeros are made."""
    model = side.net()
    block = model.blocks[0]
    block.forward = lambda x: x + block.norm(x)
    model.forward = lambda x: block(x) * model.scale.sum()
    model.set_reduce_scatter_unused_params(True)
    for step in range(3):
        with side.stream():
            loss = side.loss(model, step)
        loss.backward()
        side.keep(*(p.grad for p in model.parameters() if p.grad is not None))
        model.zero_grad()
        side.change(model)


def pre_scaled(
    self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    """What is gathered is of one scale, which it is multiplied with again."""
    total = self.detach().sum()
    scale = total * 0 + 4
    return (self / scale,), scale


def pre_as_it_is(self: Tensor, *_: Any) -> Any:
    return (self.detach(),), None


def post_scaled(
    self: Tensor,
    gathered: tuple[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Any:
    if out is None:
        whole = gathered[0] * scale
        return whole, (whole,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        torch.mul(gathered[0], scale, out=out)
    return None


@program
def extended(side: Side) -> None:
    seed_everything(1)
    model = nn.Module()
    model.blocks = nn.ModuleList(models.Block(8, 8) for _ in range(3))
    model.forward = lambda x: model.blocks[2](model.blocks[1](model.blocks[0](x)))
    model.to(side.device)
    models.shard_blocks(model, fsdp_of(side), mesh=side.mesh())
    for param in model.parameters():
        part = param._local_tensor
        part.fsdp_pre_all_gather = MethodType(pre_scaled, part)
        part.fsdp_post_all_gather = MethodType(post_scaled, part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.nn.functional.pad(data(side.rank, step), (0, 2)).to(side.device)
        loss = model(x).square().mean()
        if step == 1:
            with side.stream():
                model.blocks[1].unshard()
                side.keep(*model.blocks[1].parameters())
                model.blocks[1].reshard()
        loss.backward()
        side.keep(*(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    side.keep(*model.parameters())


def post_wrapped(
    self: Tensor, gathered: tuple[Tensor], _: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    return None if out is not None else (Wrapped(gathered[0]), gathered)


@program
def wrapped_and_unused(side: Side) -> None:
    """Zeros are made for parameters around other tensors that had no part in a forward."""
    seed_everything(1)
    model = nn.Module()
    model.blocks = nn.ModuleList(models.Block(8, 8) for _ in range(3))
    model.blocks[1].spare = nn.Linear(64, 64)
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    model.to(side.device)
    models.shard_blocks(model, fsdp_of(side), mesh=side.mesh())
    for param in model.blocks[1].spare.parameters():
        part = param._local_tensor
        part.fsdp_pre_all_gather = MethodType(pre_as_it_is, part)
        part.fsdp_post_all_gather = MethodType(post_wrapped, part)
    model.set_reduce_scatter_unused_params(True)
    x = torch.nn.functional.pad(data(side.rank), (0, 2)).to(side.device)
    model(x).square().mean().backward()
    dirt = [torch.full(size, torch.inf) for size in 32 * ((64, 64), (64,))]
    del dirt  # where memory of the host was given back, so that who reads it still does not see 0
    side.keep(*(p.grad for p in model.blocks[1].parameters()))


def in_orders(rank: int, n_ranks: int, names: list[str]) -> None:
    def orders(name: str) -> tuple[fake_device.Order, ...]:
        """The latest one or another one, in turn: streams' own programs have them all."""
        others = [order for order in ORDERS if order is not fake_device.LAZY]
        place = list(PROGRAMS).index(name)
        return (others[place // 2 % len(others)] if place % 2 else fake_device.LAZY,)

    in_orders_of(rank, n_ranks, {name: PROGRAMS[name] for name in names}, orders)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    fake_device.build()


@pytest.mark.parametrize("part", range(5))
def test_two_ranks_in_any_order(part: int):
    run_ranks(in_orders, 2, list(PROGRAMS)[part::5], timeout=200, apart=True, env=ENV)


def test_one_rank_in_any_order():
    names = ["forwards_in_two_streams", "unsharded_by_hand", "extended"]
    run_ranks(in_orders, 1, names, timeout=120, apart=True, env=ENV)
