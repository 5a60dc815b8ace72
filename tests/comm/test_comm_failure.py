"""What Python sees when ranks of a Communicator disagree, die, come late, stop or fork."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks


def open_communicator(timeout_s=60.0):
    from fsdp_c._comm._communicator import Communicator

    ranks = list(range(dist.get_world_size()))
    return Communicator(dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)))


def check_disagree(rank, n_ranks):
    comm = open_communicator()
    output = torch.full((n_ranks * 4 * (rank + 1),), 7.0)
    with pytest.raises(
        RuntimeError, match="rank 0 all_gather of 16 bytes.*rank 1 all_gather of 32"
    ):
        comm.all_gather(output, torch.zeros(4 * (rank + 1)))
    assert torch.equal(output, torch.full_like(output, 7.0))
    with pytest.raises(RuntimeError, match="cannot be used any more.*all_gather of 32"):
        comm.barrier()


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_disagree(n_ranks):
    run_ranks(check_disagree, n_ranks)


def check_killed(rank, n_ranks):
    comm = open_communicator()
    pids = torch.zeros(n_ranks, dtype=torch.int64)
    comm.all_gather(pids, torch.tensor([os.getpid()]))
    data = torch.ones(1000)
    for step in range(200):
        if rank == n_ranks - 1 and step == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(data, float(n_ranks))
        except RuntimeError as error:
            return f"{error}", int(pids[n_ranks - 1])
    return None


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_killed(n_ranks):
    outcomes = run_ranks(check_killed, n_ranks, fresh=True)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        text, pid = outcome.value
        assert f"rank {n_ranks - 1} (pid {pid}) was killed, or left by os._exit" in text
        assert "all_reduce (step" in text


def check_late(rank, n_ranks):
    comm = open_communicator(timeout_s=1.0)
    comm.barrier()
    if rank == 1:
        time.sleep(2.5)
    try:
        comm.barrier()
        comm.barrier()
    except (TimeoutError, RuntimeError) as error:
        return type(error).__name__, f"{error}"
    return None


def test_late():
    waited, late = (outcome.value for outcome in run_ranks(check_late, 2, fresh=True))
    assert waited[0] == "TimeoutError"
    assert "rank 1 did not come within 1 s while rank 0 waited" in waited[1]
    assert late is not None
    assert "rank 1 did not come within 1 s" in late[1]


def check_late_at_setup(rank, n_ranks):
    """A rank that never makes its communicator: the others name it."""
    group = dist.new_group(list(range(n_ranks)), timeout=timedelta(seconds=1))
    if rank == 0:
        from fsdp_c._comm._communicator import Communicator

        with pytest.raises(TimeoutError, match=r"ranks \[1\] in the set-up .*choice of transport"):
            Communicator(group)


def test_late_at_setup():
    outcomes = run_ranks(check_late_at_setup, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes


def check_interrupt(rank, n_ranks):
    comm = open_communicator()
    if rank == 0:
        progress = []
        worker = threading.Thread(target=lambda: progress.append(1))
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        timer.join()
        # Other threads ran while this one waited: the timer did, or there were no interrupt.
        worker.start()
        worker.join()
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(RuntimeError, match="rank 0 failed: interrupted"):
        comm.barrier()


def test_interrupt():
    outcomes = run_ranks(check_interrupt, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes


def check_fork(rank, n_ranks):
    """A forked child cannot use the parent's communicator, and its end does not disturb it."""
    comm = open_communicator()
    comm.barrier()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            comm.barrier()
        except RuntimeError as error:
            code = 0 if "forked child" in str(error) else 2
        comm.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    data = torch.ones(3)
    comm.all_reduce(data)
    assert torch.equal(data, torch.full((3,), float(n_ranks)))


def test_fork():
    run_ranks(check_fork, 2)


def check_two_threads(rank, n_ranks):
    """A second thread that comes in while the first one waits is refused, not mixed in."""
    comm = open_communicator()
    if rank == 1:
        dist.barrier()
        comm.barrier()
        return
    errors = []

    def attempt():
        try:
            comm.barrier()
        except RuntimeError as error:
            errors.append(f"{error}")
            # Only now the peer comes, so the first thread was in the call all the time.
            dist.barrier()

    waiter = threading.Thread(target=attempt)
    waiter.start()
    attempt()
    waiter.join()
    assert errors == ["another thread is in a collective of this communicator"]


def test_two_threads():
    outcomes = run_ranks(check_two_threads, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
