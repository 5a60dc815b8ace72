"""What ranks say while they wait: for whom, where its program is, and that it cannot come."""

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from callback_net import CallbackNet, sharded
from harness import cached_mesh, run_ranks
from snapshots import Net, batch, check_trains
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_c._comm import _peer_location, _rendezvous, _transport

# --- a rank that sits in a collective alone ---


def train(net: nn.Module, rank: int, steps: int = 1) -> None:
    for step in range(steps):
        net(batch(rank, step)).square().sum().backward()


def gather_one(net: nn.Module) -> None:
    next(net.parameters()).full_tensor()


def save(net: nn.Module) -> None:
    get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


def meet(net: nn.Module) -> None:
    dist.barrier()


def add_up(net: nn.Module) -> None:
    dist.all_reduce(torch.ones(3))


def spread(net: nn.Module) -> None:
    """Its root waits for all who receive."""
    dist.scatter(torch.ones(1), [torch.ones(1)] * dist.get_world_size(), src=0)


def receive(net: nn.Module) -> None:
    dist.broadcast(torch.ones(1), src=1)


ALONE = {
    gather_one: r"in a gather of full parameters .*:\d+ in gather_one, in DTensor.full_tensor\)",
    save: r"in a gather of full parameters .*:\d+ in save, in get_model_state_dict\)",
    meet: r"in a collective .*:\d+ in meet, in torch.distributed's barrier\)",
    add_up: r"in a collective .*:\d+ in add_up, in torch.distributed's all_reduce\)",
    spread: r"in a collective .*:\d+ in spread, in torch.distributed's scatter\)",
    receive: r"in a collective .*:\d+ in receive, in torch.distributed's broadcast\)",
}


def call_alone(rank: int, n_ranks: int, call: Callable[[nn.Module], None], is_late: bool) -> str:
    net = sharded(Net())
    train(net, rank)
    try:
        if rank == 0:
            call(net)
        elif is_late:
            # The wait of the others' has begun then, or begins after the call.
            time.sleep(0.3)
        train(net, rank, 3)
    except RuntimeError as error:
        print(f"<{error}>", flush=True)
        if rank != 0:
            os._exit(0)  # which ends the wait of rank 0, too
        return "failed"
    return ""


@pytest.mark.parametrize(("call", "is_late"), [(call, call is meet) for call in ALONE])
def test_a_collective_that_one_rank_calls_alone(
    call: Callable[[nn.Module], None], is_late: bool
) -> None:
    outcomes = run_ranks(call_alone, 2, call, is_late, fresh=True, timeout=40)
    text = outcomes[1].output
    assert re.search(rf"rank 0 is {ALONE[call]} that rank 1 has not called", text), text
    assert re.search(r"while rank 1 waited for it in all-gather of unit first", text), text
    assert outcomes[0].value == "failed", outcomes[0]


def wait_for_others(rank: int, n_ranks: int, is_symmetric: bool) -> None:
    """Rank 0 is in a collective that waits for the last rank, while rank 1 waits for rank 0."""
    pair = dist.new_group([0, n_ranks - 1])
    net, reference = sharded(Net()), Net()
    check_trains(net, reference)
    total = torch.ones(2)
    work: Any = None
    if rank == n_ranks - 1:
        time.sleep(3)
    if is_symmetric:
        # Rank 1 has called it too, and goes on.
        work = dist.all_reduce(total, async_op=True)
        if rank != 1:
            work.wait()
    elif rank != 1:
        dist.all_reduce(total, group=pair)
    train(net, rank)
    if work is not None:
        work.wait()
    check_trains(net, reference)


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_a_collective_that_waits_for_another_rank(is_symmetric: bool) -> None:
    run_ranks(wait_for_others, 3, is_symmetric, apart=True)


# --- notices ---


def dawdle(way: str) -> None:
    if way == "sleep":
        time.sleep(5.8)
    else:
        # Keeps the interpreter's lock.
        ctypes.PyDLL(None).usleep(5_800_000)


def be_late(rank: int, n_ranks: int, way: str) -> None:
    net, reference = sharded(Net()), Net()
    check_trains(net, reference)
    if rank == 1:
        dawdle(way)
    check_trains(net, reference)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("sleep", r"; it is at test_notices_of_waits.py:\d+ in dawdle$"),
        ("keep", "; its Python does not answer: it is in a C call that keeps the interpreter's"),
    ],
)
def test_notice_says_where_the_other_rank_is(way: str, told: str) -> None:
    outcomes = run_ranks(be_late, 3, way, fresh=True)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    for rank in (0, 2):
        (line,) = re.findall(r".*has waited.*", outcomes[rank].output)
        # Each waits for the ranks in their order.
        awaited = 1 if rank == 0 or "for rank 1" in line else 0
        assert re.search(rf"rank {rank} has waited 5 s for rank {awaited} in .*gather", line), line
        if awaited == 1:
            assert re.search(told, line), line
        else:
            assert re.search(r"rank 0 waits for rank 1 in .*gather", line), line


def test_notices_come_at_growing_intervals() -> None:
    times = [_rendezvous.notice_at(n) for n in range(7)]
    assert times == [5, 15, 45, 120, 420, 720, 1020]


def come_late_to_set_up(rank: int, n_ranks: int) -> None:
    if rank == 1:
        time.sleep(2.0)
    _rendezvous._NOTICES_S = (0.2, 0.5, 0.8, 1.1)  # looked at every 0.25 s
    _rendezvous._LATER_S = 100.0
    _transport.transport_for()


def test_set_up_says_for_whom_it_waits() -> None:
    outcomes = run_ranks(come_late_to_set_up, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert outcomes[0].output.count("has waited") == 4, outcomes[0].output
    assert "for ranks [1]" in outcomes[0].output


# --- the program's place ---


def place_of_main(within: Callable[[Callable[[], None]], None]) -> _peer_location.Place:
    """What a peer would be told while the main thread runs `within`."""
    places = []
    is_there, is_told = threading.Event(), threading.Event()

    def ask() -> None:
        is_there.wait()
        places.append(_peer_location.tell())
        is_told.set()

    def stay() -> None:
        is_there.set()
        is_told.wait()

    thread = threading.Thread(target=ask)
    thread.start()
    within(stay)
    thread.join()
    return places[0]


def test_place_is_the_users_innermost_line() -> None:
    text, group, _, is_gather = place_of_main(lambda stay: [stay() for _ in (0,)])
    # Threads' own code is Python's.
    assert re.fullmatch(r"test_notices_of_waits.py:\d+ in stay", text), text
    assert (group, is_gather) == (0, False)


# --- signals ---


def interrupt_both(rank: int, n_ranks: int, point: str, transport: str, folder: str) -> None:
    """Rank 0 ends of a signal at `point`; rank 1, which waits for it, gets its own a bit later."""
    os.environ["FSDP_C_TRANSPORT"] = transport
    Path(f"{folder}/{rank}").write_text(str(os.getpid()))
    dist.barrier()

    def probe(here: str) -> None:
        if rank == 0 and is_armed and here == point:
            raise KeyboardInterrupt

    is_armed = False
    try:
        if point == "set_up":
            _rendezvous.announce()
            if rank == 0:
                raise KeyboardInterrupt
            _transport.transport_for()
        net = sharded(CallbackNet(probe))
        train(net, rank)
        is_armed = True
        if point == "before_forward" and rank == 0:
            raise KeyboardInterrupt
        train(net, rank, 3)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if rank == 0:
            end_and_interrupt(int(Path(f"{folder}/1").read_text()))
        os._exit(0)


def end_and_interrupt(peer: int) -> None:
    """This process ends, and a child of it sends the signal once that was to be seen."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)  # returns when the parent is gone
        time.sleep(0.1)
        os.kill(peer, signal.SIGINT)
    os._exit(0)


POINTS = ("set_up", "before_forward", "in_forward", "in_backward", "before_second")


@pytest.mark.parametrize("transport", ["shm", "callback"])
@pytest.mark.parametrize("point", POINTS)
def test_each_rank_ends_of_its_own_signal(point: str, transport: str, tmp_path: Path) -> None:
    outcomes = run_ranks(interrupt_both, 2, point, transport, str(tmp_path), fresh=True, timeout=40)
    for outcome in outcomes:
        assert "interrupted" in outcome.output, outcome


class Ended(Exception):
    pass


def handle(rank: int, n_ranks: int, does_raise: bool) -> None:
    handled = []

    def handler(*_: object) -> None:
        handled.append(1)
        if does_raise:
            raise Ended

    signal.signal(signal.SIGTERM, handler)
    net, reference = sharded(Net()), Net()
    check_trains(net, reference)
    mesh = cached_mesh((n_ranks,))
    pids = [torch.zeros(1, dtype=torch.long) for _ in range(n_ranks)]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=mesh.get_group())
    if rank == 1:
        time.sleep(0.3)
        os.kill(int(pids[0]), signal.SIGTERM)
        if does_raise:
            # Rank 0 comes again, and opens the same forward once more.
            time.sleep(0.3)
    elif does_raise:
        with pytest.raises(Ended):
            net(batch(rank))
        os._exit(0)
    try:
        check_trains(net, reference)
    except RuntimeError as error:
        assert does_raise, error
        assert "rank 0" in str(error), error
        print("told", flush=True)
        os._exit(0)
    assert len(handled) == (rank == 0)


@pytest.mark.parametrize("does_raise", [False, True])
def test_handler_of_a_signal_within_a_wait(does_raise: bool) -> None:
    outcomes = run_ranks(handle, 2, does_raise, fresh=True, timeout=40)
    for outcome in outcomes:
        assert not outcome.error and outcome.exit_code == 0, outcome
    assert ("told" in outcomes[1].output) == does_raise


def shard_on_rank_0(rank: int, n_ranks: int) -> str:
    """Rank 1 was started without fsdp_c."""
    if rank == 1:
        time.sleep(1.5)
        return ""
    sharded(Net())
    _rendezvous._NOTICES_S = (0.3, 0.6, 0.8, 0.9)
    group = dist.group.WORLD
    assert group is not None
    exchange = _rendezvous.exchange_for(group)
    assert exchange is not None
    _rendezvous._rendezvous[group].timeout_s = 1.0
    with pytest.raises(TimeoutError) as caught:
        exchange("a test", b"")
    return str(caught.value)


def shard_and_dawdle(rank: int, n_ranks: int) -> None:
    net = sharded(Net())
    dist.barrier()
    _rendezvous._NOTICES_S = (0.3, 0.6, 0.8, 0.9)
    if rank == 1:
        time.sleep(1.5)
    check_trains(net, Net())


def test_ranks_without_fsdp_c_are_told_from_late_ones() -> None:
    told = "ranks [1] have sharded nothing with fsdp_c yet"
    outcomes = run_ranks(shard_on_rank_0, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert told in outcomes[0].output and told in outcomes[0].value, outcomes
    outcomes = run_ranks(shard_and_dawdle, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert "for ranks [1]" in outcomes[0].output and told not in outcomes[0].output, outcomes
