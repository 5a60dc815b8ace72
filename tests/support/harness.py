"""Runs a test function on several ranks, which are processes that stay alive between tests.

`run_ranks(fn, n_ranks, *args)` is what tests call. One helper process imports torch and fsdp_c once
and forks the ranks, so that new ranks cost milliseconds. A pool of ranks per world size is reused
until a call fails; then it is thrown away. So are those of calls with variables of fsdp_c.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import rank_process
from rank_process import SEED, Seat, is_for_ranks, receive, receive_message, send, send_message
from rank_process import seed_everything as seed_everything

PYTHON = sys.executable
START_TIMEOUT_S = 120
# Who has not ended by then is killed: exit code -9. Sixteen ranks on two busy cores take over ten.
STOP_TIMEOUT_S = 60
# After the first rank failed the others get this long to fail too: their reasons are often telling.
GRACE_S = 4


def failure_of(body: Callable[..., Any], *args: Any) -> str:
    """The traceback if the body fails, else nothing; the ranks live on."""
    try:
        body(*args)
    except BaseException:
        return traceback.format_exc()
    return ""


class RankFailure(AssertionError):
    """A rank raised, died or did not finish. `rank` and `exc_type` name the first one."""

    def __init__(self, text: str, rank: int | None = None, exc_type: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.exc_type = exc_type


@dataclass
class RankOutcome:
    """What became of one rank of a call with `fresh=True`."""

    rank: int
    value: Any = None
    exc_type: str = ""
    error: str = ""  # the traceback, if it raised
    exit_code: int | None = None  # negative: the signal that ended it
    output: str = ""  # what it wrote to stdout and stderr
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return not self.error and not self.timed_out and self.exit_code in (0, None)

    @property
    def stderr(self) -> str:
        return self.output


Settings = tuple[tuple[str, str], ...]
WITH_SETTINGS_MAX = 3  # worlds that are kept beside those without


# --- the caller's side ----------------------------------------------------------------------------


def run_ranks(
    fn: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    timeout: float = 60,
    fresh: bool = False,
    apart: bool = False,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, n_ranks, *args)` on every rank and return what each returned, by rank.

    `fn` is a module-level function; it, the arguments and the results travel by pickle.
    torch.distributed is up (gloo) and torch runs one thread. A rank that raises makes this raise
    `RankFailure` with all ranks' tracebacks.

    `fresh=True` uses new processes for this call alone and returns a `RankOutcome` per rank
    instead: nothing is raised for a rank that raised, exited or was killed, but a rank still
    running after `timeout` seconds raises. `apart=True` implies new processes, but not outcomes. It
    is for functions that leave a world which is no good for others: ranks that went apart, or many
    process groups, each of which has a thread that wakes a hundred times a second as long as its
    process runs. `env` is set before torch is imported, in a process of its own, and implies new
    ranks; variables that only fsdp_c reads are set in ranks that the next call with the same ones
    uses again.
    """
    env = env or {}
    settings = settings_of_ranks(env)
    if fresh or apart or not all(map(is_for_ranks, env)):
        pool = Pool(seats_on(launcher_for(env), n_ranks), settings)
        return call_once(pool, fn, args, timeout, fresh)
    key = (n_ranks, tuple(sorted((settings or {}).items())))
    pool = Pool.of(key, lambda: seats_on(launcher_for({}), n_ranks), settings)
    return call_again(pool, fn, args, timeout)


def call_once(
    pool: "Pool", fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, fresh: bool
) -> list[Any]:
    """On ranks that end afterwards; outcomes where `fresh`, else values."""
    try:
        outcomes = pool.call(fn, args, timeout, timeout if fresh else GRACE_S)
        pool.close(outcomes)
    finally:
        pool.kill()
    if any(outcome.timed_out for outcome in outcomes):
        raise_failure(fn, outcomes)
    return outcomes if fresh else values_of(pool, fn, outcomes)


def call_again(
    pool: "Pool", fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> list[Any]:
    """On ranks that live on, unless one fails."""
    return values_of(pool, fn, pool.call(fn, args, timeout))


def values_of(pool: "Pool", fn: Callable[..., Any], outcomes: list[RankOutcome]) -> list[Any]:
    if not all(outcome.ok for outcome in outcomes):
        pool.kill()
        skipped = next((o for o in outcomes if o.exc_type == "Skipped"), None)
        if skipped:
            import pytest

            pytest.skip(skipped.value)
        raise_failure(fn, outcomes)
    return [outcome.value for outcome in outcomes]


def raise_failure(fn: Callable[..., Any], outcomes: list[RankOutcome]) -> None:
    bad = [outcome for outcome in outcomes if not outcome.ok]
    first = min(bad, key=lambda outcome: (not outcome.error, outcome.timed_out))
    parts = [f"{fn.__module__}.{fn.__qualname__} on {len(outcomes)} ranks, seed {SEED}"]
    for outcome in sorted(bad, key=lambda outcome: outcome is not first):
        fate = outcome.error or (
            "did not finish" if outcome.timed_out else f"exit code {outcome.exit_code}"
        )
        parts.append(f"--- rank {outcome.rank}: {fate.rstrip()}")
        if outcome.output.strip():
            parts.append(f"--- rank {outcome.rank} wrote:\n{outcome.output[-6000:].rstrip()}")
    raise RankFailure("\n".join(parts), first.rank, first.exc_type)


class Forker:
    """A process that has imported torch and forks ranks; the only one that signals and reaps
    them."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.exit_codes: dict[int, int] = {}

    def ask(self, request: tuple[Any, ...], fds: list[int] | None = None) -> Any:
        send_message(self.socket, request, fds)
        reply, exit_codes = receive_message(self.socket)[0]
        self.exit_codes.update(exit_codes)
        if isinstance(reply, OSError):
            raise reply
        return reply

    def fork(
        self, seat: Seat, output: int, settings: dict[str, str] | None
    ) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            request = ("fork", seat, list(sys.path), os.getcwd(), settings)
            pid = self.ask(request, [theirs.fileno(), output])
        self.exit_codes.pop(pid, None)  # of an earlier process, whose number this one has
        return pid, Connection(ours.detach())

    def exit_code(self, pid: int) -> int | None:
        if pid not in self.exit_codes:
            self.ask(("poll",))
        return self.exit_codes.get(pid)

    def signal(self, number: int, *pids: int) -> None:
        self.ask(("signal", int(number), *pids))

    def close(self) -> None:
        self.socket.close()


class Launcher(Forker):
    """The one that all others come from."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [PYTHON, rank_process.__file__, str(theirs.fileno()), json.dumps(sys.path)],
            env={**os.environ, **settings, **(env or {})},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        super().__init__(ours)

    def close(self) -> None:
        super().close()
        self.process.wait(STOP_TIMEOUT_S)


Seats = list[tuple[Forker, Seat]]


def seats_on(forker: Forker, n_ranks: int) -> Seats:
    """All ranks on one host."""
    return [(forker, Seat(rank, n_ranks, rank, n_ranks)) for rank in range(n_ranks)]


class Pool:
    """The ranks of one world."""

    # By what tells them apart and settings, the ones used last at the end.
    pools: dict[tuple[Any, Settings], "Pool"] = {}
    in_use: "Pool | None" = None  # the others are stopped

    def __init__(self, seats: Seats, settings: dict[str, str] | None = None) -> None:
        """`settings`: all of the environment's variables of fsdp_c; None: those of the launcher."""
        self.forkers = [forker for forker, _ in seats]
        self.n_ranks = len(seats)
        self.alive = True
        self.files = [tempfile.TemporaryFile("w+b") for _ in seats]
        ranks = [
            forker.fork(seat, file.fileno(), settings)
            for (forker, seat), file in zip(seats, self.files, strict=True)
        ]
        self.pids = [pid for pid, _ in ranks]
        self.pipes = [pipe for _, pipe in ranks]
        port = None
        # Rank 0 binds a free port itself; one that was chosen here could be taken before it is
        # bound.
        for pipe in self.pipes:
            if port is None:
                send(pipe, "host")
                port = self.receive_started(pipe)
            else:
                send(pipe, port)
        for pipe in self.pipes:
            self.receive_started(pipe)

    @classmethod
    def of(
        cls, key: tuple[Any, Settings], seats: Callable[[], Seats], settings: Any = None
    ) -> "Pool":
        """`key`: what tells worlds apart, and the settings' items."""
        pool = cls.pools.pop(key, None)
        if cls.in_use is not None and cls.in_use is not pool and cls.in_use.alive:
            cls.in_use.signal(signal.SIGSTOP)  # threads of its process groups would go on polling
        if pool is None or not pool.alive:
            pool = cls(seats(), settings)
        elif cls.in_use is not pool:
            pool.signal(signal.SIGCONT)
        cls.pools[key] = cls.in_use = pool
        with_settings = [key for key in cls.pools if key[1]]
        if len(with_settings) > WITH_SETTINGS_MAX:
            cls.pools.pop(with_settings[0]).end()
        return pool

    def signal(self, number: int) -> None:
        self.signal_ranks(number, range(self.n_ranks))

    def signal_ranks(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.forkers[rank].signal(number, self.pids[rank])

    def receive_started(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(START_TIMEOUT_S):
                return receive(pipe)
            why = "in time"
        except EOFError:
            why = "at all"
        texts = [self.output(rank, 0) for rank in range(self.n_ranks)]
        self.kill()
        raise RankFailure(f"the ranks did not start {why}:\n" + "\n".join(texts))

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, grace: float = GRACE_S
    ) -> list[RankOutcome]:
        """Run one function on all ranks; ranks that hang leave their stacks in `output`."""
        starts = [os.fstat(file.fileno()).st_size for file in self.files]
        request = (fn.__module__, fn.__qualname__, args)
        for pipe in self.pipes:
            send(pipe, request)
        outcomes = [RankOutcome(rank) for rank in range(self.n_ranks)]
        pending = dict(enumerate(self.pipes))
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), left)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                self.take(rank, outcomes[rank])
                del pending[rank]
                if not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        if pending:
            self.dump_stacks(pending)
        for rank, outcome in enumerate(outcomes):
            outcome.timed_out = rank in pending
            outcome.output = self.output(rank, starts[rank])
        return outcomes

    def take(self, rank: int, outcome: RankOutcome) -> None:
        """Fill the outcome of a rank that answered or ended."""
        try:
            outcome.value, outcome.exc_type, outcome.error = receive(self.pipes[rank])
        except (EOFError, ConnectionError):
            outcome.exit_code = self.await_exit(rank)

    def await_exit(self, rank: int) -> int:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (code := self.forkers[rank].exit_code(self.pids[rank])) is None:
            if time.monotonic() > deadline:
                self.signal_ranks(signal.SIGKILL, [rank])
                deadline += STOP_TIMEOUT_S
            time.sleep(0.01)
        return code

    def dump_stacks(self, ranks: dict[int, Connection]) -> None:
        self.signal_ranks(signal.SIGUSR1, ranks)
        time.sleep(0.5)

    def output(self, rank: int, start: int) -> str:
        fd = self.files[rank].fileno()
        return os.pread(fd, os.fstat(fd).st_size - start, start).decode(errors="replace")

    def close(self, outcomes: list[RankOutcome] | None = None) -> None:
        """Let the ranks end as a script does: leave the process group, then the interpreter."""
        self.signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                send(pipe, None)
        for rank, outcome in enumerate(outcomes or []):
            if not outcome.timed_out:
                outcome.exit_code = self.await_exit(rank)
                outcome.output = self.output(rank, 0)

    def end(self) -> None:
        """As scripts do, if they are alive."""
        if self.alive:
            self.close()
            for rank in range(self.n_ranks):
                self.await_exit(rank)
            self.kill()

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self.signal(signal.SIGKILL)
        for pipe, file in zip(self.pipes, self.files, strict=True):
            pipe.close()
            file.close()


# By settings, none first, the ones used last at the end; each holds an imported torch.
_launchers: dict[Settings, Launcher] = {}
LAUNCHERS_MAX = 6


def settings_of_ranks(env: dict[str, str]) -> dict[str, str] | None:
    """What ranks set after the fork, where a call has an environment of its own."""
    own = {name: value for name, value in os.environ.items() if is_for_ranks(name)}
    return {**own, **{k: v for k, v in env.items() if is_for_ranks(k)}} if env else None


def launcher_for(env: dict[str, str]) -> Launcher:
    """The one that has imported torch under these variables."""
    env = {name: value for name, value in env.items() if not is_for_ranks(name)}
    key = tuple(sorted(env.items()))
    if not _launchers:
        atexit.register(stop)
    launcher = _launchers.pop(key, None) or Launcher(env)
    _launchers[key] = launcher
    with_settings = [settings for settings in _launchers if settings]
    if len(with_settings) > LAUNCHERS_MAX:
        _launchers.pop(with_settings[0]).close()
    return launcher


def stop() -> None:
    """End all ranks; the next call starts new ones."""
    for pool in Pool.pools.values():
        pool.end()
    Pool.pools.clear()
    for launcher in _launchers.values():
        launcher.close()
    _launchers.clear()


# --- what tests share ----------------------------------------------------------------------------


_meshes: dict[tuple[Any, ...], Any] = {}


def cached_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """A CPU device mesh, made once per rank process: each new one would open more connections."""
    from torch.distributed.device_mesh import init_device_mesh

    key = (shape, names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


def implementation() -> Any:
    """The module under test; FSDP_C_TEST_IMPL names another, such as torch.distributed.fsdp."""
    return importlib.import_module(os.environ.get("FSDP_C_TEST_IMPL", "fsdp_c"))
