"""Units on a device whose streams do their work as late, or as early, as events allow.

What the core and the binding say about order is all the order there is: who leaves a wait out reads
what is not there yet, or memory that has been given to somebody else. Each program runs in several
orders, with the bits of the one in which everything is done at once, and beside torch's fully_shard
on the CPU. Then one wait after the other is ignored, and somebody has to notice.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import fake_device
import harness
import models
import pytest
import torch
import torch.distributed.fsdp
from fake_device import (
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    GATHER,
    HOST,
    REDUCE,
    Kind,
    Order,
    ahead,
    shuffled,
)
from harness import cached_mesh, run_ranks, seed_everything
from models import Net, data
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

AT_ONCE = ahead(COMPUTE, COPY_IN, GATHER, REDUCE, ALL_REDUCE, *range(100, 110))
ORDERS = (
    fake_device.LAZY,
    *map(ahead, (COMPUTE, COPY_IN, REDUCE)),
    shuffled(0),
)


# Linear layers in bfloat16 round otherwise where torch's operators are composed of others.
ROUGH = ("mixed_precision",)


@dataclass
class Side:
    """A program's rank, on the device or on the CPU under torch's own fully_shard."""

    rank: int
    n_ranks: int
    device: str
    seen: list[Tensor] = field(default_factory=list)

    def net(self, shape: tuple[int, ...] = (), n_blocks: int = 3, **options: Any) -> Any:
        seed_everything(1)
        model = Net(n_blocks).to(self.device)
        shape = shape or (self.n_ranks,)
        own = self.device == "cpu"
        fsdp = torch.distributed.fsdp if own else harness.implementation()
        models.shard_blocks(model, fsdp, mesh=self.mesh(shape), **options)
        return model

    def mesh(self, shape: tuple[int, ...] = ()) -> Any:
        shape = shape or (self.n_ranks,)
        if self.device == "cpu":
            return cached_mesh(shape, ("replicate", "shard")[-len(shape) :])
        return fake_device.mesh_of(shape)

    def loss(self, model: Any, step: int) -> Tensor:
        return model(data(self.rank, step).to(self.device)).square().mean()

    def backward(self, model: Any, step: int) -> None:
        loss = self.loss(model, step)
        loss.backward()
        self.keep(loss, *(p.grad for p in model.parameters() if p.grad is not None))

    def train(self, model: Any, steps: range = range(2), **options: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        for step in steps:
            self.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        self.keep(*model.parameters())

    def change(self, model: Any) -> None:
        """So that what was gathered before is not what is gathered next."""
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)

    def keep(self, *tensors: Tensor) -> None:
        """As a script does that computes with them."""
        self.seen += [getattr(t.detach(), "_local_tensor", t.detach()).clone() for t in tensors]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Another stream, behind the current one, which goes on behind it."""
        if self.device == "cpu":
            yield
            return
        outer, inner = torch.accelerator.current_stream(), torch.Stream(device=self.device)
        inner.wait_stream(outer)
        with inner:
            yield
        outer.wait_stream(inner)


class OnPurpose(Exception):
    """What forwards and backwards fail with."""


Program = Callable[[Side], None]
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


@program
def plain(side: Side) -> None:
    side.train(side.net())


@program
def kept_after_forward(side: Side) -> None:
    side.train(side.net(reshard_after_forward=False))


@program
def mixed_precision(side: Side) -> None:
    side.train(side.net(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


@program
def accumulated(side: Side) -> None:
    """Of three backwards one adds to gradients that are there; before the last some are gone."""
    model = side.net()
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        side.backward(model, step)
        side.change(model)
    next(model.parameters()).grad = None
    side.train(model)


@program
def clipped(side: Side) -> None:
    model = side.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        side.loss(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        side.keep(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    side.keep(*model.parameters())


@program
def offloaded(side: Side) -> None:
    """The host writes shards after a backward, and after a forward alone."""
    model = side.net(offload_policy=CPUOffloadPolicy(pin_memory=side.device != "cpu"))
    side.train(model)
    with torch.no_grad():
        side.keep(side.loss(model, 9))
    side.change(model)
    side.keep(*model.parameters())


@program
def replicas(side: Side) -> None:
    """All-reduced, and once kept for later."""
    model = side.net((side.n_ranks, 1))
    side.train(model)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        side.loss(model, step).backward()
        side.change(model)
    side.keep(*(p.grad for p in model.parameters()))


@program
def forwards_alone(side: Side) -> None:
    model = side.net()
    for step in range(2):
        with torch.no_grad():
            side.keep(side.loss(model, 10 + step))
        side.change(model)
        side.train(model, range(step, step + 1))


@program
def streams_that_change(side: Side) -> None:
    """An iteration in another stream than the one before it."""
    model = side.net()
    side.train(model, range(1))
    with side.stream():
        side.train(model, range(1, 2))
    side.train(model, range(2, 3))


@program
def guests(side: Side) -> None:
    """A unit is unsharded and used in another stream between a forward and its backward."""
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(**options)
        block = next(m for m in model.modules() if m is not model and hasattr(m, "unshard"))
        for step in range(2):
            loss = side.loss(model, step)
            with side.stream():
                block.unshard()
                side.keep(*block.parameters())
                if step == 1:
                    block.reshard()
            loss.backward()
            side.keep(*(p.grad for p in model.parameters()))
            side.change(model)
            model.zero_grad()


@program
def units_in_streams_of_their_own(side: Side) -> None:
    """As the branches of a model that run beside each other do."""
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(**options)

        def forward(x: Tensor, model: Any = model) -> Tensor:
            x = model.stem(x)
            with side.stream():
                y = model.blocks[0](x)
            x = model.blocks[2](model.blocks[1](x) + y)
            return x * model.scale.sum() + model.offset

        model.forward = forward
        side.train(model, range(3))


@program
def forwards_in_other_streams(side: Side) -> None:
    """Than the one in which backward is called, and its gradients are used."""
    for options in ({}, {"reshard_after_forward": False}):
        model = side.net(**options)
        for step in range(2):
            with side.stream():
                loss = side.loss(model, step)
            loss.backward()
            side.keep(*(p.grad for p in model.parameters()))
            side.change(model)
            model.zero_grad()


@program
def replicas_apart(side: Side) -> None:
    """Some of a unit's gradients are there and others are not: their sums have memory of their own,
    which goes before they were added."""
    model = side.net((side.n_ranks, 1))
    for step in range(4):
        side.backward(model, step)
        next(model.blocks[2].parameters()).grad = None


@program
def hooks(side: Side) -> None:
    """On gradients, which the stream that makes them runs."""
    model = side.net()

    def double(param: Any) -> None:
        param.grad = param.grad * 2

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(double)
    side.train(model)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    fake_device.build()


ENV = {"FSDP_C_DEVICES": "privateuseone", "FSDP_C_QUIET": "1"}


def results(
    run: Program, rank: int, n_ranks: int, order: Order, kind: Kind = Kind.WAIT, dropped: int = -1
) -> Any:
    """What the program has seen, on the CPU, and what was said about order."""
    side = Side(rank, n_ranks, fake_device.NAME)
    with fake_device.order(order) as device:
        device.watch(kind, dropped)
        run(side)
        said = device.said()
        return [t.cpu() for t in side.seen], said


def in_orders(rank: int, n_ranks: int, names: list[str]) -> None:
    in_orders_of(rank, n_ranks, {name: PROGRAMS[name] for name in names})


def in_orders_of(
    rank: int,
    n_ranks: int,
    programs: dict[str, Program],
    orders: Callable[[str], Sequence[fake_device.Order]] = lambda name: ORDERS,
) -> None:
    fake_device.load()  # before any backward: autograd has a thread for each device it knows then
    for name, run in programs.items():
        beside = Side(rank, n_ranks, "cpu")
        run(beside)
        first, said = results(run, rank, n_ranks, AT_ONCE)
        assert any(stream == COPY_IN for _, stream, _ in said), f"{name}: not on the core"
        rough = {"rtol": 0.05, "atol": 0.05} if name in ROUGH else {}
        torch.testing.assert_close(
            first, beside.seen, **rough, msg=lambda text, name=name: f"{name}: {text}"
        )
        for order in orders(name):
            again, _ = results(run, rank, n_ranks, order)
            same = [torch.equal(a, b) for a, b in zip(again, first, strict=True)]
            assert all(same), f"{name}, {order}: {same}"


@pytest.mark.parametrize("names", [list(PROGRAMS)[:5], list(PROGRAMS)[5:10], list(PROGRAMS)[10:]])
def test_two_ranks_in_any_order(names: list[str]):
    run_ranks(in_orders, 2, names, timeout=120, apart=True, env=ENV)


def test_one_rank_in_any_order():
    names = ["mixed_precision", "offloaded", "streams_that_change"]
    run_ranks(in_orders, 1, names, timeout=120, apart=True, env=ENV)


Seen = tuple[int, int, bool]  # who waits, for whom, and whether it shows when that is ignored


def without_each(
    rank: int, n_ranks: int, name: str, kind: Kind, is_last_half: bool = False
) -> list[Seen]:
    """A run for each of what the program says about order, which is ignored. Who waits goes ahead
    then, or everybody but the one that is waited for."""
    fake_device.load()
    run = PROGRAMS[name]
    first, said = results(run, rank, n_ranks, AT_ONCE)
    all_said = [(stream, of) for what, stream, of in said if what == kind]
    found = []
    for k in range(len(all_said) // 2 if is_last_half else 0, len(all_said)):
        stream, of = all_said[k]
        is_seen = False
        for order in (ahead(stream), ahead(*(s for s in AT_ONCE.ahead if s != of))):
            again, _ = results(run, rank, n_ranks, order, kind, k)
            same = all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
            is_seen = is_seen or not same
        found.append((stream, of, is_seen))
    return found


# How many waits of a program's second half change nothing, by who waits and for whom, since others
# say the same:
# - copy-in for compute: the slots that end_backward frees, and one that is too small, so that
#   another takes its place; who next asks for memory in copy-in comes behind the optimizer's wait
# - reduce for compute: before a unit's gradients get memory, where an earlier unit's staged
#   gradients have had it wait for all that used the memory before
# - compute for reduce: at the end of a backward it has waited for all reductions when slots are
#   freed
# - the host for copy-in, in a backward: gradients that the host waits for come after all gathers
REDUNDANT = {
    ("plain", Kind.WAIT): {(COPY_IN, COMPUTE): 3, (REDUCE, COMPUTE): 3, (COMPUTE, REDUCE): 1},
    ("offloaded", Kind.HOST_WAIT): {(HOST, COPY_IN): 1},
}


@pytest.mark.parametrize(("name", "kind"), REDUNDANT)
def test_ignored_waits_show(name: str, kind: Kind):
    ranks = run_ranks(without_each, 2, name, kind, True, timeout=120, apart=True, env=ENV)
    unseen: dict[tuple[int, int], int] = {}
    for each in zip(*ranks, strict=True):
        stream, of, _ = each[0]
        if not any(is_seen for _, _, is_seen in each):
            unseen[stream, of] = unseen.get((stream, of), 0) + 1
    assert unseen == REDUNDANT[name, kind]


def go_on_after_failures(rank: int, n_ranks: int) -> list[str]:
    """What steps end with, of which each second one fails in backward."""
    fake_device.load()
    side = Side(rank, n_ranks, fake_device.NAME)
    model = side.net()
    fails = False

    def fail(grad: Tensor) -> None:
        if fails:
            raise OnPurpose

    model.blocks[1].register_forward_hook(lambda _, args, out: out.register_hook(fail) and None)
    ends = []
    sys.setswitchinterval(100)  # who has the interpreter's lock keeps it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(40):
            fails = step % 2 == 1
            try:
                side.loss(model, step).backward()
                ends.append("")
            except Exception as error:
                ends.append(repr(error))
            model.zero_grad()
    return ends


def test_a_step_after_a_failed_backward_whose_thread_is_late():
    """Autograd's thread for the device may be the last to let go of the backward, at any time."""
    ends = run_ranks(go_on_after_failures, 1, timeout=60, apart=True, env=ENV)[0]
    assert ends == ["", repr(OnPurpose())] * 20
