"""Ranks that die, stop or fork: the others raise soon, name them, and leave nothing."""

import atexit
import ctypes
import gc
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from callback_net import CallbackNet, sharded
from harness import run_ranks
from snapshots import Net, batch, check_gradients, check_trains
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from fsdp_c import fully_shard
from fsdp_c._comm._transport import transport_for
from fsdp_c._native import _C

SHARED_MEMORY = Path("/dev/shm")

# --- death ---

POINTS = ("before_forward", "in_forward", "before_backward", "in_backward", "before_step")


CHILD_ENDED = ".child"
NOTICED = ".noticed"


def die(way: str, note: str) -> None:
    """Ends this process; `way` is how."""
    if way == "kill_with_child" and os.fork() == 0:
        # Inherits every descriptor and outlives the rank, until the death was noticed.
        deadline = time.monotonic() + 8
        while not Path(note + NOTICED).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        Path(note + CHILD_ENDED).touch()
        os._exit(0)
    if way.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exit":
        os._exit(3)
    # What an uncaught exception does: Python ends with everything that runs at its end.
    sys.exit(3)


def survive(
    rank: int, n_ranks: int, victim: int, way: str, point: str, at_step: int, note: str
) -> dict:
    """Trains until the victim dies; returns the error and how long after the death it came."""

    def probe(here: str) -> None:
        if rank == victim and here == point and step == at_step:
            Path(note).write_text(repr(time.monotonic()))
            die(way, note)

    step = -1
    net = sharded(CallbackNet(probe))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for step in range(at_step + 3):  # noqa: B007 (the probe reads it)
            optimizer.zero_grad()
            probe("before_forward")
            loss = net(batch(rank, step)).square().sum()
            probe("before_backward")
            loss.backward()
            probe("before_step")
            optimizer.step()
    except RuntimeError as error:
        seconds = time.monotonic() - float(Path(note).read_text())
        assert not Path(note + CHILD_ENDED).exists(), "the death was noticed by a child's end only"
        Path(note + NOTICED).touch()
        again = ""
        try:
            net(batch(rank))
        except RuntimeError as second:
            again = str(second)
        return {"text": str(error), "seconds": seconds, "again": again, "step": step}
    return {"text": "", "step": step}


SAID = {
    "kill": "was killed, or left by os._exit",
    "kill_with_child": "was killed, or left by os._exit",
    "exit": "was killed, or left by os._exit",
    "uncaught": "ended its script|left the forward of step 2 by an exception",
}
ENDINGS = [
    *[(2, 1, "kill", point, 1) for point in POINTS],
    (2, 1, "kill", "before_forward", 0),
    (2, 1, "kill", "in_forward", 0),
    (2, 1, "exit", "before_forward", 1),
    (2, 1, "exit", "in_backward", 1),
    (2, 1, "uncaught", "in_forward", 1),
    (2, 1, "uncaught", "before_backward", 1),
    (2, 1, "kill_with_child", "before_backward", 1),
    (3, 0, "kill", "in_forward", 1),
    (3, 2, "kill", "in_backward", 1),
]


@pytest.fixture
def no_shared_memory_left() -> Iterator[None]:
    def ours() -> set[str]:
        return {path.name for path in SHARED_MEMORY.iterdir() if "fsdp" in path.name}

    before = ours()
    yield
    # Other runs on this machine come and go; what is ours would stay.
    deadline = time.monotonic() + 10
    while (left := ours() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize(("n_ranks", "victim", "way", "point", "at_step"), ENDINGS)
def test_ranks_notice_the_end_of_one(
    n_ranks: int, victim: int, way: str, point: str, at_step: int, tmp_path: Path
) -> None:
    args = (victim, way, point, at_step, str(tmp_path / "time"))
    outcomes = run_ranks(survive, n_ranks, *args, fresh=True, timeout=40)
    assert not outcomes[victim].ok
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.ok, outcome.error or outcome.output
        text = outcome.value["text"]
        print(
            f"rank {rank}, step {outcome.value['step']}, {outcome.value.get('seconds')} s: {text}"
        )
        assert text, "the death went unnoticed"
        assert re.search(rf"rank {victim}\b", text), text
        assert re.search(SAID[way], text) or "in the set-up of fsdp_c" in text, text
        assert re.search(r"first|second|root|gather|reduc|forward|backward|set-?up", text), text
        # The model of a survivor says the same thing again instead of hanging.
        assert re.search(rf"rank {victim}\b", outcome.value["again"])


# --- a stopped rank, and Ctrl-C ---


def later(seconds: float, name: str) -> subprocess.Popen:
    """Sends this process a signal, from outside."""
    return subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -{name} {os.getpid()}"])


def stop_for_a_while(rank: int, n_ranks: int) -> None:
    net, reference = sharded(Net()), Net()
    check_trains(net, reference)
    if rank == 1:
        later(7, "CONT")
        os.kill(os.getpid(), signal.SIGSTOP)
    check_trains(net, reference)


def test_stopped_rank() -> None:
    outcomes = run_ranks(stop_for_a_while, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    # Other libraries may write at exit.
    lines = [[line for line in o.output.splitlines() if "has waited" in line] for o in outcomes]
    print(*lines[0], sep="\n")
    assert len(lines[0]) == 1
    assert re.search(r"rank 1\b", lines[0][0])
    assert re.search(r"first|second|root|gather|forward", lines[0][0])
    assert "its process is stopped" in lines[0][0]
    assert not lines[1]


def interrupt(rank: int, n_ranks: int) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    net = sharded(Net())
    check_trains(net, Net())
    if rank == 1:
        time.sleep(2)
    else:
        later(1, "INT")
    try:
        for step in range(3):
            net(batch(rank, step)).sum().backward()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_keyboard_interrupt_during_a_wait() -> None:
    outcomes = run_ranks(interrupt, 2, fresh=True, timeout=40)
    assert "interrupted" in outcomes[0].output, outcomes[0]
    # The rank that was waited for does not hang either, once the interrupted one has gone.
    assert re.search(r"rank 0\b", outcomes[1].value), outcomes[1]


# --- forked children ---


def fork(work: Callable[[], None]) -> None:
    """Runs `work` in a child that then ends as Python does, and expects it to end well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def train_with_children(rank: int, n_ranks: int) -> None:
    net, reference = sharded(Net()), Net()
    check_trains(net, reference)

    def read() -> None:
        shards = [
            param.to_local() for param in net.state_dict().values() if hasattr(param, "to_local")
        ]
        assert all(shard.isfinite().all() for shard in shards)

    def drop() -> None:
        # Runs every destructor of the engine in the child.
        for key in [key for key in held if key != "reference"]:
            del held[key]
        gc.collect()

    for work in (lambda: None, read):
        fork(work)
        check_trains(net, reference)

    held = {"net": sharded(Net()), "reference": Net()}
    held["net"](batch(rank)).square().sum().backward()
    fork(drop)
    for param in held["net"].parameters():
        param.grad = None
    check_trains(held["net"], held["reference"])

    # Between forward and backward, with units gathered.
    net.zero_grad()
    loss = net(batch(rank)).square().sum()
    fork(read)
    loss.backward()
    check_gradients(net, reference, n_ranks)


def test_forked_children() -> None:
    run_ranks(train_with_children, 2)


class Numbers(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, step: int) -> torch.Tensor:
        return batch(self.rank, step)


def train_with_loader(rank: int, n_ranks: int) -> None:
    net, reference = sharded(Net()), Net()
    net(batch(rank)).sum().backward()
    for _ in range(2):
        loader = DataLoader(Numbers(rank), batch_size=None, num_workers=2)
        for step, x in enumerate(loader):
            net.zero_grad()
            net(x).square().sum().backward()
            check_gradients(net, reference, n_ranks, step)


def test_data_loader_workers() -> None:
    run_ranks(train_with_loader, 2)


def leave_a_thread_in_backward(rank: int, n_ranks: int) -> None:
    """Rank 0's thread waits for the others, which do not come, while the process ends."""
    net = sharded(Net())
    net(batch(rank)).sum().backward()
    loss = net(batch(rank)).sum()
    if rank != 0:
        return
    thread = threading.Thread(target=loss.backward, daemon=True)
    thread.start()
    while "_engine_run_backward" not in str(sys._current_frames()[thread.ident]):
        time.sleep(0.01)


def test_exit_while_a_thread_waits() -> None:
    """The thread asks for the interpreter's lock when there is none left to have."""
    for outcome in run_ranks(leave_a_thread_in_backward, 2, fresh=True):
        assert outcome.ok, outcome


def leave_a_thread_of_gloo(rank: int, n_ranks: int, note: str) -> None:
    """A thread of that name is busy outside of the interpreter and comes back to it."""
    began, is_through = threading.Event(), threading.Event()

    def work() -> None:
        set_name = 15  # PR_SET_NAME
        ctypes.CDLL(None).prctl(set_name, b"pt_gloo_runloop")
        began.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
        is_through.set()

    atexit.unregister(_C.close)  # the last that was registered is the first to be called
    atexit.register(lambda: Path(note).write_text(str(is_through.is_set())))
    atexit.register(_C.close)
    threading.Thread(target=work, daemon=True).start()
    began.wait()
    time.sleep(0.05)


def test_exit_while_gloo_drops_tensors(tmp_path: Path) -> None:
    """Its threads let go of the last collective's tensors after their caller went on."""
    note = tmp_path / "note"
    for outcome in run_ranks(leave_a_thread_of_gloo, 1, str(note), fresh=True):
        assert outcome.ok, outcome
    assert note.read_text() == "True"


def die_before_a_meeting_of_all(rank: int, n_ranks: int) -> str:
    """Units are on another process group; on the world nobody has set anything up."""
    mesh = DeviceMesh.from_group(dist.new_group(list(range(n_ranks))), "cpu")
    fully_shard(nn.Linear(4, 4), mesh=mesh)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        transport_for(dist.group.WORLD)
    return str(caught.value)


def test_a_death_is_seen_in_groups_that_the_dead_never_used() -> None:
    alive, dead = run_ranks(die_before_a_meeting_of_all, 2, fresh=True, timeout=20)
    assert dead.exit_code == -signal.SIGKILL
    assert "rank 1 has exited or was killed while rank 0 waited for it" in alive.value, alive
