"""What the ranks of this host do now, and who holds up whom."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_c._window import _page, _processes
from fsdp_c._window._page import Page, Refused

# Of the JSON. A field that is renamed, or goes, or means something else, makes it another one.
SCHEMA = 1


@dataclass(frozen=True)
class Waits:
    """A wait that goes on."""

    for_rank: int | None  # None: all others, or nobody in particular
    seconds: float
    operation: str
    unit: str  # empty: none
    where: str  # what is known of the place of the one that is waited for; empty: nothing
    for_host: str = ""  # where that rank is; empty: on this host, or it is not known


@dataclass(frozen=True)
class LastError:
    text: str
    seconds_ago: float
    count: int  # since the process began


@dataclass(frozen=True)
class Rank:
    """One process. Times are seconds, sizes bytes."""

    run: str
    script: str
    pid: int
    rank: int
    world: int
    step: int  # forwards of the model so far, as in error messages
    phase: str
    phase_seconds: float  # since it began
    unit: str  # the one that was used last; empty: in no phase
    steps_per_second: float | None  # of the last steps; None: there have not been two
    waits: Waits | None
    memory: dict[str, int]  # by purpose, and "resident": of the process
    error: LastError | None
    is_stopped: bool  # by a signal or a debugger
    is_tracing: bool
    pid_namespace: int = 0  # its number; 0: not known


@dataclass(frozen=True)
class Host:
    """All ranks that can be seen, by run and rank, and why others cannot be read, by pid."""

    ranks: tuple[Rank, ...]
    refused: dict[int, str]

    def as_json(self) -> dict[str, Any]:
        refused = [{"pid": pid, "why": why} for pid, why in sorted(self.refused.items())]
        return {
            "schema": SCHEMA,
            "ranks": [asdict(rank) for rank in self.ranks],
            "refused": refused,
        }


def look(seen: _processes.Seen) -> Host:
    """Looks once at all processes. Never writes anywhere, sends no signals, takes no locks."""
    seen.look()
    ranks = []
    for pid, page in list(seen.pages.items()):
        try:
            ranks.append(_rank(pid, page))
        except Refused as error:
            seen.refuse(pid, str(error))
    ranks.sort(key=lambda rank: (rank.run, rank.world, rank.rank, rank.pid))
    return Host(tuple(ranks), dict(seen.refused))


def _rank(pid: int, page: Page) -> Rank:
    head, state, wait, error = page.head, page.now(), page.wait(), page.error()
    now_ns = time.monotonic_ns()  # after what it is compared with
    memory = state.memory
    if (resident := _processes.resident_bytes(pid)) is not None:
        memory = {**memory, "resident": resident}
    return Rank(
        run=head.run,
        script=_processes.script_of(pid),
        pid=pid,
        rank=head.rank,
        world=head.world,
        step=state.step,
        phase=_page.PHASES[state.phase],
        phase_seconds=_seconds(state.since_ns, now_ns),
        unit=state.unit if _page.PHASES[state.phase] in _page.USING_UNITS else "",
        steps_per_second=_rate(state.began_ns, now_ns),
        waits=None
        if wait is None
        else Waits(
            wait.rank,
            _seconds(wait.since_ns, now_ns),
            wait.op,
            wait.unit,
            wait.place,
            wait.host,
        ),
        memory=memory,
        error=None
        if error is None
        else LastError(error.text, _seconds(error.at_ns, now_ns), error.n_errors),
        is_stopped=_processes.is_stopped(pid),
        is_tracing=head.n_events > 0,
        pid_namespace=_processes.pid_namespace(pid),
    )


def _seconds(since_ns: int, now_ns: int) -> float:
    return max(now_ns - since_ns, 0) / 1e9


def _rate(began_ns: Sequence[int], now_ns: int) -> float | None:
    """Of the last steps; slower if the one that runs takes longer than those."""
    if len(began_ns) < 2 or began_ns[-1] <= began_ns[0]:
        return None
    n = len(began_ns) - 1
    usual_ns = (began_ns[-1] - began_ns[0]) / n
    running_ns = now_ns - began_ns[-1]
    total_ns = n * usual_ns + (running_ns if running_ns > 2 * usual_ns else usual_ns)
    return (n + 1) / total_ns * 1e9


def held_up(ranks: Iterable[Rank], after_seconds: float) -> list[str]:
    """A sentence for each rank of a run that others have waited for so long, and that waits for
    nobody here itself: what it does, where it is, who waits."""
    lines = []
    for run in by_run(ranks):
        by_rank = {rank.rank: rank for rank in run}
        waiting: dict[int, list[Rank]] = {}
        for rank in run:
            if rank.waits is None or rank.waits.seconds < after_seconds:
                continue
            whom = _end_of_chain(rank, by_rank)
            if whom is not None:
                waiting.setdefault(whom, []).append(rank)
        lines += [_sentence(whom, by_rank.get(whom), those) for whom, those in waiting.items()]
    return lines


def by_run(ranks: Iterable[Rank]) -> Iterable[list[Rank]]:
    """Never empty ones. Containers may call different runs the same: where a number comes twice,
    those of each process namespace are a run."""
    runs: dict[tuple[str, int], list[Rank]] = {}
    for rank in ranks:
        runs.setdefault((rank.run, rank.world), []).append(rank)
    for run in runs.values():
        if len({rank.rank for rank in run}) == len(run):
            yield run
            continue
        apart: dict[int, list[Rank]] = {}
        for rank in run:
            apart.setdefault(rank.pid_namespace, []).append(rank)
        yield from apart.values()


def _end_of_chain(rank: Rank, by_rank: dict[int, Rank]) -> int | None:
    """Whom a rank waits for in the end. None: for all others, or in a circle."""
    passed = {rank.rank}
    at: Rank | None = rank
    while at is not None and at.waits is not None:
        whom = at.waits.for_rank
        if whom is None or whom in passed:
            return None
        passed.add(whom)
        at = by_rank.get(whom)
        if at is None or at.waits is None:
            return whom
    return None


def _sentence(whom: int, held: Rank | None, waiting: list[Rank]) -> str:
    longest = max(waiting, key=lambda rank: rank.waits.seconds if rank.waits else 0.0)
    assert longest.waits is not None
    ranks = ", ".join(str(rank.rank) for rank in sorted(waiting, key=lambda rank: rank.rank))
    those = f"ranks {ranks} wait" if len(waiting) > 1 else f"rank {ranks} waits"
    direct = [r.waits for r in waiting if r.waits and r.waits.for_rank == whom]
    host = next((waits.for_host for waits in direct if waits.for_host), "")
    at = f" on host {host}" if host else ""
    text = f"{those} for rank {whom}{at}, for {longest.waits.seconds:.1f} s"
    if held is None and host:
        text += "; top shows there what it does"
    elif held is None:
        text += "; it is on another host, or its page cannot be read"
    else:
        unit = f" of unit {held.unit}" if held.unit else ""
        stopped = ", stopped by a signal or a debugger," if held.is_stopped else ""
        text += (
            f"; it (pid {held.pid}){stopped} has been in step {held.step}, {held.phase}{unit}, for"
            f" {held.phase_seconds:.1f} s"
        )
    where = next((waits.where for waits in direct if waits.where), "")
    return f"{text}; {where}" if where else text
