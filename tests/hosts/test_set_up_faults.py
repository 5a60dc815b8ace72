"""A rank dies while ranks of several hosts set up how they talk: no line breaks that anybody
reads yet."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import models
import pytest
from hosts import run_hosts

HOST_TIMEOUT_S = 4
LATE_S = 15


def set_up(rank: int) -> tuple[str, float]:
    """What ended it, and how long that took."""
    import fsdp_c

    model = models.Net()
    models.shard_blocks(model, fsdp_c)
    began = time.monotonic()
    try:
        model(models.data(rank, 0))
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def die_in_set_up(rank: int, n_ranks: int, victim: int) -> tuple[str, float]:
    from fsdp_c._comm import _beats

    def meet_and_die(hosts: Any) -> None:
        meet(hosts)
        os.kill(os.getpid(), signal.SIGKILL)

    meet = _beats.meet
    if rank == victim:
        _beats.meet = meet_and_die
    return set_up(rank)


@pytest.mark.parametrize(("hosts", "victim"), [((2, 2), 3), ((2, 2), 1), ((2, 1), 2), ((1, 1), 1)])
def test_a_rank_that_dies_in_set_up(hosts: tuple[int, ...], victim: int) -> None:
    """Its neighbours on its host tell those of other hosts; of a rank alone, signs of life do."""
    env = {"FSDP_C_HOST_TIMEOUT": str(HOST_TIMEOUT_S)}
    outcomes = run_hosts(die_in_set_up, hosts, victim, env=env, timeout=40, fresh=True)
    assert outcomes.pop(victim).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.ok, outcome
        text, seconds = outcome.value
        assert f"rank {victim}" in text and "set-up" in text, outcome
        assert seconds < LATE_S, outcome  # not the process group's timeout


def lose_the_store(rank: int, n_ranks: int, folder: str) -> tuple[str, float]:
    from fsdp_c._comm import _beats

    def meet_alone(hosts: Any) -> None:
        Path(folder, str(rank)).touch()
        while len(list(Path(folder).iterdir())) < n_ranks:
            time.sleep(0.05)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        meet(hosts)

    meet, _beats.meet = _beats.meet, meet_alone
    return set_up(rank)


def test_the_rank_with_the_store_dies_before_others_connect_to_it_again(tmp_path: Path) -> None:
    """torch would try for a minute."""
    env = {"FSDP_C_HOST_TIMEOUT": str(HOST_TIMEOUT_S)}
    outcomes = run_hosts(lose_the_store, (1, 1), str(tmp_path), env=env, timeout=40, fresh=True)
    assert outcomes[1].ok, outcomes
    text, seconds = outcomes[1].value
    assert "rank 0" in text and seconds < LATE_S, outcomes
