"""Tests of the harness itself: results, failures, ends of ranks, and hangs that become failures."""

import os
import signal
import time

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks

from fsdp_c import _native


def add_up(rank: int, n_ranks: int, start: int) -> tuple[int, float]:
    total = torch.tensor(float(start + rank))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def raise_on_one(rank: int, n_ranks: int) -> None:
    if rank == 1:
        raise ValueError("the second rank does not like this")


def hang_on_one(rank: int, n_ranks: int) -> None:
    if rank == 1:
        sleep_long_with_a_name()


def sleep_long_with_a_name() -> None:
    time.sleep(1000)


def end_in_three_ways(rank: int, n_ranks: int) -> str:
    print("rank", rank, "was here", flush=True)
    if rank == 1:
        os._exit(7)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def read_variable(rank: int, n_ranks: int, name: str) -> str | None:
    return os.environ.get(name)


def kernels_in_use(rank: int, n_ranks: int) -> str:
    return _native._C.kernels()


def skip_here(rank: int, n_ranks: int) -> None:
    pytest.skip("not today")


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_results_and_reuse(n_ranks: int) -> None:
    first = run_ranks(add_up, n_ranks, 10)
    second = run_ranks(add_up, n_ranks, 10)
    assert first == second  # the process ids too: the ranks are kept
    assert {total for _, total in first} == {sum(10.0 + rank for rank in range(n_ranks))}


def test_exception_of_a_rank() -> None:
    before = run_ranks(add_up, 2, 0)
    with pytest.raises(RankFailure, match="the second rank does not like this") as caught:
        run_ranks(raise_on_one, 2)
    assert caught.value.rank == 1
    assert caught.value.exc_type == "ValueError"
    assert "raise_on_one" in str(caught.value)
    after = run_ranks(add_up, 2, 0)
    assert {pid for pid, _ in before}.isdisjoint({pid for pid, _ in after})


def test_hang_shows_stack() -> None:
    with pytest.raises(RankFailure, match="sleep_long_with_a_name"):
        run_ranks(hang_on_one, 2, timeout=2)


def test_fresh_ranks_end() -> None:
    outcomes = run_ranks(end_in_three_ways, 3, fresh=True)
    assert [outcome.exit_code for outcome in outcomes] == [0, 7, -signal.SIGKILL]
    assert [outcome.value for outcome in outcomes] == ["fine", None, None]
    assert all(f"rank {outcome.rank} was here" in outcome.output for outcome in outcomes)


def test_dead_rank_in_the_pool() -> None:
    with pytest.raises(RankFailure, match="exit code 7"):
        run_ranks(end_in_three_ways, 2)


def test_environment() -> None:
    assert run_ranks(read_variable, 2, "FSDP_C_PROBE", env={"FSDP_C_PROBE": "yes"}) == ["yes"] * 2
    assert run_ranks(read_variable, 2, "FSDP_C_PROBE") == [None] * 2


def test_worlds_of_settings() -> None:
    """Calls with the same variables share ranks, which those of others are not."""
    settings: list[dict[str, str] | None] = [None, *({"FSDP_C_PROBE": f"{n}"} for n in range(4))]
    worlds = [{pid for pid, _ in run_ranks(add_up, 2, 0, env=env)} for env in settings]
    assert len(set.union(*worlds)) == 2 * len(settings)
    for env, world in [(settings[0], worlds[0]), (settings[-1], worlds[-1])]:
        assert {pid for pid, _ in run_ranks(add_up, 2, 0, env=env)} == world
    kept = [pool for pool in harness.Pool.pools.values() if pool.n_ranks == 2]
    assert len(kept) == 1 + harness.WITH_SETTINGS_MAX  # the one used longest ago has ended
    apart = run_ranks(add_up, 2, 0, env=settings[-1], apart=True)
    assert {pid for pid, _ in apart}.isdisjoint(worlds[-1])
    kernels = {"FSDP_C_KERNELS": "ref"}
    assert run_ranks(kernels_in_use, 1, env=kernels) == ["ref"]


def test_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_ranks(skip_here, 1)


def test_stop_and_restart() -> None:
    run_ranks(add_up, 2, 0)
    harness.stop()
    assert run_ranks(add_up, 2, 0)[0][1] == 1.0
