"""What the harness starts: a process that has imported torch and forks ranks, and the ranks."""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import namespaces

GROUP_TIMEOUT_S = 60
SEED = int(os.environ.get("FSDP_C_TEST_SEED", "0"))


READ_AT_IMPORT = ("FSDP_C_KERNELS",)


def is_for_ranks(name: str) -> bool:
    """Whether a variable counts in the ranks alone, for fsdp_c after its import."""
    return name.startswith("FSDP_C_") and name not in READ_AT_IMPORT


# --- messages -------------------------------------------------------------------------------------
# Plain pickle, because the pickler of multiprocessing would move torch tensors through shared
# memory.


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def send_message(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    data = pickle.dumps(message)
    socket.send_fds(sock, [len(data).to_bytes(4, "little")], fds or [])
    sock.sendall(data)


def receive_message(sock: socket.socket, n_fds: int = 2) -> tuple[Any, list[int]]:
    head, fds, _, _ = socket.recv_fds(sock, 4, n_fds)
    if not head:
        raise EOFError
    n_bytes = int.from_bytes(head, "little")
    data = b""
    while len(data) < n_bytes:
        data += sock.recv(n_bytes - len(data))
    return pickle.loads(data), fds


# --- the launcher's side --------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """Where a rank is, as a launcher of scripts tells it."""

    rank: int
    n_ranks: int
    local_rank: int
    n_local: int
    address: str = "127.0.0.1"  # of rank 0's host


def launch(fd: int) -> None:
    """Serve requests until the caller goes; returns in each forked rank when that is done.

    A child that is a network or a host (namespaces.py) serves requests of its own.
    """
    # What ranks need, once; without these each rank would take seconds for them at its first use.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
    from parity import harness

    _ = harness.implementation().fully_shard  # at which the package loads the rest of itself

    freeze()

    sock = socket.socket(fileno=fd)
    children: set[int] = set()
    while True:
        try:
            request, fds = receive_message(sock)
        except (EOFError, ConnectionError):
            break
        exit_codes: dict[int, int] = {}
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            children.discard(ended[0])
            exit_codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        reply: Any = None
        try:
            if request[0] in FORKS:
                reply = FORKS[request[0]](*request[1:])
            elif request[0] == "ip":
                namespaces.ip(*request[1:])
            elif request[0] == "signal":
                for pid in children.intersection(request[2:]):
                    os.kill(pid, request[1])
        except OSError as error:
            reply = error
        if request[0] in FORKS and reply == 0:
            sock.close()
            if request[0] == "fork":
                serve_rank(Connection(fds[0]), fds[1], *request[1:])
                return
            sock = socket.socket(fileno=fds[0])
            children = set()
            continue
        for received in fds:
            os.close(received)
        if request[0] in FORKS and isinstance(reply, int):
            children.add(reply)
        send_message(sock, (reply, exit_codes))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    # Libraries that torch loads complain at a regular exit.
    os._exit(0)


def freeze() -> None:
    """The collection after each call then looks at what tests made, not at what is imported."""
    gc.collect()
    gc.freeze()


FORKS = {
    "fork": lambda *_: os.fork(),
    "network": namespaces.fork_network,
    "host": namespaces.fork_host,
}


# --- a rank's side --------------------------------------------------------------------------------


def serve_rank(
    pipe: Connection,
    output: int,
    seat: Seat,
    path: list[str],
    directory: str,
    settings: dict[str, str] | None,
) -> None:
    """Join the process group, then answer calls until told to stop."""
    import torch
    import torch.distributed as dist

    rank, n_ranks = seat.rank, seat.n_ranks
    namespaces.die_with_parent()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Started in the background of a shell, processes inherit that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    sys.path[:] = path
    os.chdir(directory)
    if settings is not None:
        for name in filter(is_for_ranks, list(os.environ)):
            del os.environ[name]
        os.environ.update(settings)
    torch.set_num_threads(1)

    limit = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    port = receive(pipe)
    if port == "host":
        store = dist.TCPStore(
            seat.address, 0, is_master=True, wait_for_workers=False, timeout=limit
        )
        send(pipe, port := store.port)
    else:
        store = dist.TCPStore(seat.address, port, timeout=limit)
    # What torchrun sets: code under test may look at it.
    os.environ.update(
        MASTER_ADDR=seat.address,
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(n_ranks),
        LOCAL_RANK=str(seat.local_rank),
        LOCAL_WORLD_SIZE=str(seat.n_local),
    )
    if seat.n_local < n_ranks:
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.CARD
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=limit)
    send(pipe, "ready")
    while (request := receive_or_none(pipe)) is not None:
        send(pipe, answer(rank, n_ranks, *request))
    if dist.is_initialized():
        dist.destroy_process_group()


def receive_or_none(pipe: Connection) -> Any:
    with contextlib.suppress(EOFError, ConnectionError):
        return receive(pipe)


def answer(
    rank: int, n_ranks: int, module: str, name: str, args: tuple[Any, ...]
) -> tuple[Any, str, str]:
    """Run one test function; gives (value, exception type, traceback)."""
    import torch

    seed_everything(SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    is_new = module not in sys.modules
    try:
        fn: Any = importlib.import_module(module)
        if is_new:
            freeze()
        for part in name.split("."):
            fn = getattr(fn, part)
        value = fn(rank, n_ranks, *args)
        pickle.dumps(value)
        return value, "", ""
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        reason = str(error) if type(error).__name__ == "Skipped" else None
        return reason, type(error).__name__, traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()


def seed_everything(seed: int) -> None:
    import torch

    random.seed(seed)
    # torch.manual_seed would keep a stack trace for each kind of device that is not in use yet.
    torch.default_generator.manual_seed(seed)


if __name__ == "__main__":
    # Through the import system, so that there is one module object.
    import rank_process

    sys.path[:] = json.loads(sys.argv[2])
    rank_process.launch(int(sys.argv[1]))
