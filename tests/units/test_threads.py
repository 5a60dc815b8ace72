"""Ranks that are threads of one process, as torch's own tests run them: fully_shard trains."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from differential.execute import Counting
from models import Net, data, shard_blocks
from parity import full, total
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

N_THREADS = 3


def run_threads(body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns on each of the threads."""
    results: list[Any] = [None] * N_THREADS
    store = dist.HashStore()

    def thread(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=N_THREADS, store=store)
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(N_THREADS)]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def train(rank: int, fsdp: Any, is_counted: bool) -> dict[str, Any]:
    """Two steps; the weights after them, and whether the core ran them."""
    model = built[rank]
    shard_blocks(model, fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        with Counting() if is_counted else contextlib.nullcontext():
            total(model(data(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: full(parameter) for name, parameter in model.named_parameters()}
    is_core = getattr(model._get_fsdp_state()._fsdp_param_group, "_is_bound", False)
    return {"weights": weights, "is_core": is_core}


# Here, because threads share one generator of random numbers.
built: list[Net] = []


def build() -> None:
    built.clear()
    for _ in range(N_THREADS):
        harness.seed_everything(1)
        built.append(Net())


def see(is_counted: bool) -> None:
    theirs, ours = [], []
    for fsdp, seen in ((torch_fsdp, theirs), (harness.implementation(), ours)):
        build()
        seen += run_threads(lambda rank, fsdp=fsdp: train(rank, fsdp, is_counted))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine["weights"], other["weights"])
    is_core = harness.implementation() is not torch_fsdp
    assert all(mine["is_core"] is is_core for mine in ours)


def check_threads(rank: int, n_ranks: int) -> None:
    dist.destroy_process_group()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        # A dispatch mode looks at the collectives.
        see(is_counted=False)
        see(is_counted=True)
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        # The harness leaves a world at the end.
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def test_threads() -> None:
    outcomes = harness.run_ranks(check_threads, 1, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].output
