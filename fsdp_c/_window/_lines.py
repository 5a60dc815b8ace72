"""What `top` shows, as text."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_c._window import _ranks
from fsdp_c._window._ranks import Host, Rank

HELD_UP_S = 1.0  # the table alone tells shorter waits
COLUMNS = (
    *("rank", "pid", "step", "phase", "for", "unit", "steps/s", "waits for", "memory", "core"),
    "last error",
)


def lines_of(host: Host) -> list[str]:
    """Plain lines: for each run a heading, a table and who holds up whom; then what is not read."""
    lines = []
    for run in _ranks.by_run(host.ranks):
        rows = [COLUMNS, *map(cells_of, run)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines += [heading_of(run)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += notes_of(run)
    return [*lines, *remarks_of(host)]


def heading_of(run: Sequence[Rank]) -> str:
    first = run[0]
    return f"run {first.run}: {first.script}, {len(run)} of {first.world} ranks on this host"


def notes_of(run: Sequence[Rank]) -> list[str]:
    """Who holds up whom, and the last errors."""
    errors = [
        f"rank {rank.rank}, {duration(rank.error.seconds_ago)} ago: {rank.error.text}"
        for rank in run
        if rank.error is not None
    ]
    return [*_ranks.held_up(run, HELD_UP_S), *errors]


def remarks_of(host: Host) -> list[str]:
    """What is not the matter of one run."""
    lines = [f"pid {pid} is not readable: {why}" for pid, why in sorted(host.refused.items())]
    return lines if host.ranks else ["no rank of fsdp_c can be seen on this host", *lines]


def cells_of(rank: Rank) -> tuple[str, ...]:
    """In the order of COLUMNS."""
    return (
        str(rank.rank),
        str(rank.pid),
        str(rank.step),
        "stopped" if rank.is_stopped else rank.phase,
        duration(rank.phase_seconds),
        rank.unit or "-",
        "-" if rank.steps_per_second is None else f"{rank.steps_per_second:.3g}",
        waits_of(rank),
        size(rank.memory.get("resident", 0)),
        size(sum(n for purpose, n in rank.memory.items() if purpose != "resident")),
        "-" if rank.error is None else f"{duration(rank.error.seconds_ago)} ago",
    )


def waits_of(rank: Rank) -> str:
    wait = rank.waits
    if wait is None:
        return "-"
    whom = "others" if wait.for_rank is None else f"rank {wait.for_rank}"
    whom += f" on {wait.for_host}" if wait.for_host else ""
    unit = f" of {wait.unit}" if wait.unit else ""
    return f"{whom}, {duration(wait.seconds)}: {wait.operation}{unit}"


def duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def size(n_bytes: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if n_bytes >= 1 << bits:
            return f"{n_bytes / (1 << bits):.3g} {unit}"
    return f"{n_bytes / 1024:.3g} KiB"
