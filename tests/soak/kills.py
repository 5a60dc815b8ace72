"""A rank is killed at each state of the protocol; the others raise soon and name it."""

import contextlib
import functools
import os
import random
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import hosts
import namespaces

from soak import build, shim, training
from soak.case import LEFT_OUT, Family, Verdict, failed

TIMEOUT_S = 40
# A wait that ends sooner than any time limit has been ended by the death.
SOON_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
# What gloo says where a rank sits in a collective of the process group: it knows no ranks.
IN_TORCH = re.compile(r"gloo/.*(Connection (reset|closed)|Broken pipe|Read error|Write error)")
OURS = re.compile(r"fc_|fsdp_c")


@dataclass(frozen=True)
class Way:
    """What carries the bytes between ranks."""

    worlds: tuple[tuple[int, ...], ...]  # ranks of each host
    variables: dict[str, str] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()  # of replicas and shards

    def run(
        self, world: tuple[int, ...], fn: Callable[..., Any], *arguments: Any, **options: Any
    ) -> list[Any]:
        """Gives the shape of the mesh to `fn`, before its arguments."""
        arguments = (self.mesh, *arguments)
        if len(world) > 1:
            return hosts.run_hosts(fn, world, *arguments, env=self.variables, **options)
        return harness.run_ranks(fn, world[0], *arguments, env=self.variables, **options)


WAYS = {
    "shared memory": Way(((2,), (3,), (4,))),
    "messages": Way(((2,), (3,)), {"FSDP_C_TRANSPORT": "callback"}),
    # Of a rank alone on its host, which dies in set-up, only signs of life tell.
    "rails": Way(((1, 1), (2, 1), (2, 2)), {"FSDP_C_HOST_TIMEOUT": "5"}),
    "replicas": Way(((4,),), mesh=(2, 2)),
}
# What people call the functions at which a rank is killed: before one (<) and after it (>).
STATES = {
    "fc_process_open": "set-up: attaching to a rank",
    "fc_segment_create": "set-up: making a segment",
    "fc_segment_open": "set-up: opening a segment",
    "fc_segment_map": "set-up: mapping a segment",
    "fc_transport_map_with_spare": "set-up: agreeing on a region",
    "fc_domain_open": "opened",
    "fc_domain_ready": "ready, reading parameters",
    "fc_exchange_reserve": "reserving room for gradients",
    "fc_exchange_commit": "posted",
    "fc_exchange_sources": "reading gradients",
    "fc_exchange_consume": "consumed",
    "fc_domain_mark_closed": "closing",
    "fc_domain_close": "closed",
    "fc_comm_meet": "in a collective of clipping or of owners",
    "fc_transport_publish": "publishing a word",
    "fc_transport_wait": "waiting for a word",
    "fc_copier_start": "a snapshot begins",
    "fc_copier_finish": "a snapshot ends",
    "fc_snapshot_clear": "a snapshot is written over",
    "fc_snapshot_commit": "a snapshot counts",
    "fc_snapshot_ranks_set_word": "telling of a snapshot",
    "apart_exchange": "telling what begins, over messages",
    "meet": "meeting before a collective of messages",
    "waits_gather": "an all-gather of messages",
    "waits_gather_begin": "an all-gather of messages begins",
    "waits_gather_end": "an all-gather of messages ends",
    "waits_reduce_scatter": "a reduce-scatter of messages",
    "waits_sum_end": "a reduce-scatter of messages ends",
    "fc_waits_all_reduce": "an all-reduce of replicas",
    "rails_send": "sending to another host",
    "rails_receive": "receiving from another host",
    "rails_await_sent": "waiting for what is sent",
    "rails_await_received": "waiting for what comes",
}


def mesh_of(shape: tuple[int, ...]) -> Any:
    return harness.cached_mesh(shape, ("replicate", "shard")) if shape else None


def counted(
    rank: int, n_ranks: int, shape: tuple[int, ...], folder: Path
) -> tuple[dict[str, int], list[float]]:
    shim.clear()
    losses = training.train(rank, folder, mesh=mesh_of(shape))
    return shim.counts(), losses


@functools.cache
def undisturbed(way: str, world: tuple[int, ...]) -> list[tuple[dict[str, int], list[float]]]:
    """How often each rank reaches each state, and its losses."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = WAYS[way].run(world, counted, Path(folder), fresh=True, timeout=TIMEOUT_S)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def text_of(world: tuple[int, ...]) -> str:
    return "+".join(map(str, world))


def worlds_of(way: str) -> tuple[tuple[int, ...], ...]:
    return () if way == "rails" and namespaces.why_not() else WAYS[way].worlds


def places() -> Iterator[tuple[str, int]]:
    """A rank of a world at a state, the begin of keys, and how often it gets there."""
    for way in WAYS:
        for world in worlds_of(way):
            for victim, (counts, _) in enumerate(undisturbed(way, world)):
                for state, n in counts.items():
                    if state.rstrip("<>") in STATES:
                        yield f"{way}/{text_of(world)}/{victim}/{state}", n


def cases(seed: int) -> Iterator[str]:
    """Each rank at each state once, half way through; then the first time, then the last."""
    found = list(places())
    random.Random(seed).shuffle(found)
    yield from (f"{way}/none" for way in WAYS if not worlds_of(way))
    yield from (f"{place}/{(n + 1) // 2}" for place, n in found)
    yield from (f"{place}/1" for place, n in found if n > 2)
    # How often it waits, and says so, differs from run to run.
    firm = [(place, n) for place, n in found if "/fc_transport_" not in place]
    yield from (f"{place}/{n}" for place, n in firm if n > 1)


@functools.cache
def whole() -> str:
    return f"{sum(1 for _ in places())} states of ranks"


def live(
    rank: int, n_ranks: int, shape: tuple[int, ...], victim: int, state: str, nth: int,
    folder: Path, note: str,
) -> list[float]:  # fmt: skip
    shim.plan("kill", state, nth, note) if rank == victim else shim.clear()
    try:
        return training.train(rank, folder, mesh=mesh_of(shape))
    except BaseException as error:
        training.end_as_a_script(error, note)
        raise


def run(key: str) -> Verdict:
    way, world, *where = key.split("/")
    if not where:
        return Verdict(LEFT_OUT, f"no hosts here: {namespaces.why_not()}")
    victim, state, nth = where
    hosts_of = tuple(map(int, world.split("+")))
    before = set(os.listdir(SHARED_MEMORY))
    with tempfile.TemporaryDirectory() as name:
        folder, note = Path(name, "snapshots"), str(Path(name, "died"))
        folder.mkdir()
        plan = int(victim), state, int(nth), folder, note
        try:
            outcomes = WAYS[way].run(hosts_of, live, *plan, fresh=True, timeout=TIMEOUT_S)
        except harness.RankFailure as error:
            return failed(f"a rank went on or hung: {error}")
        left = {path.name for path in Path(name).iterdir()} - {"snapshots", "died"}
    left |= {name for name in set(os.listdir(SHARED_MEMORY)) - before if OURS.search(name)}
    if left:
        return failed(f"left behind: {sorted(left)}")
    return judge(outcomes, int(victim), [losses for _, losses in undisturbed(way, hosts_of)])


def judge(outcomes: list[harness.RankOutcome], victim: int, losses: list[list[float]]) -> Verdict:
    texts = "\n".join(f"--- rank {o.rank}: {o.exit_code}\n{o.output}" for o in outcomes)
    if outcomes[victim].exit_code != -signal.SIGKILL:
        return failed(f"rank {victim} was not killed there\n{texts}")
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    noticed = []
    for outcome in survivors:
        if outcome.ok and outcome.value == losses[outcome.rank]:
            continue  # it had all that it needed
        if outcome.exit_code != 1:
            return failed(f"rank {outcome.rank} ended with {outcome.exit_code}\n{texts}")
        seconds = re.search(r"noticed after ([\d.]+) s", outcome.output)
        if seconds is None or float(seconds[1]) > SOON_S:
            return failed(f"rank {outcome.rank} noticed late\n{texts}")
        error = re.findall(r"^\w*(?:Error|Exception|Interrupt)\b.*", outcome.output, re.MULTILINE)
        if error and IN_TORCH.search(error[-1]):
            noticed.append((float(seconds[1]), True))
            continue
        if not error or not re.search(r"\branks? \[?\d", error[-1]):
            return failed(f"rank {outcome.rank} names no rank\n{texts}")
        noticed.append((float(seconds[1]), f"rank {victim}" in outcome.output))
    if noticed and not any(is_named for _, is_named in noticed):
        return failed(f"nobody names rank {victim}\n{texts}")
    slowest = max((seconds for seconds, _ in noticed), default=0.0)
    return Verdict(facts={"slowest notice, s": slowest})


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    with build.imported_from(build.build()):
        yield


FAMILY = Family(
    "kills",
    "a rank is killed at each state; the others name it and leave nothing",
    cases,
    run,
    prepared,
    whole=whole,
)
