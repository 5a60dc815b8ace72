"""python -m fsdp_c top: shows what the ranks on this host do, without touching them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from fsdp_c._window import _processes, _ranks
from fsdp_c._window._ranks import Host, Rank

HELD_UP_S = 1.0  # the table alone tells shorter waits
_CLEAR = "\x1b[H\x1b[2J"
COLUMNS = (
    *("rank", "pid", "step", "phase", "for", "unit", "steps/s", "waits for", "memory", "core"),
    "last error",
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_c top", description=__doc__)
    parser.add_argument("--once", action="store_true", help="look once, print, and end")
    parser.add_argument("--json", action="store_true", help="an object for each look, on a line")
    parser.add_argument("--run", help="only the ranks of this run")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="how often to look; 1"
    )
    options = parser.parse_args(arguments)
    seen = _processes.Seen()
    try:
        if options.json:
            _print_json(seen, options)
        elif options.once:
            print("\n".join(lines_of(_look(seen, options.run))))
        else:
            _watch(seen, options)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read has gone
        sys.stderr.close()
    finally:
        seen.close()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("from 0.05 to 3600")
    return seconds


def _look(seen: _processes.Seen, run: str | None) -> Host:
    host = _ranks.look(seen)
    if run is None:
        return host
    return Host(tuple(rank for rank in host.ranks if rank.run == run), host.refused)


def _print_json(seen: _processes.Seen, options: argparse.Namespace) -> None:
    while True:
        print(json.dumps(_look(seen, options.run).as_json()), flush=True)
        if options.once:
            return
        time.sleep(options.every)


def _watch(seen: _processes.Seen, options: argparse.Namespace) -> None:
    try:
        from rich.live import Live
    except ImportError:
        _watch_plainly(seen, options)
        return
    from fsdp_c._window import _table

    with Live(screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            table = _table.of(_look(seen, options.run), live.console.width)
            live.update(table, refresh=True)
            time.sleep(options.every)


def _watch_plainly(seen: _processes.Seen, options: argparse.Namespace) -> None:
    if sys.stdout.isatty():
        print("for a table that fits the terminal: pip install 'fsdp_c[top]'", file=sys.stderr)
        time.sleep(options.every)
    while True:
        clear = _CLEAR if sys.stdout.isatty() else ""
        print(clear + "\n".join(lines_of(_look(seen, options.run))), flush=True)
        time.sleep(options.every)


# ---- what is shown ----


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
