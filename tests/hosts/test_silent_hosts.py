"""Hosts that fall silent: their lines do not break, and nothing arrives."""

import datetime
import gc
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
from harness import RankOutcome
from hosts import Network, require_hosts, run_hosts

LIMIT = datetime.timedelta(seconds=60)
HOST_TIMEOUT = {"FSDP_C_HOST_TIMEOUT": "6"}


def train(rank: int, n_ranks: int, folder: str, n_steps: int) -> tuple[str, float]:
    """What ended it, and how long that took after all were there."""
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    dist.barrier()
    Path(folder, str(rank)).touch()
    began = time.monotonic()
    try:
        for step in range(n_steps):
            model(models.data(rank, step)).square().mean().backward()
            time.sleep(0.01)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)])
def test_a_host_that_loses_its_network(hosts: tuple[int, ...], tmp_path: Path) -> None:
    """On both sides of the cable; the ranks of a host end together."""
    require_hosts()
    network = Network(harness.launcher_for({}))

    def pull() -> None:
        while len(list(tmp_path.iterdir())) < sum(hosts):
            time.sleep(0.05)
        time.sleep(0.5)
        network.pull_cable(1)

    puller = threading.Thread(target=pull, daemon=True)
    puller.start()
    try:
        ended = run_hosts(
            train, hosts, str(tmp_path), 100_000, network=network, env=HOST_TIMEOUT, timeout=50
        )
    finally:
        network.close()
    for rank, (text, seconds) in enumerate(ended):
        other = "host0" if rank >= hosts[0] else "host1"
        assert "nothing has been heard of" in text and f"(host {other})" in text, ended
        assert seconds < 25, ended


def train_stopped(rank: int, n_ranks: int, seconds: float) -> str:
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    dist.barrier()
    if rank == n_ranks - 1:
        words = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", words])
        time.sleep(0.2)
    for step in range(3):
        model(models.data(rank, step)).square().mean().backward()
    return "through"


def stopped(hosts: tuple[int, ...]) -> list[RankOutcome]:
    return run_hosts(train_stopped, hosts, 7, timeout=50, fresh=True)


def test_a_host_that_stops_for_a_while_is_named_and_waited_for() -> None:
    outcomes = stopped((1, 1))
    assert [outcome.value for outcome in outcomes] == ["through"] * 2, outcomes
    line = r"rank 0 has waited \d s for rank 1 \(host host1\); nothing has been heard of host host1"
    assert re.search(line, outcomes[0].output), outcomes


def test_a_process_that_stops_beside_others() -> None:
    outcomes = stopped((2, 2))
    assert [outcome.value for outcome in outcomes] == ["through"] * 4, outcomes
    line = "for rank 3 (host host1); its process does not answer (is it stopped?); others of host"
    assert line in outcomes[1].output, outcomes


def train_late(rank: int, n_ranks: int) -> str:
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    if rank == n_ranks - 1:
        time.sleep(7)
    model(models.data(rank, 0)).square().mean().backward()
    return "through"


def test_a_rank_that_does_something_else() -> None:
    """It answers for longer than a silent host is waited for: where it is stands in the notice."""
    outcomes = run_hosts(
        train_late, (1, 1), timeout=50, fresh=True, env={"FSDP_C_HOST_TIMEOUT": "2"}
    )
    assert [outcome.value for outcome in outcomes] == ["through"] * 2, outcomes
    assert "for rank 1 (host host1); it is at" in outcomes[0].output, outcomes
    assert "in train_late" in outcomes[0].output, outcomes


def look_on(rank: int, n_ranks: int) -> bool:
    """A collective over a group of several backends, which counts none, lasts for some looks."""
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    mixed = dist.new_group(backend="cpu:gloo")
    if rank == 1:
        time.sleep(3)
    dist.all_reduce(torch.ones(1), group=mixed)
    return any(thread.name == "fsdp_c hosts" for thread in threading.enumerate())


def test_a_group_without_numbers_ends_no_looks() -> None:
    outcomes = run_hosts(look_on, (1, 1), timeout=40, fresh=True)
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes


def train_in_two_worlds(rank: int, n_ranks: int, folder: str) -> str:
    """The second one has a store of its own, ranks in the other order, and one that is late."""
    import fsdp_c

    def begin(world: int) -> None:
        place = Path(folder, str(world))
        if rank == 0:
            store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, n_ranks, True, LIMIT, False)
            place.with_suffix(".new").write_text(str(store.port))
            place.with_suffix(".new").rename(place)
        else:
            while not place.exists():
                time.sleep(0.05)
            port = int(place.read_text())
            store = dist.TCPStore(os.environ["MASTER_ADDR"], port, n_ranks, False, LIMIT)
        number = (rank + world) % n_ranks
        dist.init_process_group("gloo", store=store, rank=number, world_size=n_ranks, timeout=LIMIT)

    for world in range(2):
        dist.destroy_process_group()
        gc.collect()
        begin(world)
        model: Any = models.Net()
        models.shard_blocks(model, fsdp_c)
        for _ in range(2):
            model(models.data(rank, 0)).square().mean().backward()
            if rank == n_ranks - 1:
                time.sleep(7 * world)
        dist.barrier()
        del model
    return "through"


def test_a_second_world_has_looks_of_its_own(tmp_path: Path) -> None:
    outcomes = run_hosts(
        train_in_two_worlds,
        (1, 1),
        str(tmp_path),
        timeout=60,
        fresh=True,
        env={"FSDP_C_HOST_TIMEOUT": "2"},
    )
    assert [outcome.value for outcome in outcomes] == ["through"] * 2, outcomes
    told = r"rank 1 has waited \d+ s for rank 0 \(host host1\); it is at .* in train_in_two_worlds"
    assert re.search(told, outcomes[0].output), outcomes


def gather_alone(rank: int, n_ranks: int, who: int) -> str:
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    try:
        if rank == who:
            next(model.parameters()).full_tensor()
        for step in range(2):
            model(models.data(rank, step)).square().mean().backward()
    except RuntimeError as error:
        print(f"<{error}>", flush=True)
        os._exit(0)  # as a script does, which ends the waits of the others
    return "through"


@pytest.mark.parametrize("who", [0, 2])
def test_a_collective_that_one_rank_calls_alone(who: int) -> None:
    """Counts of messages between hosts, which differ, are not taken for those of collectives."""
    outcomes = run_hosts(gather_alone, (2, 1), who, timeout=40, fresh=True)
    texts = "".join(outcome.output for outcome in outcomes if outcome.rank != who)
    told = r"is in a gather of full parameters \(.*\) that rank \d has not called: is it saving"
    assert re.search(told, texts) and "in gather_alone" in texts, outcomes
    assert all(outcome.value is None and "<" in outcome.output for outcome in outcomes), outcomes


def wait_for_another_host(rank: int, n_ranks: int) -> float:
    """Rank 1 has called the collective, too, in which rank 0 waits for rank 2, and goes on."""
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    total = torch.ones(1)
    if rank == 2:
        time.sleep(5)
    work: Any = dist.all_reduce(total, async_op=True) if rank == 1 else dist.all_reduce(total)
    model(models.data(rank, 0)).square().mean().backward()
    if work is not None:
        work.wait()
    return total.item()


def test_a_collective_that_waits_for_another_host() -> None:
    assert run_hosts(wait_for_another_host, (2, 1), timeout=50) == [3.0] * 3
