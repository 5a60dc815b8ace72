"""Ranks that do different things with a model: an error on all of them that says who did what.

Under torch such a script hangs, ends by SIGABRT or goes on with wrong weights.
"""

import copy
import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
from differential.ways import APART, SAID, TRANSPORTS, WAYS, Trial
from models import Branches, data, shard_blocks
from torch import Tensor, nn

from fsdp_c._comm import _transport

STEPS = 5
ODD_STEP = 2  # in which the last rank differs


def make_trial(rank: int, **policies: Any) -> Trial:
    torch.manual_seed(0)
    model: Any = Branches()
    plain = copy.deepcopy(model)
    shard_blocks(model, harness.implementation(), **policies)
    return Trial(model, plain, list(model.blocks), lambda step: data(rank, step))


def differ(rank: int, n_ranks: int, name: str) -> tuple[str, int]:
    trial = make_trial(rank)
    try:
        for step in range(STEPS):
            if step == ODD_STEP and rank == n_ranks - 1:
                WAYS[name](trial, step)
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
    answers = harness.run_ranks(
        differ_in_turn, 2, apart=True, env=TRANSPORTS[transport], timeout=90
    )
    for name, pattern in SAID.items():
        for answer in answers:
            assert re.search(pattern, answer[name][0], re.DOTALL), (name, answer[name])
    for name in ("loss_passed_over", "backward_left_out", "caught_between"):
        assert answers[0][name][1] == ODD_STEP  # nobody has stepped with half a sum


def differ_unseen(rank: int, n_ranks: int) -> dict[str, tuple[str, int]]:
    with mock.patch.object(_transport, "watch_for", lambda group: None):
        return {name: differ(rank, n_ranks, name) for name in WAYS if name != "unequal_sync"}


def test_ranks_of_several_hosts_exchange_words() -> None:
    """Who shares no memory is told by 64 bytes before the first collective of a phase."""
    answers = harness.run_ranks(
        differ_unseen, 2, apart=True, env=TRANSPORTS["messages"], timeout=90
    )
    for answer in answers:
        for name, (text, _) in answer.items():
            assert re.search(f"{APART}|gradients on rank", text), (name, text)


def two_pass_over(rank: int, n_ranks: int, shape: tuple[int, ...], naps: dict[int, float]) -> str:
    mesh = harness.cached_mesh(shape, ("replicate", "shard")[-len(shape) :])
    trial = make_trial(rank, mesh=mesh)
    try:
        for step in range(STEPS):
            if step == ODD_STEP and rank >= 2:
                WAYS["loss_passed_over"](trial, step)
                time.sleep(naps.get(rank, 0))
            elif step == ODD_STEP:
                loss = trial.loss(step)
                time.sleep(naps.get(rank, 0))
                loss.backward()
            else:
                trial.step(step)
    except RuntimeError as error:
        return str(error)
    return ""


# Rank 1 learns of it from rank 0, and has ended when rank 3 comes.
ONE_BY_ONE = {1: 1.0, 3: 2.0}


@pytest.mark.parametrize("naps", [{}, ONE_BY_ONE], ids=["together", "one_by_one"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_all_that_pass_over_are_told(shape: tuple[int, ...], naps: dict[int, float]) -> None:
    """Also by ranks that learned of it in another mesh, before the last one passed over it."""
    answers = harness.run_ranks(two_pass_over, 4, shape, naps, timeout=30)
    for text in answers:
        assert "went on to the forward of step 4 without the backward of step 3" in text, answers


def freeze_on_one_rank(rank: int, n_ranks: int) -> dict[str, str]:
    """What the last rank says, and the others then, of parameters that it alone has frozen."""
    said = {}
    for frozen in ("blocks.1.down.weight", "blocks.1"):
        for kept in (False, True):
            trial = make_trial(rank)
            try:
                for step in range(STEPS):
                    if step == ODD_STEP and rank == n_ranks - 1:
                        for name, shard in trial.model.named_parameters():
                            shard.requires_grad_(not name.startswith(frozen))
                    trial.model.set_requires_gradient_sync(not kept)
                    trial.loss(step).backward()
                    trial.model.set_requires_gradient_sync(True)
                    trial.step(step)
                dist.barrier()
                text = ""
            except RuntimeError as error:
                text = str(error)
            said[f"{frozen}, {kept}"] = text
    return said


@pytest.mark.parametrize("transport", ["shared memory", "messages", "device"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_frozen_on_one_rank(n_ranks: int, transport: str) -> None:
    answers = harness.run_ranks(
        freeze_on_one_rank, n_ranks, apart=True, env=TRANSPORTS[transport], timeout=90
    )
    for answer in answers:
        for case, text in answer.items():
            assert re.search("frozen .*on rank .*has a gradient|with gradients", text), (case, text)
    if transport == "shared memory":
        for case, text in answers[0].items():
            assert f"on rank {n_ranks - 1}, and rank " in text, (case, text)


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
    trial = make_trial(rank)
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
    assert re.search(
        r"rank 0 \(pid \d+\) was killed, or left|connection", outcomes[1].output, re.IGNORECASE
    )
