"""Backwards and forwards that raise: on all ranks or on one, in Python or in a hook."""

import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from callback_net import CallbackNet, sharded
from harness import run_ranks
from snapshots import Net, batch, check_trains
from torch.distributed.tensor import DTensor


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
