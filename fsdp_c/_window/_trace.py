"""python -m fsdp_c trace: writes what the ranks on this host did in their last steps, for Perfetto
or chrome://tracing. Ranks keep it where FSDP_C_TRACE=1 was set as they began."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_c._window import _page, _processes
from fsdp_c._window._page import Event, Page, Refused

_PHASES, _UNITS, _WAITS = 1, 2, 3  # tracks of a rank
_TRACKS = {_PHASES: "phases", _UNITS: "units", _WAITS: "waits"}
# Phases that are shown; between them is the script's own work.
_SHOWN = ("forward", "forward without gradients", "unshard", "backward")

Span = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_c trace", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("fsdp_c_trace.json"), metavar="FILE")
    parser.add_argument("--run", help="only the ranks of this run, as top names it")
    options = parser.parse_args(arguments)
    seen = _processes.Seen()
    try:
        spans, ranks = _spans(seen, options.run)
        _processes.require_run(parser, seen, options.run)
    finally:
        seen.close()
    if not ranks:
        parser.exit(
            1, "no rank here keeps a trace: start the run with FSDP_C_TRACE=1 in its environment\n"
        )
    with options.output.open("w") as file:
        json.dump({"traceEvents": spans, "displayTimeUnit": "ms"}, file)
    print(
        f"wrote {options.output}: {len(spans)} events of {ranks} ranks; open it at"
        " https://ui.perfetto.dev or in chrome://tracing"
    )


def _spans(seen: _processes.Seen, run: str | None) -> tuple[list[Span], int]:
    """Of all ranks that trace, and how many these are."""
    seen.look()
    spans: list[Span] = []
    ranks = 0
    for pid, page in sorted(seen.pages.items(), key=lambda item: item[1].head.rank):
        if page.head.n_events == 0 or run not in (None, page.head.run):
            continue
        try:
            found = [*_metadata(pid, page), *of_rank(pid, page)]
        except Refused:
            continue
        spans += found
        ranks += 1
    first = min((span["ts"] for span in spans if "ts" in span), default=0)
    for span in spans:
        if "ts" in span:
            span["ts"] = round(span["ts"] - first, 3)
    return spans, ranks


def _metadata(pid: int, page: Page) -> Iterator[Span]:
    name = f"rank {page.head.rank} of run {page.head.run}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    order = {"sort_index": page.head.rank}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": order}
    for track, title in _TRACKS.items():
        args = {"name": title}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": args}


def of_rank(pid: int, page: Page) -> Iterator[Span]:
    """Complete events; what goes on still ends now."""
    events, wait = list(page.events()), page.wait()
    now_ns = time.monotonic_ns()
    phases = [event for event in events if event.kind == "phase"]
    for event, until in zip(phases, [*(e.from_ns for e in phases[1:]), now_ns], strict=False):
        if event.what < len(_page.PHASES) and _page.PHASES[event.what] in _SHOWN:
            args = {"step": event.value}
            name = _page.PHASES[event.what]
            yield _span(pid, _PHASES, name, event.from_ns, until, args)
    yield from _units(pid, page, events, now_ns)
    for event in events:
        if event.kind == "wait":
            name, unit = page.name(event.what), page.name(event.unit)
            yield _wait(pid, event.rank, name, unit, event.from_ns, event.value)
    if wait is not None:
        yield _wait(pid, wait.rank, wait.op, wait.unit, wait.since_ns, now_ns)


def _units(pid: int, page: Page, events: Sequence[Event], now_ns: int) -> Iterator[Span]:
    """Spans that lie within each other: whoever begins later ends first."""
    opened: list[tuple[int, str, int]] = []  # unit, what it does, since when
    doing, step = "", 0

    def close(until: int) -> Iterator[Span]:
        unit, what, since = opened.pop()
        name = page.name(unit) or "?"
        args = {"step": step, "what": what}
        label = name if what != "reduce" else f"reduce {name}"
        yield _span(pid, _UNITS, label, since, until, args)

    def close_down_to(unit: int, until: int) -> Iterator[Span]:
        if any(entry[0] == unit for entry in opened):
            while opened[-1][0] != unit:
                yield from close(until)
            yield from close(until)

    for event in events:
        if event.kind == "phase":
            while opened:
                yield from close(event.from_ns)
            doing = _page.PHASES[event.what] if event.what < len(_page.PHASES) else ""
            step = event.value
        elif event.kind == "unit":
            opened.append((event.unit, doing, event.from_ns))
        elif event.kind == "passed":
            yield from close_down_to(event.unit, event.from_ns)
            opened.append((event.unit, "reduce", event.from_ns))
        elif event.kind == "left":
            yield from close_down_to(event.unit, event.from_ns)
    while opened:
        yield from close(now_ns)


def _wait(pid: int, rank: int | None, name: str, unit: str, since_ns: int, until_ns: int) -> Span:
    whom = "all ranks" if rank is None else f"rank {rank}"
    args = {"for": whom, "operation": name, "unit": unit}
    return _span(pid, _WAITS, f"for {whom}: {name}", since_ns, until_ns, args)


def _span(pid: int, track: int, name: str, since_ns: int, until_ns: int, args: Any) -> Span:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": track,
        "ts": since_ns / 1e3,
        "dur": round(max(until_ns - since_ns, 0) / 1e3, 3),
        "args": args,
    }
