"""`python -m fsdp_c trace`: what ranks did in their last steps, as Perfetto reads it."""

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from test_top import PATIENCE_S, ROOT, eventually, look, make_model, own_page, shown, step

from fsdp_c._window import _page, _processes, _trace

N_STEPS = 3
TRACING = {"FSDP_C_TRACE": "1"}
UNITS = ["(root)", "blocks.0", "blocks.1"]

Span = dict[str, Any]


def spans_of(spans: list[Span], track: str) -> list[Span]:
    """Of one rank, in order of time."""
    names = {s["tid"]: s["args"]["name"] for s in spans if s["name"] == "thread_name"}
    found = [span for span in spans if span["ph"] == "X" and names[span["tid"]] == track]
    return sorted(found, key=lambda span: (span["ts"], -span["dur"]))


def is_within(inner: Span, outer: Span, slack_us: float = 0.01) -> bool:
    """Times are rounded to nanoseconds."""
    begins = inner["ts"] >= outer["ts"] - slack_us
    return begins and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack_us


def check_nesting(spans: list[Span]) -> None:
    """On a track each span lies within those that are still open, or behind them."""
    opened: list[Span] = []
    for span in spans:
        while opened and opened[-1]["ts"] + opened[-1]["dur"] <= span["ts"] + 0.01:
            opened.pop()
        assert not opened or is_within(span, opened[-1]), (span, opened[-1])
        opened.append(span)


# ---- a run ----


def be_traced(rank: int, n_ranks: int, file: Path) -> None:
    model = make_model(n_ranks)
    pids: list[int] = [0] * n_ranks
    dist.all_gather_object(pids, os.getpid())
    for _ in range(N_STEPS):
        step(model, rank)
    dist.barrier()
    assert look(os.getpid()).is_tracing
    if rank == 0:
        _trace.main(["--output", str(file), "--run", str(os.getppid())])
        file.with_suffix(".pids").write_text(json.dumps(pids))
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "callback"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_steps_of_a_run(n_ranks: int, transport: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    run_ranks(be_traced, n_ranks, file, env={**TRACING, "FSDP_C_TRANSPORT": transport})
    written = json.loads(file.read_text())
    assert written.keys() == {"traceEvents", "displayTimeUnit"}
    # Ranks of other tests, which were forked by the same process, may be there, too.
    for rank, pid in enumerate(json.loads(file.with_suffix(".pids").read_text())):
        spans = [span for span in written["traceEvents"] if span["pid"] == pid]
        (title,) = [s["args"]["name"] for s in spans if s["name"] == "process_name"]
        assert title.startswith(f"rank {rank} of run ")
        check_steps(spans, is_alone=n_ranks == 1)


def check_steps(spans: list[Span], is_alone: bool) -> None:
    """The last ones; worlds are used again."""
    phases = spans_of(spans, "phases")[-2 * N_STEPS :]
    assert [phase["name"] for phase in phases] == ["forward", "backward"] * N_STEPS
    last = phases[-1]["args"]["step"]
    assert [p["args"]["step"] for p in phases[::2]] == list(range(last - N_STEPS + 1, last + 1))
    units = spans_of(spans, "units")
    check_nesting(units)
    for phase in phases:
        inside = [span for span in units if is_within(span, phase)]
        used = [span["name"] for span in inside if span["args"]["what"] == phase["name"]]
        assert sorted(set(used)) == UNITS, phase
        assert {span["args"]["step"] for span in inside} == {phase["args"]["step"]}
        reduced = {span["name"] for span in inside if span["args"]["what"] == "reduce"}
        expected = {f"reduce {unit}" for unit in UNITS} if phase["name"] == "backward" else set()
        assert reduced == expected
        # Blocks run within the root's unit, and one after the other.
        of_blocks = [span for span in inside if span["name"] != "(root)"]
        assert all(of["dur"] <= phase["dur"] for of in of_blocks)
    for wait in spans_of(spans, "waits"):
        assert wait["args"].keys() == {"for", "operation", "unit"} and wait["dur"] >= 0
        assert not is_alone or wait["args"]["for"] == "all ranks"  # its own process group


# ---- waits ----


def be_late(rank: int, n_ranks: int, file: Path) -> None:
    """Rank 1 comes when rank 0 is seen to wait, and writes a trace before and after."""
    model = make_model(n_ranks)
    step(model, rank)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def waits_long() -> bool | None:
        waits = look(pids[0]).waits
        return True if waits is not None and waits.seconds > 0.2 else None

    if rank == 1:
        eventually(waits_long)
        _trace.main(["--output", f"{file}.during"])
    step(model, rank)
    dist.barrier()
    if rank == 1:
        _trace.main(["--output", f"{file}.after"])
        file.write_text(json.dumps(pids))
    dist.barrier()


def test_a_wait_is_there_while_it_lasts_and_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    run_ranks(be_late, 2, file, env=TRACING)
    pid = json.loads(file.read_text())[0]
    found = []
    for when in ("during", "after"):
        written = json.loads(Path(f"{file}.{when}").read_text())["traceEvents"]
        waits = spans_of([span for span in written if span["pid"] == pid], "waits")
        longest = max(waits, key=lambda span: span["dur"])
        assert longest["name"] == "for rank 1: all-gather"
        assert longest["args"] == {"for": "rank 1", "operation": "all-gather", "unit": "(root)"}
        assert 0.2e6 < longest["dur"] < PATIENCE_S * 1e6
        found.append(longest["dur"])
    assert found[0] < found[1]


# ---- what is kept ----


def page_with(events: list[tuple[int, ...]], n_events: int, n_kept: int) -> bytearray:
    """A page whose ring holds `n_kept` events; `events` are the last of `n_events`."""
    page = own_page(n_events=n_kept)
    page += bytearray(n_kept * _page.EVENT.size)
    struct.pack_into("=Q", page, 16, len(page))
    struct.pack_into("=2Q", page, _page.USE_AT, 0, n_events)
    names = b"\0a\0b\0"
    page[_page.NAMES_AT : _page.NAMES_AT + len(names)] = names
    at = len(page) - n_kept * _page.EVENT.size
    for n, event in enumerate(events, n_events - len(events)):
        _page.EVENT.pack_into(page, at + n % n_kept * _page.EVENT.size, *event)
    return page


A, B = 1, 3  # names
PHASE, UNIT, PASSED, LEFT, WAIT = (
    _page.EVENTS.index(kind) for kind in ("phase", "unit", "passed", "left", "wait")
)
FORWARD, BACKWARD, BETWEEN = (
    _page.PHASES.index(phase) for phase in ("forward", "backward", "between phases")
)


def read(page: bytes) -> list[Span]:
    with shown(page):
        seen = _processes.Seen()
        seen.look()
        try:
            return list(_trace.of_rank(os.getpid(), seen.pages[os.getpid()]))
        finally:
            seen.close()


def brief(spans: list[Span], track: int) -> list[tuple[str, float, float]]:
    found = [(s["name"], s["ts"], s["dur"]) for s in spans if s["tid"] == track]
    return sorted(found, key=lambda span: (span[1], -span[2]))


def test_ends_are_found_whatever_is_missing() -> None:
    events = [
        (900, 0, LEFT, 0, B, -1),  # its beginning was written over
        (1000, 7, PHASE, FORWARD, 0, -1),
        (2000, 0, UNIT, 0, A, -1),
        (3000, 0, UNIT, 0, B, -1),
        (4000, 0, LEFT, 0, A, -1),  # B has never left
        (5000, 7, PHASE, BACKWARD, 0, -1),
        (6000, 0, UNIT, 0, A, -1),
        (7000, 0, PASSED, 0, A, -1),
        (8000, 0, LEFT, 0, A, -1),
        (8500, 0, PASSED, 0, B, -1),  # was never reached
        (9000, 7, PHASE, BETWEEN, 0, -1),
        (9100, 9200, WAIT, A, B, 3),
        (9300, 9400, WAIT, A, 0, -1),
        (9500, 0, 77, 0, 0, -1),  # of a kind that is not known
    ]
    spans = read(page_with(events, n_events=len(events), n_kept=64))
    assert brief(spans, 1) == [("forward", 1.0, 4.0), ("backward", 5.0, 4.0)]
    assert brief(spans, 2) == [
        *(("a", 2.0, 2.0), ("b", 3.0, 1.0), ("a", 6.0, 1.0), ("reduce a", 7.0, 1.0)),
        ("reduce b", 8.5, 0.5),
    ]
    assert brief(spans, 3) == [("for rank 3: a", 9.1, 0.1), ("for all ranks: a", 9.3, 0.1)]
    check_nesting(sorted((s for s in spans if s["tid"] == 2), key=lambda s: (s["ts"], -s["dur"])))


def test_what_its_owner_may_be_writing_over_is_left_out() -> None:
    kept = 8
    events = [(1000 * n, n, PHASE, FORWARD, 0, -1) for n in range(1, 2 * kept + 3)]
    spans = read(page_with(events, n_events=len(events), n_kept=kept))
    steps = [span["args"]["step"] for span in spans if span["tid"] == 1]
    assert steps == list(range(2 * kept + 2 - kept + 2, 2 * kept + 3))


def test_any_events_are_a_trace() -> None:
    chance = random.Random(2)
    for _ in range(100):
        events = [
            (
                *(chance.randrange(1 << 63) for _ in range(2)),
                chance.randrange(8),
                *(chance.choice([0, 1, 3, 5, 2000, 1 << 31]) for _ in range(2)),
                chance.randrange(-(1 << 31), 1 << 31),
            )
            for _ in range(30)
        ]
        try:
            json.dumps(read(page_with(events, n_events=30, n_kept=64)))
        except _page.Refused as error:
            assert "it has no name of number" in str(error)


# ---- without ----


def be_quiet(rank: int, n_ranks: int) -> None:
    step(make_model(n_ranks), rank)
    found = look(os.getpid())
    assert not found.is_tracing
    seen = _processes.Seen()
    seen.look()
    page = seen.pages[os.getpid()]
    assert page.head.n_events == 0 and list(page.events()) == []
    seen.close()


def test_nothing_is_kept_unasked() -> None:
    run_ranks(be_quiet, 1, env={"FSDP_C_TRACE": "0"})


def test_command_says_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_c", "trace", "--run", "nobody's", "--output", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and not file.exists()
    assert "no rank here is of run nobody's" in done.stderr
