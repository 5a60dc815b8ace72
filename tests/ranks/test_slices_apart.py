"""Ranks that differ around slices of a smaller group: right, or an error that names them.

Over messages a backward gathers slices between two of four ranks, so that the ranks wait in
collectives of several groups.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import Branches
from parity import Tolerance, total
from torch import Tensor, nn

import fsdp_c

MESSAGES = {"FSDP_C_TRANSPORT": "callback"}
LONG_S = 30  # nobody waits for the deadline of the process group


def sharded() -> Any:
    torch.manual_seed(1)
    model: Any = Branches()
    for block in model.blocks:
        fsdp_c.fully_shard(block, mesh=cached_mesh((4,)), reshard_after_forward=2)
    fsdp_c.fully_shard(model, mesh=cached_mesh((4,)))
    return model


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int, step: int = 0) -> None:
    total(model(data(rank, step))).backward()
    model.zero_grad()


def skip_a_unit(model: Any, rank: int) -> None:
    total(model(data(rank), use=(0, 2) if rank == 1 else (0, 1, 2))).backward()


def call_twice(model: Any, rank: int) -> None:
    total(model(data(rank), use=(0, 0, 1, 2) if rank == 1 else (0, 1, 2))).backward()


def call_again(model: Any, rank: int) -> None:
    """The other ranks are in backward by then, of which the first collective is of few ranks."""
    total(model(data(rank), use=(0, 1, 2, 2) if rank == 1 else (0, 1, 2))).backward()


def skip_in_backward(model: Any, rank: int) -> None:
    output = model(data(rank))
    if rank != 1:
        total(output).backward()
    else:
        train(model, rank)


def reshard_alone(model: Any, rank: int) -> None:
    output = model(data(rank))
    if rank == 1:
        model.blocks[1].reshard()
    total(output).backward()


def raise_alone(model: Any, rank: int) -> None:
    output = model(data(rank))
    if rank == 1:
        output.register_hook(fail)
    total(output).backward()


def fail(grad: Tensor) -> None:
    raise RuntimeError("for the test, on rank 1")


def apart(rank: int, n_ranks: int, body: Callable[[Any, int], None]) -> tuple[str, float]:
    model = sharded()
    for step in range(2):
        train(model, rank, step)
    begin = time.monotonic()
    try:
        body(model, rank)
    except (RuntimeError, TimeoutError) as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


BODIES = [skip_a_unit, call_twice, call_again, skip_in_backward, reshard_alone]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_over_messages(body: Callable[[Any, int], None]) -> None:
    answers = run_ranks(apart, 4, body, apart=True, env=MESSAGES, timeout=2 * LONG_S)
    assert all("rank" in text and "1" in text for text, _ in answers), answers
    assert all(seconds < LONG_S for _, seconds in answers), answers


def raising(rank: int, n_ranks: int) -> list[tuple[str, float]]:
    """Often, since it depends on who comes first whether a rank has met the others before."""
    found = []
    for _ in range(8):
        found.append(apart(rank, n_ranks, raise_alone))
        dist.barrier()
    return found


def test_exceptions_over_messages() -> None:
    """A rank that never comes to the collectives of its smaller group ends those of all groups."""
    answers = run_ranks(raising, 4, apart=True, env=MESSAGES, timeout=2 * LONG_S)
    for rank, found in enumerate(answers):
        wanted = "for the test" if rank == 1 else "left the backward of step 3 by an exception"
        assert all(wanted in text and seconds < LONG_S for text, seconds in found), answers


def shared(rank: int, n_ranks: int) -> None:
    """In shared memory ranks may use different units."""
    model = sharded()
    torch.manual_seed(1)
    plain = Branches()
    tolerance = Tolerance.of(4)
    uses = [(0, 1, 2), (0, 2), (1,), (2, 0, 0)]
    for step in range(4):
        total(model(data(rank, step), use=uses[(rank + step) % 4])).backward()
        for peer in range(4):
            use = uses[(peer + step) % 4]
            (total(plain(data(peer, step), use=use)) / 4).backward()
        for name, param in plain.named_parameters():
            grad = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(
                grad, param.grad, rtol=tolerance.relative, atol=tolerance.scaled, msg=name
            )
        model.zero_grad()
        plain.zero_grad()


def test_in_shared_memory() -> None:
    run_ranks(shared, 4)
