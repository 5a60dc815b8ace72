"""What a script writes within a forward: shards, as a momentum encoder's average of weights, and
unsharded parameters, as weights that are clipped before they are used.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, run_ranks
from models import data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp_c

WIDTH = 6
Update = Callable[[list[Any], list[Any]], None]


def encoder() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def in_place(targets: list[Any], sources: list[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.mul_(0.5).add_(source, alpha=0.5)


def around_the_counters(targets: list[Any], sources: list[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.data.mul_(0.5).add_(source.data, alpha=0.5)


def foreach(targets: list[Any], sources: list[Any]) -> None:
    torch._foreach_lerp_(targets, sources, 0.5)


def local(targets: list[Any], sources: list[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.to_local().mul_(0.5).add_(source.to_local(), alpha=0.5)


UPDATES: dict[str, Update] = {
    "in place": in_place,
    "around the counters": around_the_counters,
    "foreach": foreach,
    "local": local,
}


class Momentum(nn.Module):
    """Updates the second encoder from the first in its forward, before or after it is used."""

    def __init__(self, update: Update, after_use: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.update, self.after_use = update, after_use
        self.online, self.target = encoder(), encoder().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.online(x)
        with torch.no_grad():
            if self.after_use:
                z = self.target(x + 1)
            self.update(list(self.target.parameters()), list(self.online.parameters()))
            if not self.after_use:
                z = self.target(x + 1)
        return (y - z).float().square().sum()


def shard(api: Any, model: Momentum, n_ranks: int, **options: Any) -> Momentum:
    for layer in [*model.online, *model.target]:
        api.fully_shard(layer, mesh=cached_mesh((n_ranks,)), **options)
    return api.fully_shard(model, mesh=cached_mesh((n_ranks,)), **options)


def train(model: nn.Module, rank: int, n_ranks: int) -> list[Tensor]:
    """Losses and shards of three steps and an evaluation; ranks are slow in turn."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen = []
    for step in range(4):
        x = data(rank, step, 4, WIDTH)
        if step % n_ranks == rank:
            torch.randn(200, 200) @ torch.randn(200, 200)
        with torch.set_grad_enabled(step < 3):
            loss = model(x)
        if step < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, FSDPModule):  # evaluation leaves some unsharded
                module.reshard()
        seen += [loss.detach(), *(p.to_local().clone() for p in model.parameters())]
    return seen


@pytest.mark.parametrize("transport", ["", "callback"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_read_after_it_was_written(n_ranks: int, update: str, transport: str) -> None:
    env = {"FSDP_C_TRANSPORT": transport} if transport else {}
    run_ranks(read_after_it_was_written, n_ranks, update, env=env)


def read_after_it_was_written(rank: int, n_ranks: int, update: str) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": bf16}):
        sides = [
            train(shard(api, Momentum(UPDATES[update]), n_ranks, **options), rank, n_ranks)
            for api in (torch_fsdp, fsdp_c)
        ]
        exact = {"rtol": 0, "atol": 0} if n_ranks < 3 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(sides[1], sides[0], **exact)
    trees = [tree for tree in fsdp_c.status().trees if tree.root == Momentum.__name__]
    assert {tree.runs_on for tree in trees} == {"core"}


class Table(nn.Module):
    """Its first row stays zero, with whichever average of tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.online, self.target = (nn.Embedding(8, WIDTH, padding_idx=0) for _ in range(2))
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.online(x)
        with torch.no_grad():
            around_the_counters([self.target.weight], [self.online.weight])
            z = self.target(x)
        return (y - z).square().sum()


@on_ranks(2, 3)
def test_rows_that_no_write_changes(rank: int, n_ranks: int) -> None:
    """All ranks know of a write, whatever it leaves as it was on some."""
    x = torch.arange(rank, 8)
    seen = []
    for api in (torch_fsdp, fsdp_c):
        model = Table()
        for layer in (model.online, model.target):
            api.fully_shard(layer, mesh=cached_mesh((n_ranks,)))
        api.fully_shard(model, mesh=cached_mesh((n_ranks,)))
        optimizer = torch.optim.SGD(model.online.parameters(), lr=0.05)
        losses = []
        for _ in range(3):
            losses.append(model(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append([loss.detach() for loss in losses])
    torch.testing.assert_close(seen[1], seen[0])


@on_ranks(1, 2)
def test_published_copies_may_be_read_before(rank: int, n_ranks: int) -> None:
    """A cast copy is what peers read: the write is for the next use, as under torch."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sides = [
        train(shard(api, Momentum(in_place, after_use=True), n_ranks, mp_policy=policy), rank, 1)
        for api in (torch_fsdp, fsdp_c)
    ]
    torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)


@on_ranks(2)
def test_between_forward_and_backward(rank: int, n_ranks: int) -> None:
    """Backward gathers anew, what was written too."""
    grads = []
    for api in (torch_fsdp, fsdp_c):
        torch.manual_seed(1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = encoder()
        for layer in model:
            api.fully_shard(layer, mesh=cached_mesh((n_ranks,)), mp_policy=policy)
        api.fully_shard(model, mesh=cached_mesh((n_ranks,)), mp_policy=policy)
        loss = model(data(rank, 0, 4, WIDTH)).float().square().sum()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        loss.backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def write_after_use(rank: int, n_ranks: int) -> None:
    model = shard(fsdp_c, Momentum(in_place, after_use=True), n_ranks)
    with pytest.raises(RuntimeError, match=r"'target\.0\.weight' was written on rank \d") as raised:
        train(model, rank, n_ranks)
    assert "FSDP_C_TRANSPORT=callback" in str(raised.value)


def write_on_one_rank(rank: int, n_ranks: int) -> None:
    def update(targets: list[DTensor], sources: list[DTensor]) -> None:
        if rank == 1:
            local(targets, sources)

    texts = {
        0: "rank 1 left the forward of step 1 by an exception",
        1: "of unit target.0 were written within a forward on rank 1 and not on rank 0",
    }
    with pytest.raises(RuntimeError, match=texts[rank]):
        train(shard(fsdp_c, Momentum(update), n_ranks), rank, n_ranks)


@pytest.mark.parametrize("mistake", [write_after_use, write_on_one_rank])
def test_what_peers_may_have_read_is_refused(mistake: Callable[[int, int], None]) -> None:
    run_ranks(mistake, 2)


def test_messages_take_either_order() -> None:
    run_ranks(after_use_over_messages, 2, env={"FSDP_C_TRANSPORT": "callback"})


def after_use_over_messages(rank: int, n_ranks: int) -> None:
    sides = [
        train(shard(api, Momentum(in_place, after_use=True), n_ranks), rank, n_ranks)
        for api in (torch_fsdp, fsdp_c)
    ]
    torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)


# ---- unsharded parameters ----


class Clipped(nn.Module):
    """Writes to its weight before it uses it, in a way that torch's counter does not see."""

    def __init__(self, keeps_alias: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.keeps_alias, self.alias = keeps_alias, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.keeps_alias:
            self.inner.weight.data.clamp_(-0.1, 0.1)
        elif self.alias.numel() == 0:
            self.alias = self.inner.weight.data
        else:  # of the same memory, in every step
            self.alias.clamp_(-0.1, 0.1)
        return self.inner(x)


@pytest.mark.parametrize("keeps_alias", [False, True])
@on_ranks(1, 2)
def test_unsharded_writes_end_with_reshard(rank: int, n_ranks: int, keeps_alias: bool) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": bf16}, {"reshard_after_forward": False}):
        sides = []
        for api in (torch_fsdp, fsdp_c):
            model = nn.Sequential(Clipped(keeps_alias), nn.Linear(WIDTH, WIDTH))
            for module in [*model, model]:
                api.fully_shard(module, mesh=cached_mesh((n_ranks,)), **options)
            sides.append(train(Squared(model), rank, n_ranks))
        torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)


class Squared(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).float().square().sum()
