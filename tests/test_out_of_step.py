"""Ranks that do different things with a model: an error on all of them that says who did what.

Under torch such a script hangs, ends by SIGABRT or goes on with wrong weights.
"""

import os
import random
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
from models import Branches, data, shard_blocks
from parity import total
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_c
from fsdp_c import _comm

STEPS = 5
ODD_STEP = 2  # in which the last rank differs
TRANSPORTS = {
    "shared memory": {},
    "messages": {"FSDP_C_TRANSPORT": "callback"},
    "device": {"FSDP_C_DEVICES": "cpu"},
}


class Trial:
    """A training loop of which a way replaces a step."""

    def __init__(self, rank: int, **policies: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Branches()
        shard_blocks(self.model, harness.implementation(), **policies)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rank = rank
        self.n_steps = 0

    def loss(self, step: int) -> Tensor:
        return total(self.model(data(self.rank, step)))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n_steps += 1

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.update()


WAYS: dict[str, tuple[Callable[[Trial, int], None], str]] = {}


def way(pattern: str) -> Callable[[Callable[[Trial, int], None]], Callable[[Trial, int], None]]:
    def add(body: Callable[[Trial, int], None]) -> Callable[[Trial, int], None]:
        WAYS[body.__name__] = body, pattern
        return body

    return add


APART = "ranks are out of step"


@way("out of step: step 3 begins in the forward of .root. on rank 0, .* blocks.0 on rank 1")
def units_without_root(trial: Trial, step: int) -> None:
    x = data(trial.rank, step)
    for block in (trial.model.blocks[0], trial.model.blocks[2]):
        x = block(x)
    total(x).backward()
    trial.update()


@way("out of step: step 3 begins in the forward of .root. on rank 0, .* blocks.1 on rank 1")
def a_sequential_of_some_units(trial: Trial, step: int) -> None:
    total(nn.Sequential(*trial.model.blocks[1:])(data(trial.rank, step))).backward()
    trial.update()


@way(APART)
def one_more_forward(trial: Trial, step: int) -> None:
    trial.loss(step)
    trial.step(step)


@way(APART)
def one_more_forward_after_backward(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.loss(step)
    trial.update()


@way("out of step: step 3 begins in the forward of .root. on rank 0, .* blocks.1 on rank 1")
def one_more_forward_of_a_unit(trial: Trial, step: int) -> None:
    trial.model.blocks[1](data(trial.rank, step))
    trial.step(step)


@way(f"{APART} at unit .*begins after 3 optimizer steps .* of rank 0, and after 2 .* of rank 1")
def one_more_forward_and_backward(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.step(step)


@way("rank 1 went on to the forward of step 4 without the backward of step 3 that rank 0 is in")
def loss_passed_over(trial: Trial, step: int) -> None:
    trial.loss(step)


@way("rank 1 went on to the forward of step 4 without the backward of step 3 .*2 on rank 0")
def backward_left_out(trial: Trial, step: int) -> None:
    trial.loss(step)
    trial.update()


@way("is a forward with(out)? gradients on rank .* and a forward with(out)? gradients on rank")
def one_more_forward_without_gradients(trial: Trial, step: int) -> None:
    with torch.no_grad():
        trial.loss(step)
    trial.step(step)


@way(rf"{APART}.*the backward of step 3 \(number 2 of it\) that rank 1 is in")
def two_backwards(trial: Trial, step: int) -> None:
    loss = trial.loss(step)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()
    trial.update()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 2 .* of rank 1")
def step_left_out(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.optimizer.zero_grad()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 4 .* of rank 1")
def two_steps(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.optimizer.step()
    trial.update()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 7 .* of rank 1")
def load_alone(trial: Trial, step: int) -> None:
    trial.step(step)
    whole = {name: param.detach() for name, param in Branches().named_parameters()}
    fsdp_c.load_full(trial.model, whole)


@way("rank 1 keeps the gradients|set_requires_gradient_sync")
def unequal_sync(trial: Trial, step: int) -> None:
    trial.model.set_requires_gradient_sync(False)
    trial.step(step)
    trial.model.set_requires_gradient_sync(True)


@way("rank 1 went on to the forward of step 4 without the backward of step 3")
def caught_between(trial: Trial, step: int) -> None:
    try:
        trial.loss(step)
        raise torch.OutOfMemoryError("no memory for the loss")
    except torch.OutOfMemoryError:
        trial.optimizer.zero_grad()


def differ(rank: int, n_ranks: int, name: str) -> tuple[str, int]:
    trial = Trial(rank)
    try:
        for step in range(STEPS):
            if step == ODD_STEP and rank == n_ranks - 1:
                WAYS[name][0](trial, step)
            else:
                trial.step(step)
        dist.barrier()
    except RuntimeError as error:
        return str(error), trial.n_steps
    return "", trial.n_steps


def differ_in_turn(rank: int, n_ranks: int) -> dict[str, tuple[str, int]]:
    """A model for each way; the ranks go on after each error."""
    return {name: differ(rank, n_ranks, name) for name in WAYS}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_say_who_did_what(transport: str) -> None:
    answers = harness.run_ranks(differ_in_turn, 2, env=TRANSPORTS[transport], timeout=90)
    for name, (_, pattern) in WAYS.items():
        for answer in answers:
            assert re.search(pattern, answer[name][0], re.DOTALL), (name, answer[name])
    for name in ("loss_passed_over", "backward_left_out", "caught_between"):
        assert answers[0][name][1] == ODD_STEP  # nobody has stepped with half a sum


def differ_by_chance(rank: int, n_ranks: int, seed: int) -> tuple[str, str]:
    """Some way, rank, step and policies; all ranks draw the same."""
    rng = random.Random(seed)
    way = rng.choice(sorted(WAYS))
    odd_rank, odd_step = rng.randrange(n_ranks), rng.randrange(1, 3)
    policies: dict[str, Any] = {"reshard_after_forward": rng.choice([None, True, False])}
    if rng.random() < 0.4:
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if n_ranks == 4 and rng.random() < 0.6:
        policies["mesh"] = harness.cached_mesh((2, 2), ("replicate", "shard"))
    trial = Trial(rank, **policies)
    described = f"{way} by rank {odd_rank} of {n_ranks} in step {odd_step}, {policies}"
    try:
        for step in range(odd_step + 3):
            is_odd = step == odd_step and rank == odd_rank
            (WAYS[way][0] if is_odd else Trial.step)(trial, step)
    except RuntimeError as error:
        return str(error), described
    return "", described


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(8))
def test_none_is_silent(seed: int, transport: str) -> None:
    n_ranks = 2 + seed % 3
    answers = harness.run_ranks(
        differ_by_chance, n_ranks, seed, env=TRANSPORTS[transport], timeout=40
    )
    for text, described in answers:
        assert "rank" in text, (described, answers)


def differ_unseen(rank: int, n_ranks: int) -> dict[str, tuple[str, int]]:
    with mock.patch.object(_comm, "watch_for", lambda group: None):
        return {name: differ(rank, n_ranks, name) for name in WAYS if name != "unequal_sync"}


def test_ranks_of_several_hosts_exchange_words() -> None:
    """Who shares no memory is told by 64 bytes before the first collective of a phase."""
    answers = harness.run_ranks(differ_unseen, 2, env=TRANSPORTS["messages"], timeout=90)
    for answer in answers:
        for name, (text, _) in answer.items():
            assert re.search(f"{APART}|gradients on rank", text), (name, text)


def two_pass_over(rank: int, n_ranks: int, shape: tuple[int, ...]) -> str:
    mesh = harness.cached_mesh(shape, ("replicate", "shard")[-len(shape) :])
    trial = Trial(rank, mesh=mesh)
    try:
        for step in range(STEPS):
            if step == ODD_STEP and rank >= 2:
                loss_passed_over(trial, step)
            else:
                trial.step(step)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_all_that_pass_over_are_told(shape: tuple[int, ...]) -> None:
    """Also by ranks that learned of it in another mesh."""
    answers = harness.run_ranks(two_pass_over, 4, shape, timeout=30)
    for text in answers:
        assert "went on to the forward of step 4 without the backward of step 3" in text, answers


def caught_in_forward(trial: Trial, step: int) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a block")

    handle = trial.model.blocks[1].register_forward_pre_hook(fail)
    try:
        trial.loss(step)
    except torch.OutOfMemoryError:
        handle.remove()


def caught_in_backward(trial: Trial, step: int) -> None:
    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory for a gradient")

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = trial.model.blocks[1].register_forward_hook(hook)
    loss = trial.loss(step)
    handle.remove()
    try:
        loss.backward()
    except torch.OutOfMemoryError:
        trial.optimizer.zero_grad()


def catch_alone(rank: int, n_ranks: int, body: Callable[[Trial, int], None]) -> None:
    trial = Trial(rank)
    try:
        for step in range(STEPS):
            (body if step == ODD_STEP and rank == 1 else Trial.step)(trial, step)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", [caught_in_forward, caught_in_backward])
def test_caught_errors_end_the_others(body: Callable[[Trial, int], None], transport: str) -> None:
    """Who has caught one waits for the others, which may catch theirs, and learns how they end."""
    outcomes = harness.run_ranks(
        catch_alone, 2, body, env=TRANSPORTS[transport], fresh=True, timeout=60
    )
    assert re.search("rank 1 left the (for|back)ward of step 3 by an exc", outcomes[0].output)
    assert re.search(r"rank 0 \(pid \d+\) exited|connection", outcomes[1].output, re.IGNORECASE)
