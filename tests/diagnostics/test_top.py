"""`python -m fsdp_c top`: what ranks do, seen from outside; who is waited for; what is no page."""

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import Net, data, shard_blocks
from parity import on_ranks

import fsdp_c
from fsdp_c._window import _lines, _page, _processes, _ranks, _top

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 40
COMMAND = [sys.executable, "-m", "fsdp_c", "top"]


def make_model(n_ranks: int) -> Net:
    torch.manual_seed(0)
    model = Net(n_blocks=2)
    shard_blocks(model, fsdp_c, mesh=cached_mesh((n_ranks,)))
    return model


def step(model: Net, rank: int) -> None:
    model(data(rank, 0)).square().sum().backward()


@contextlib.contextmanager
def looking() -> Iterator[Callable[[], _ranks.Host]]:
    seen = _processes.Seen()
    try:
        yield lambda: _ranks.look(seen)
    finally:
        seen.close()


def look(pid: int) -> _ranks.Rank:
    """At one process."""
    with looking() as take:
        (found,) = (rank for rank in take().ranks if rank.pid == pid)
    return found


def eventually(find: Callable[[], Any]) -> Any:
    """What it finds at last; it is asked again and again."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := find()) is None:
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found


def run_top(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what a rank does ----


@on_ranks(1, 2, apart=True)  # a process keeps its last error
def test_phases_units_and_steps(rank: int, n_ranks: int) -> None:
    model = make_model(n_ranks)
    seen: list[_ranks.Rank] = []

    def take(*_: Any) -> None:
        seen.append(look(os.getpid()))

    step(model, rank)
    first = look(os.getpid())
    assert (first.rank, first.world, first.run) == (rank, n_ranks, str(os.getppid()))
    assert (first.phase, first.unit, first.waits, first.error) == ("between phases", "", None, None)
    assert not first.is_stopped and not first.is_tracing
    hooked = model.blocks[1]
    for register in (hooked.register_forward_hook, hooked.register_full_backward_hook):
        handle = register(take)
        step(model, rank)
        handle.remove()
    with torch.no_grad():
        hooked.register_forward_hook(take)
        model(data(rank, 0))
    forward, backward, without = seen
    assert (forward.phase, forward.unit, forward.step) == ("forward", "blocks.1", first.step + 1)
    assert (backward.phase, backward.unit, backward.step) == (
        "backward",
        "blocks.1",
        first.step + 2,
    )
    assert (without.phase, without.step) == ("forward without gradients", first.step + 3)
    assert without.steps_per_second and without.steps_per_second > 0
    assert 0 <= forward.phase_seconds < PATIENCE_S
    now = look(os.getpid())
    # As the core counts it when the phase began.
    gradients = sum(p.grad._local_tensor.nbytes for p in model.parameters() if p.grad is not None)
    assert now.memory["gradients"] >= gradients > 0
    assert now.memory["resident"] > now.memory["objects"] > 0
    assert now.memory["shared"] > 0


@on_ranks(1, apart=True)
def test_a_forward_that_an_exception_has_left(rank: int, n_ranks: int) -> None:
    model = make_model(n_ranks)
    step(model, rank)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        step(model, rank)
    found = look(os.getpid())
    assert (found.phase, found.step, found.error) == ("left by an exception", 2, None)
    handle.remove()
    step(model, rank)
    assert look(os.getpid()).phase == "between phases"


@on_ranks(2, apart=True)
def test_a_backward_that_an_exception_has_left(rank: int, n_ranks: int) -> None:
    model = make_model(n_ranks)
    step(model, rank)
    if rank == 1:
        model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        step(model, rank)
    found = look(os.getpid())
    assert found.phase == "left by an exception"
    if rank == 0:
        text = str(caught.value)
        assert "rank 1 left the backward" in text
        assert found.error is not None and found.error.count == 1
        assert found.error.text == text and 0 <= found.error.seconds_ago < PATIENCE_S
        lines = _lines.lines_of(_ranks.Host((found,), {}))
        assert any(text in line for line in lines)


def fail(*_: Any) -> None:
    raise ValueError("on purpose")


# ---- who is waited for ----


def hold_back(model: Net, rank: int, results: Path) -> None:
    """Rank 1 does not come until it is seen that rank 0 waits for it, and how."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    step(model, rank)
    if rank == 1:
        with looking() as take:

            def find() -> _ranks.Host | None:
                host = take()
                ranks = tuple(rank for rank in host.ranks if rank.pid in pids)
                waits = ranks[0].waits
                is_told = waits is not None and waits.seconds > 1.2 and waits.where
                return _ranks.Host(ranks, {}) if is_told else None

            host = eventually(find)
        (results / "host.json").write_text(json.dumps(host.as_json()))
        (results / "lines.txt").write_text("\n".join(_lines.lines_of(host)))
        (results / "once.txt").write_text(run_top("--once", "--run", host.ranks[0].run))
        (results / "json.txt").write_text(run_top("--once", "--json"))
    step(model, rank)


def be_held_up(rank: int, n_ranks: int, results: Path) -> None:
    hold_back(make_model(n_ranks), rank, results)


KEYS = {
    *("run", "script", "pid", "rank", "world", "step", "phase", "phase_seconds", "unit"),
    *("steps_per_second", "waits", "memory", "error", "is_stopped", "is_tracing"),
    "pid_namespace",
}


@pytest.mark.parametrize("transport", ["shm", "callback"])
def test_a_rank_that_holds_up_another_is_named(transport: str, tmp_path: Path) -> None:
    run_ranks(be_held_up, 2, tmp_path, env={"FSDP_C_TRANSPORT": transport})
    held, holding = json.loads((tmp_path / "host.json").read_text())["ranks"]
    assert (held["rank"], held["phase"], held["step"]) == (0, "forward", 2)
    assert (holding["rank"], holding["phase"], holding["step"]) == (1, "between phases", 1)
    waits = held["waits"]
    assert waits["for_rank"] == 1 and waits["operation"] == "all-gather"
    assert waits["unit"] == held["unit"] != ""
    assert "in find" in waits["where"] or "test_top.py" in waits["where"], waits
    assert holding["waits"] is None
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    sentence = next(line for line in lines if line.startswith("rank 0 waits for rank 1, for "))
    assert f"it (pid {holding['pid']}) has been in step 1, between phases, for " in sentence
    assert waits["where"] in sentence
    once = (tmp_path / "once.txt").read_text()
    assert "rank 0 waits for rank 1, for " in once
    assert once.splitlines()[1].split() == "rank pid step phase for unit steps/s".split() + [
        *("waits", "for", "memory", "core", "last", "error")
    ]
    # One line, with the same fields.
    (line,) = (tmp_path / "json.txt").read_text().splitlines()
    found = json.loads(line)
    assert found.keys() == {"schema", "ranks", "refused"} and found["schema"] == 1
    of_run = [rank for rank in found["ranks"] if rank["pid"] in (held["pid"], holding["pid"])]
    assert [rank["rank"] for rank in of_run] == [0, 1]
    for row in [held, holding, *of_run]:
        assert row.keys() == KEYS
        assert row["memory"].keys() == {*_page.PURPOSES, "resident"}
    assert of_run[0]["waits"].keys() == {
        *("for_rank", "for_host", "seconds", "operation", "unit", "where")
    }


def rank_of(rank: int, **changes: Any) -> _ranks.Rank:
    fields = {
        **dict(run="r", script="train.py", pid=100 + rank, rank=rank, world=4, step=7),
        **dict(phase="forward", phase_seconds=9.0, unit="layers.0", steps_per_second=2.0),
        **dict(waits=None, memory=dict.fromkeys((*_page.PURPOSES, "resident"), 1 << 20)),
        **dict(error=None, is_stopped=False, is_tracing=False),
    }
    return _ranks.Rank(**{**fields, **changes})


def waiting(rank: int, whom: int | None, seconds: float = 5.0, where: str = "") -> _ranks.Rank:
    return rank_of(rank, waits=_ranks.Waits(whom, seconds, "all-gather", "layers.0", where))


def test_waits_are_followed_to_their_end() -> None:
    ranks = [waiting(0, 1, 9.0), waiting(1, 3, where="it is at train.py:4 in main")]
    ranks += [waiting(2, 3), rank_of(3, is_stopped=True)]
    assert _ranks.held_up(ranks, 1.0) == [
        "ranks 0, 1, 2 wait for rank 3, for 9.0 s; it (pid 103), stopped by a signal or a debugger,"
        " has been in step 7, forward of unit layers.0, for 9.0 s; it is at train.py:4 in main"
    ]
    assert _ranks.held_up(ranks, 100.0) == []
    assert _ranks.held_up([waiting(0, 1), waiting(1, 0)], 1.0) == []  # the core ends such waits
    assert _ranks.held_up([waiting(0, None)], 1.0) == []
    assert _ranks.held_up([waiting(0, 1)], 1.0) == [
        "rank 0 waits for rank 1, for 5.0 s; it is on another host, or its page cannot be read"
    ]


def test_runs_of_one_name_in_two_containers_are_two() -> None:
    ranks = [rank_of(rank, pid_namespace=space) for space in (1, 2) for rank in (0, 1)]
    found = [[(rank.rank, rank.pid_namespace) for rank in run] for run in _ranks.by_run(ranks)]
    assert found == [[(0, 1), (1, 1)], [(0, 2), (1, 2)]]
    # A run whose ranks have a container each is one.
    apart = [rank_of(rank, pid_namespace=rank + 1) for rank in range(3)]
    assert [len(run) for run in _ranks.by_run(apart)] == [3]


def test_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _top.main(["--once", "--run", "nobody's"])
    assert ended.value.code == 1
    assert "no rank here is of run nobody's: runs that can be seen are " in capsys.readouterr().err


def test_steps_per_second() -> None:
    second = 10**9
    assert _ranks._rate([0], 5 * second) is None
    assert _ranks._rate([0, second, 2 * second], 2 * second) == pytest.approx(1.0)
    # A step that hangs makes it slower.
    assert _ranks._rate([0, second, 2 * second], 100 * second) == pytest.approx(3 / 100)


# ---- processes that have ended ----


def be_killed(rank: int, n_ranks: int, folder: Path) -> None:
    model = make_model(n_ranks)
    step(model, rank)
    child = os.fork()
    if child == 0:  # a worker that outlives its rank
        os.closerange(0, 1024)  # the harness waits for the end of pipes
        signal.pause()
    host = look(os.getpid())
    (folder / f"{rank}.json").write_text(json.dumps([host.pid, child]))
    dist.barrier()
    with looking() as take:
        pids = [rank.pid for rank in take().ranks]
        assert os.getpid() in pids and child not in pids
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    outcomes = run_ranks(be_killed, 2, tmp_path, fresh=True)
    pids = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    try:
        assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
        with looking() as take:
            host = take()
        gone = {pid for pair in pids for pid in pair}
        assert not gone & {rank.pid for rank in host.ranks} and not gone & host.refused.keys()
    finally:
        for _, child in pids:
            os.kill(child, signal.SIGKILL)


def end_while_seen(rank: int, n_ranks: int) -> int:
    step(make_model(n_ranks), rank)
    return os.getpid()


def test_a_page_is_let_go_when_its_process_ends() -> None:
    pool = harness.Pool(harness.seats_on(harness.launcher_for({}), 1))
    try:
        (outcome,) = pool.call(end_while_seen, (), 60)
        seen = _processes.Seen()
        _ranks.look(seen)
        assert outcome.value in seen.pages
        pool.signal(signal.SIGKILL)
        eventually(lambda: True if outcome.value not in pids_after(seen) else None)
        assert outcome.value not in seen.pages
        seen.close()
    finally:
        pool.kill()


def pids_after(seen: _processes.Seen) -> list[int]:
    return [rank.pid for rank in _ranks.look(seen).ranks]


# ---- pages that are none ----


def own_page(**changes: Any) -> bytearray:
    """A page as this process could have it, without a unit."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    values = dict(
        magic=_page.MAGIC,
        version=_page.VERSION,
        n_bytes=0,
        names_bytes=4096,
        n_events=0,
        pid=os.getpid(),
        ticks=ticks,
        rank=0,
        world=1,
        opened=1,
        run=b"mine",
    )
    sizes = {"names_bytes": 4096, "n_events": 0, **changes}
    size = _page.NAMES_AT + 4096 + values["n_events"] * _page.EVENT.size
    values.update(n_bytes=size)
    values.update({name: value for name, value in sizes.items() if name in values})
    page = bytearray(size)
    page[: _page.HEAD.size] = _page.HEAD.pack(*values.values())
    return page


def with_word(at: int, value: int) -> bytearray:
    page = own_page()
    struct.pack_into("=Q", page, at, value)
    return page


def with_unit(name: int, text: bytes) -> bytearray:
    page = with_word(_page.USE_AT, name)
    page[_page.NAMES_AT + name : _page.NAMES_AT + name + len(text)] = text
    struct.pack_into("=Q", page, _page.NOW_AT + 8, 1)  # in forward, so that it is shown
    return page


@contextlib.contextmanager
def shown(page: bytes) -> Iterator[int]:
    """A file of the name that pages have, in this process."""
    fd = os.memfd_create(_page.NAME)
    try:
        os.write(fd, page)
        yield fd
    finally:
        os.close(fd)


def look_at_own() -> tuple[_ranks.Rank | None, str]:
    pid = os.getpid()
    with looking() as take:
        host = take()
    ranks = [rank for rank in host.ranks if rank.pid == pid]
    return (ranks[0] if ranks else None), host.refused.get(pid, "")


def test_a_page_that_is_right_is_read() -> None:
    with shown(own_page()):
        rank, refused = look_at_own()
    assert refused == "" and rank is not None
    assert (rank.run, rank.phase, rank.unit) == ("mine", "set-up", "")
    with shown(with_unit(5, b"layers.0\0")):
        rank, _ = look_at_own()
    assert rank is not None and rank.unit == "layers.0"
    with shown(with_unit(5, b"\x1b[31mred\n\xff\0")):  # a terminal obeys none of it
        rank, _ = look_at_own()
    assert rank is not None and rank.unit == "?[31mred?\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"", "it ends after 0 bytes"),
        (b"\0" * 100, "it ends after 100 bytes"),
        (random.Random(0).randbytes(8192), "it is no page of fsdp_c"),
        (own_page(magic=0), "it is no page of fsdp_c"),
        (own_page(version=9), "its layout is version 9, and this fsdp_c reads 3"),
        (own_page(n_bytes=1 << 40), "its numbers do not fit each other"),
        (own_page(names_bytes=1 << 40), "its numbers do not fit each other"),
        (own_page(n_events=1 << 60), "its numbers do not fit each other"),
        (own_page()[:-1], "its numbers do not fit each other"),
        (with_word(_page.NOW_AT, 7), "its owner never ends writing it"),
        (with_word(_page.NOW_AT + 8, 99), "it is in phase 99"),
        (with_word(_page.USE_AT, 1 << 50), f"it has no name of number {1 << 50}"),
    ],
)
def test_what_is_no_page_is_refused(page: bytes, why: str) -> None:
    with shown(page):
        rank, refused = look_at_own()
        assert rank is None and refused == why
        assert f"pid {os.getpid()} is not readable: {why}" in run_top("--once")


def test_a_page_of_another_process_is_passed_over() -> None:
    for page in (own_page(pid=1), own_page(ticks=1)):
        with shown(page):
            assert look_at_own() == (None, "")


def test_a_page_that_shrinks_under_the_reader() -> None:
    with shown(own_page()) as fd, looking() as take:
        assert os.getpid() in [rank.pid for rank in take().ranks]
        os.ftruncate(fd, 100)
        host = take()
        assert os.getpid() not in [rank.pid for rank in host.ranks]
        assert "it ends after" in host.refused[os.getpid()]


def test_any_bytes_are_shown_or_refused() -> None:
    chance = random.Random(1)
    for _ in range(300):
        page = own_page()
        for _ in range(chance.choice([1, 8, 64])):
            at = chance.randrange(_page.HEAD.size, _page.ERROR_AT + 64) // 8 * 8
            value = chance.choice([1, 2, 3, 1 << 31, 1 << 63, 2**64 - 1])
            struct.pack_into("=Q", page, at, value)
        with shown(page):
            rank, refused = look_at_own()
            assert (rank is None) == bool(refused)
            if rank is not None:
                json.dumps(_ranks.Host((rank,), {}).as_json())
                assert _lines.lines_of(_ranks.Host((rank,), {}))


def test_a_page_that_comes_later_is_found() -> None:
    seen = _processes.Seen()
    _ranks.look(seen)
    assert os.getpid() not in seen.pages
    with shown(own_page()):
        for _ in range(_processes._LOOKS):
            _ranks.look(seen)
        assert os.getpid() in seen.pages
        seen.close()


def test_pages_are_opened_for_reading_alone() -> None:
    import fcntl

    with shown(own_page()) as fd:
        before = os.pread(fd, 1 << 16, 0)
        seen = _processes.Seen()
        _ranks.look(seen)
        page = seen.pages[os.getpid()]
        assert fcntl.fcntl(page._fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        seen.close()
        assert os.pread(fd, 1 << 16, 0) == before


# ---- other users ----


def be_nobody(rank: int, n_ranks: int) -> tuple[list[int], dict[int, str], dict[int, str]]:
    """What a process of another user sees: of this rank, and of a page that it may not open."""
    if os.getuid() != 0:
        pytest.skip("takes root, to become somebody else")
    step(make_model(n_ranks), rank)
    assert look(os.getpid()).rank == rank
    own, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        with looking() as take, open(theirs, "w") as out:
            json.dump(take().as_json(), out)
        os._exit(0)
    os.close(theirs)
    with open(own) as answer:
        host = json.load(answer)
    os.waitpid(child, 0)
    return [rank["pid"] for rank in host["ranks"]], host["refused"], {os.getpid(): ""}


def test_other_users_see_nothing() -> None:
    ((pids, refused, own),) = run_ranks(be_nobody, 1)
    assert not own.keys() & set(pids) and refused == []


# ---- the command ----


def test_layout_is_that_of_the_header(tmp_path: Path) -> None:
    blocks = {"head": _page.HEAD, "now": _page.NOW, "use": _page.USE, "wait": _page.WAIT}
    blocks["error"] = _page.ERROR
    lines = [f'P("{b}_at", offsetof(fc_window_page, {b}));' for b in blocks]
    lines += [f'P("{b}", sizeof(fc_window_{b}));' for b in blocks]
    lines += ['P("event", sizeof(fc_window_event));', 'P("names_at", FC_WINDOW_NAMES_AT);']
    lines += [f'P("{n}", FC_WINDOW_{n});' for n in ("MAGIC", "VERSION", "BEGAN", "PHASE_COUNT")]
    lines += ['P("events", FC_WINDOW_EVENT_COUNT);', 'P("purposes", FC_PURPOSE_COUNT);']
    lines += ['puts("name " FC_WINDOW_NAME);']
    source = tmp_path / "layout.c"
    source.write_text(
        '#include "window/page.h"\n#include <stddef.h>\n#include <stdio.h>\n'
        '#define P(name, value) printf("%s %llu\\n", name, (unsigned long long)(value))\n'
        f"int main(void) {{ {' '.join(lines)} }}\n"
    )
    program = tmp_path / "layout"
    command = ["gcc", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == {
        **{f"{block}_at": str(getattr(_page, f"{block.upper()}_AT")) for block in blocks},
        **{block: str(layout.size) for block, layout in blocks.items()},
        "event": str(_page.EVENT.size),
        "names_at": str(_page.NAMES_AT),
        "MAGIC": str(_page.MAGIC),
        "VERSION": str(_page.VERSION),
        "BEGAN": str(_page.BEGAN),
        "PHASE_COUNT": str(len(_page.PHASES)),
        "events": str(len(_page.EVENTS)),
        "purposes": str(len(_page.PURPOSES)),
        "name": _page.NAME,
    }


def test_it_does_without_torch() -> None:
    program = (
        "import runpy, sys; sys.argv = ['fsdp_c', 'top', '--once'];"
        " runpy.run_module('fsdp_c', run_name='__main__', alter_sys=True);"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def watch_once(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Until it would look again."""

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    _top.main(arguments)


def test_it_goes_on_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown(with_unit(5, b"layers.0\0")):
        for module in ("rich", None):  # None: it cannot be imported
            with monkeypatch.context() as patch:
                if module is None:
                    patch.setitem(sys.modules, "rich.live", None)
                else:
                    pytest.importorskip(module)
                    patch.setattr(sys.stdout, "isatty", lambda: True)
                watch_once(monkeypatch, "--run", "mine")
            written = capsys.readouterr().out
            assert "run mine: " in written and "layers.0" in written
    watch_once(monkeypatch, "--json", "--run", "mine")
    assert json.loads(capsys.readouterr().out)["ranks"] == []


def test_a_pipe_gets_plain_lines_at_once() -> None:
    """Also where rich is there, which would show them at the end."""
    pytest.importorskip("rich")
    watching = subprocess.Popen(
        [*COMMAND, "--every", "0.1"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    patience = threading.Timer(PATIENCE_S, watching.kill)
    patience.start()
    try:
        assert watching.stdout is not None
        # Killed, it does not write what it has kept back.
        line = watching.stdout.readline()
        assert line.startswith(("run ", "no rank of fsdp_c", "pid ")), line
    finally:
        patience.cancel()
        watching.kill()
        watching.wait(20)


def test_without_rich_a_terminal_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    watch_once(monkeypatch)
    assert "pip install 'fsdp_c[top]'" in capsys.readouterr().err


def test_nobody_there() -> None:
    assert _lines.lines_of(_ranks.Host((), {})) == ["no rank of fsdp_c can be seen on this host"]
    for arguments in (["--every", "0"], ["--every", "nan"]):
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and "from 0.05 to 3600" in done.stderr
