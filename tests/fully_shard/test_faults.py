"""Backwards and forwards that raise: on all ranks or on one, in Python or in a hook."""

import re
import time
from pathlib import Path

import models
import pytest
import torch
import torch.nn as nn
from callback_net import CallbackNet, sharded
from harness import run_ranks
from snapshots import Net, batch, check_trains
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_c


class Trouble(Exception):
    pass


def recover(rank: int, n_ranks: int, point: str, reset: bool) -> None:
    armed = False

    def probe(here: str) -> None:
        if armed and here == point:
            raise Trouble

    net, reference = sharded(CallbackNet(probe)), Net()
    for round_ in range(3):
        # The first round's exception is in the first iteration of all.
        if round_:
            check_trains(net, reference)
        armed = True
        net.zero_grad()
        with pytest.raises(Trouble):
            net(batch(rank)).square().sum().backward()
        armed = False
        if reset:
            net.reset_iter_state()
        net.zero_grad()
        for param in net.parameters():
            assert param.grad is None
    check_trains(net, reference)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("point", ["in_forward", "in_backward"])
def test_exception_on_all_ranks(point: str, reset: bool, n_ranks: int) -> None:
    run_ranks(recover, n_ranks, point, reset)


def load_after_a_forward_that_raised(rank: int, n_ranks: int, is_hooked: bool) -> None:
    armed = False

    def probe(here: str) -> None:
        if armed and here == "in_forward":
            raise Trouble

    net, reference = sharded(CallbackNet(probe)), Net()
    if is_hooked:
        net.register_forward_hook(lambda *_: None)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(2):
        with torch.no_grad():
            for param in net.parameters():
                param.add_(1.0)
        armed = True
        with pytest.raises(Trouble):
            net(batch(rank))
        armed = False
        net.load_state_dict(before)
        assert all(isinstance(param, DTensor) for param in net.parameters())
        armed = True
        with pytest.raises(Trouble):
            net(batch(rank))
        armed = False
        saved = net.state_dict()
        assert all(isinstance(saved[name], DTensor) for name, _ in net.named_parameters())
    check_trains(net, reference)


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_load_after_a_forward_that_raised(n_ranks: int, is_hooked: bool) -> None:
    run_ranks(load_after_a_forward_that_raised, n_ranks, is_hooked)


def raise_last(rank: int, n_ranks: int, folder: Path) -> None:
    """The last rank reduces a unit and raises when all others have left the backward."""

    def probe(here: str) -> None:
        deadline = time.monotonic() + 30
        if here == "before_second" and rank == n_ranks - 1:
            while len(list(folder.iterdir())) < n_ranks - 1:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        if here == "in_backward":
            raise Trouble

    net = sharded(CallbackNet(probe))
    loss = net(batch(rank)).square().sum()
    with pytest.raises(Trouble):
        loss.backward()
    (folder / str(rank)).touch()
    net.reset_iter_state()
    net.probe = lambda here: None
    check_trains(net, Net())


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_each_rank_raises_its_own_exception(n_ranks: int, tmp_path: Path) -> None:
    run_ranks(raise_last, n_ranks, tmp_path)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def raise_in_hooks(rank: int, n_ranks: int, folder: Path, which: int) -> None:
    """A hook of a shard's gradient raises on all ranks; the last rank's gradients come when the
    others are at the end of their backward."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in net:
        fsdp_c.fully_shard(layer)
    fsdp_c.fully_shard(net)

    def raises(param: nn.Parameter) -> None:
        raise Trouble

    def first(grad: torch.Tensor) -> None:
        if rank == n_ranks - 1:
            for other in range(n_ranks - 1):
                await_file(folder / f"through {other}")

    def last(grad: torch.Tensor) -> None:
        if rank < n_ranks - 1:
            (folder / f"through {rank}").touch()

    handle = net[which].weight.register_post_accumulate_grad_hook(raises)
    x = torch.randn(4, 8, requires_grad=True)
    x.register_hook(last)
    out = net(x)
    out.register_hook(first)
    with pytest.raises(Trouble):
        out.sum().backward()
    handle.remove()
    net.reset_iter_state()
    net.zero_grad()
    net(x.detach()).sum().backward()
    assert all(param.grad is not None for param in net.parameters())


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_each_rank_raises_in_its_own_hook(n_ranks: int, which: int, tmp_path: Path) -> None:
    run_ranks(raise_in_hooks, n_ranks, tmp_path, which)


def one_rank_in_trouble(rank: int, n_ranks: int, point: str) -> list[str]:
    """The last rank skips the rest of an iteration; returns what each iteration came to."""
    armed = False

    def probe(here: str) -> None:
        if armed and here == point and rank == n_ranks - 1:
            raise Trouble

    net, reference = sharded(CallbackNet(probe)), Net()
    check_trains(net, reference)
    results = []
    for step in range(3):
        armed = step == 0
        for param in net.parameters():
            param.grad = None
        try:
            net(batch(rank, step)).square().sum().backward()
            results.append("done")
        except Trouble:
            net.reset_iter_state()
            results.append("trouble")
            continue
        except RuntimeError as error:
            net.reset_iter_state()
            results.append(str(error))
            continue
        if step:
            # Compared without full_tensor(): the others may be waiting elsewhere.
            expected = whole_gradients(reference, n_ranks, step)
            for name, param in net.named_parameters():
                shard = expected[name].chunk(n_ranks)[rank:][:1]
                shard = shard[0] if shard else expected[name][:0]
                torch.testing.assert_close(param.grad.to_local(), shard, rtol=1e-5, atol=1e-6)
    return results


def whole_gradients(reference: nn.Module, n_ranks: int, step: int) -> dict[str, torch.Tensor]:
    reference.zero_grad()
    for rank in range(n_ranks):
        (reference(batch(rank, step)).square().sum() / n_ranks).backward()
    return {name: param.grad for name, param in reference.named_parameters()}


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("point", ["in_forward", "in_backward"])
def test_exception_on_one_rank(point: str, n_ranks: int) -> None:
    outcomes = run_ranks(one_rank_in_trouble, n_ranks, point, fresh=True, timeout=40)
    for outcome in outcomes:
        assert outcome.ok, outcome.error or outcome.output
        print(f"rank {outcome.rank}: {outcome.value}")
    assert outcomes[-1].value[0] == "trouble"
    errors = [
        text for outcome in outcomes for text in outcome.value if text not in ("done", "trouble")
    ]
    for text in errors:
        assert re.search(r"rank \d", text), text


def replicas_in_trouble(rank: int, n_ranks: int, who: int) -> list[str]:
    """One rank of a shard group leaves a forward; all leave that one, and no other."""
    mesh = init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("replicate", "shard"))
    armed = False

    def probe(here: str) -> None:
        if armed and here == "in_forward" and rank == who:
            raise Trouble

    net = CallbackNet(probe)
    for layer in (net.first, net.second):
        fsdp_c.fully_shard(layer, mesh=mesh)
    fsdp_c.fully_shard(net, mesh=mesh)
    results = []
    for step in range(5):
        armed = step == 2
        net.zero_grad()
        try:
            net(batch(rank, step)).square().sum().backward()
            results.append("done")
        except (Trouble, RuntimeError) as error:
            net.reset_iter_state()
            results.append(str(error) or "trouble")
    return results


@pytest.mark.parametrize("who", [0, 3])
def test_all_replicas_leave_a_forward_that_one_rank_left(who: int) -> None:
    outcomes = run_ranks(replicas_in_trouble, 4, who, env={"FSDP_C_TRANSPORT": "shm"})
    for rank, found in enumerate(outcomes):
        assert found[:2] + found[3:] == ["done"] * 4, outcomes
        wanted = "^trouble$" if rank == who else r"^rank \d left the forward of step 3 by an excep"
        assert re.search(wanted, found[2]), outcomes


def raises_and_is_gone(rank: int, n_ranks: int, point: str) -> tuple[str, float]:
    """The last rank raises in the second step and makes no other; the others have one wait."""
    armed = False

    def probe(here: str) -> None:
        if armed and here == point and rank == n_ranks - 1:
            raise Trouble

    net = sharded(CallbackNet(probe))
    began = time.monotonic()
    try:
        for step in range(3):
            armed = step == 1
            net(batch(rank, step)).square().sum().backward()
    except Trouble:
        return "trouble", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "through", 0.0


@pytest.mark.parametrize("transport", ["shm", "callback"])
@pytest.mark.parametrize("point", ["in_forward", "in_backward"])
def test_one_rank_raises_and_is_gone(point: str, transport: str) -> None:
    """Its process lives on: nobody waits for it until the group's deadline."""
    found = run_ranks(raises_and_is_gone, 3, point, env={"FSDP_C_TRANSPORT": transport}, timeout=40)
    assert found[2] == ("trouble", 0.0)
    for text, seconds in found[:2]:
        assert f"rank 2 left the {point.removeprefix('in_')} of step 2" in text, found
        assert seconds < 20, found


class Enough(Exception):
    """A hook's, which ends a forward as soon as what is wanted is there."""


def stops_early(rank: int, n_ranks: int) -> None:
    """Features are taken by a hook that ends the forward; their loss goes backward."""

    def features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        taken = []

        def take(module: nn.Module, args: object, out: torch.Tensor) -> None:
            taken.append(out)
            raise Enough

        handle = model.blocks[1].register_forward_hook(take)
        with pytest.raises(Enough):
            model(x)
        handle.remove()
        return taken[0]

    torch.manual_seed(0)
    plain = models.Net()
    torch.manual_seed(0)
    model = models.Net()
    models.shard_blocks(model, fsdp_c)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        features(model, models.data(rank, step)).square().mean().backward()
        for peer in range(n_ranks):
            (features(plain, models.data(peer, step)).square().mean() / n_ranks).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("transport", ["shm", "callback"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_hook_ends_forward_early(n_ranks: int, transport: str) -> None:
    run_ranks(stops_early, n_ranks, env={"FSDP_C_TRANSPORT": transport})
