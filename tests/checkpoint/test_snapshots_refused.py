"""Snapshots in one process: what is refused, what is passed over, what is left behind."""

import dataclasses
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from one_process import Net, by_step, leave, resumed, train, trained
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import StepLR

import fsdp_c
from fsdp_c._comm import _rendezvous
from fsdp_c._install import _launch
from fsdp_c._snapshots import _files, _resuming, _run
from fsdp_c._window import _open


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    monkeypatch.setattr(_files, "MEMORY", tmp_path)
    return tmp_path


# ---- arguments ----

SGD = optim.SGD([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((nn.Linear(1, 1),), {"every": 0}, ValueError, "every=0"),
        ((nn.Linear(1, 1),), {"every": 1.5}, ValueError, "every=1.5"),
        ((nn.Linear(1, 1),), {"name": "a/b"}, ValueError, "name='a/b'"),
        ((nn.Linear(1, 1),), {"extra": [1]}, TypeError, "extra is a list"),
        ((nn.Linear(1, 1),), {"extra": {1: 2}}, TypeError, "extra has the key 1"),
        (([3],), {}, TypeError, "model is a int"),
        ((nn.Linear(1, 1), [3]), {}, TypeError, "optimizer is a int"),
        ((None,), {}, TypeError, "model is a NoneType, not a module$"),
        (({"net": nn.Linear(1, 1)},), {}, TypeError, "model is a dict"),
        ((nn.Linear(1, 1), 3), {}, TypeError, "optimizer is a int"),
        ((nn.Linear(1, 1), optim.SGD), {}, TypeError, "optimizer is the class SGD, not one made"),
        ((SGD, nn.Linear(1, 1)), {}, TypeError, "SGD, not a module: the model comes first"),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), {}, TypeError, "a Linear, a module: .* given first"),
        ((nn.Linear(1, 1), StepLR(SGD, 1)), {}, TypeError, "a StepLR, a scheduler: .* in extra="),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        fsdp_c.Snapshots(*arguments, **options)


def test_calls_out_of_order(tmp_path: Path) -> None:
    snapshots = fsdp_c.Snapshots(nn.Linear(1, 1), folder=tmp_path)
    with pytest.raises(RuntimeError, match="before resume"):
        snapshots.take(1)
    snapshots.resume()
    with pytest.raises(RuntimeError, match="called once"):
        snapshots.resume()
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="no number of steps"):
            snapshots.take(step)  # type: ignore[arg-type]
    snapshots.take(np.int64(1))  # type: ignore[arg-type]
    snapshots.close()
    snapshots.close()
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        snapshots.take(1)


def test_parameters_that_no_model_has(tmp_path: Path) -> None:
    """Nothing else keeps the values of what the optimizer steps."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 3)
    loose = nn.ParameterList([nn.Parameter(torch.ones(5))])
    for optimizer, shape in (
        (optim.SGD(other.parameters()), r"\(3, 2\)"),
        (optim.SGD([*model.parameters(), *loose]), r"\(5,\)"),
    ):
        with pytest.raises(ValueError, match=rf"optimizer 0 \(SGD\).* shape {shape} .* in none of"):
            resumed(tmp_path, model, optimizer)
    assert resumed(tmp_path, [model, loose], optimizer) == 0


def test_extra_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"extra\['way'\] cannot be pickled"):
        resumed(tmp_path, nn.Linear(1, 1), (), extra={"way": lambda: 0})


# ---- other runs ----


def changed_groups(model: nn.Module) -> optim.Optimizer:
    params = list(model.parameters())
    return optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])


@pytest.mark.parametrize(
    ("options", "make", "match"),
    [
        ({"width": 5}, None, r"'layer.weight' has shape \(5, 4\) now, \(4, 4\) in the snapshot"),
        ({}, lambda m: optim.SGD(m.parameters()), r"optimizer 0 is a .*SGD now, a .*AdamW in"),
        ({}, changed_groups, r"groups of \[1, 2\] parameters now, of \[3\]"),
        ({}, lambda m: optim.AdamW([m.wide]), "'layer.bias' in one of them alone"),
        ({}, lambda m: [], "it holds 1 optimizers, there are 0 now"),
    ],
)
def test_another_model(tmp_path: Path, options: Any, make: Any, match: str) -> None:
    leave(tmp_path, 1)
    model = Net(**options)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=match):
        resumed(tmp_path, model, (make or (lambda m: optim.AdamW(m.parameters())))(model))
    assert all(map(torch.equal, before, model.parameters()))
    assert resumed(tmp_path) == 1  # nothing is lost


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({}, r"extra\['rng'\] is in the snapshot alone"),
        ({"scheduler": None}, r"extra\['scheduler'\] is missing there"),
        ({"rng": 3}, r"extra\['rng'\] is a value now, a torch.Generator in the snapshot"),
        ({"rng": nn.Linear(1, 1)}, r"is an object with load_state_dict\(\) now, a torch.Generator"),
    ],
)
def test_other_extra(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    leave(tmp_path, 1, extra={"position": 1, "rng": torch.Generator()})
    model, optimizer = trained(0)
    extra = {"position": 0, **changed}
    if "scheduler" in changed:
        extra |= {"rng": torch.Generator(), "scheduler": optim.lr_scheduler.StepLR(optimizer, 1)}
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=match):
        resumed(tmp_path, model, optimizer, extra=extra)
    assert all(map(torch.equal, before, model.parameters())) and extra["position"] == 0
    assert not optimizer.state


def test_another_dtype_and_names(tmp_path: Path) -> None:
    leave(tmp_path, 1)
    model = Net().double()
    with pytest.raises(RuntimeError, match="'layer.weight' is torch.float64 now, torch.float32"):
        resumed(tmp_path, model, optim.AdamW(model.parameters()))
    model = Net()
    model.more = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="'more' is missing there"):
        resumed(tmp_path, model, optim.AdamW(model.parameters()))
    model = Net()
    del model.count
    with pytest.raises(RuntimeError, match="'count' is in the snapshot alone"):
        resumed(tmp_path, model, optim.AdamW(model.parameters()))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="is a Parameter .* on the meta device"):
        resumed(tmp_path, model, ())


def leave_on_ranks(rank: int, n_ranks: int, folder: Path) -> None:
    leave(folder, 1, 2)


def test_another_world_size(tmp_path: Path) -> None:
    run_ranks(leave_on_ranks, 2, tmp_path)
    with pytest.raises(RuntimeError, match="of 2 ranks, and this run has 1"):
        resumed(tmp_path)


def live_on_a_mesh(rank: int, n_ranks: int, folder: Path, order: list[int]) -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fsdp_c.fully_shard(model, mesh=DeviceMesh("cpu", order))
    try:
        with fsdp_c.Snapshots(model, folder=folder) as snapshots:
            if snapshots.resume() == 0:
                snapshots.take(1)
            raise ZeroDivisionError
    except (RuntimeError, ZeroDivisionError) as error:
        return str(error)


def test_another_order_of_ranks(tmp_path: Path) -> None:
    """Shards of another place in the mesh have the same shapes."""
    run_ranks(live_on_a_mesh, 2, tmp_path, [0, 1])
    for outcome in run_ranks(live_on_a_mesh, 2, tmp_path, [1, 0]):
        text = r"its meshes are \(2,\) of ranks \[0, 1\], and \(2,\) of ranks \[1, 0\] now"
        assert re.search(text, outcome), outcome
    for outcome in run_ranks(live_on_a_mesh, 2, tmp_path, [0, 1]):
        assert outcome == ""


def test_of_another_process(tmp_path: Path) -> None:
    leave(tmp_path, 1)
    slot = _files.Slot(next(tmp_path.glob("*.0")))
    owner = slot.owner()
    assert owner is not None
    parent = _rendezvous.process_of(os.getppid())
    slot.set_owner(dataclasses.replace(owner, process=parent))
    with pytest.raises(RuntimeError, match=f"process {os.getppid()} writes"):
        resumed(tmp_path)


def test_two_processes_at_once(tmp_path: Path) -> None:
    """One comes while the other one meets its ranks: it does not become a second writer."""
    leave(tmp_path, 1)
    here = _rendezvous.this_process().split()[0]
    for slot in map(_files.Slot, tmp_path.iterdir()):
        owner = slot.owner()
        assert owner is not None
        slot.set_owner(dataclasses.replace(owner, process=f"{here} {os.getpid()} 1"))  # gone
    snapshots = fsdp_c.Snapshots(*trained(0), folder=tmp_path)
    tell = snapshots._resuming._meeting.tell

    def tell_late(*args: Any) -> Any:
        if not codes:
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # torch's threads are not there
                _resuming._in_use.clear()
                try:
                    os._exit(resumed(tmp_path))
                except RuntimeError as error:
                    os._exit(100 if f"process {os.getppid()} writes" in str(error) else 101)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return tell(*args)

    codes: list[int] = []
    snapshots._resuming._meeting.tell = tell_late  # type: ignore[method-assign]
    assert snapshots.resume() == 1 and codes == [100]
    snapshots.close()


def test_same_name_twice(tmp_path: Path) -> None:
    first, second, third = (fsdp_c.Snapshots(nn.Linear(1, 1), folder=tmp_path) for _ in range(3))
    first.resume()
    with pytest.raises(RuntimeError, match="called 'main' already"):
        second.resume()
    other = fsdp_c.Snapshots(nn.Linear(1, 1), folder=tmp_path, name="other")
    assert other.resume() == 0
    first.close()
    assert third.resume() == 0
    third.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


# ---- what is not whole ----


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_torn_ones_are_passed_over(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2, 3)
    assert by_step(tmp_path).keys() == {2, 3}
    damage(by_step(tmp_path)[3], 10_000)
    with pytest.warns(UserWarning, match="damaged: its bytes are not those of step 3"):
        model, optimizer = trained(0)
        with (
            pytest.raises(ZeroDivisionError),
            fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots,
        ):
            assert snapshots.resume() == 2
            raise ZeroDivisionError
    expected, _ = trained(2)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    damage(by_step(tmp_path)[2], 8)  # the header
    assert resumed(tmp_path) == 0


def live_thrice(rank: int, n_ranks: int, folder: Path) -> list[int]:
    """Each life trains otherwise; in the second one rank 1 has no room for step 2."""
    found = []
    for life in range(3):
        model = nn.Linear(2, 2)
        with (
            pytest.raises(ZeroDivisionError),
            fsdp_c.Snapshots(model, folder=folder) as snapshots,
        ):
            found.append(snapshots.resume())
            for step in range(found[-1] + 1, 3):
                nn.init.constant_(model.weight, 10 * life + step)
                if life == 1 and rank == 1:
                    for slot in snapshots._taking.slots:
                        slot.reserve = refuse  # type: ignore[method-assign]
                snapshots.take(step)
            raise ZeroDivisionError
        dist.barrier()
        mine = {f.step: f.path for f in _files.find(folder) if f.rank == rank}
        if life == 0:  # a host that is not there in the next life has this
            if rank == 1:
                os.link(mine[2], folder / "gone")
            mine[2].unlink()
        elif life == 1 and rank == 1:
            (folder / "gone").rename(folder / "fsdp_c-snapshots-main-1.2")
        dist.barrier()
    return [*found, int(model.weight[0, 0])]


def refuse(n_bytes: int) -> None:
    raise _files.Unusable("no room")


def test_steps_of_two_lives_are_not_mixed(tmp_path: Path) -> None:
    """A file of an earlier life comes back, of a step that was made again since."""
    found = run_ranks(live_thrice, 2, tmp_path, timeout=60)
    assert found == [[0, 1, 1, 22]] * 2


def test_cut_off_files(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2)
    os.truncate(by_step(tmp_path)[2], 50_000)
    assert resumed(tmp_path) == 1
    leave(tmp_path, 1)
    for path in tmp_path.iterdir():
        path.write_bytes(b"something else")
    assert resumed(tmp_path) == 0


def test_memory_written_between_does_not_count(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    snapshots.resume()
    train(model, optimizer)
    snapshots.take(1)
    with torch.no_grad():
        model.wide.mul_(0.5)
    with pytest.warns(UserWarning, match="'wide' was written between take"):
        train(model, optimizer)
    assert by_step(tmp_path).keys() == {None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (2, 3):
            snapshots.take(step)
            with torch.no_grad():
                model.wide.mul_(0.5)
            train(model, optimizer)
    assert by_step(tmp_path).keys() == {2, 3}
    snapshots.close()


def test_a_full_file_system(tmp_path: Path) -> None:
    """A limit of file sizes stands for it: what fails is the same call."""
    model, optimizer = trained(0)
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    snapshots.resume()
    train(model, optimizer)
    snapshots.take(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        train(model, optimizer)
        with pytest.warns(UserWarning, match="took none, and the run goes on: no .*too large"):
            snapshots.take(2)
        train(model, optimizer)
        snapshots.take(3)
        assert by_step(tmp_path).keys() == {1, None}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    snapshots.take(4)  # there is room again
    snapshots.finish()
    assert by_step(tmp_path).keys() == {1, 4}
    snapshots.close()
    about = os.statvfs_result((4096, 4096, 10, 5, 3, 0, 0, 0, 0, 255))
    again = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    again.resume()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda file: about)
        patch.setattr(os, "statvfs", lambda path: about)
        with pytest.warns(
            UserWarning,
            match="is full: it has 12.00 KiB left.* more for.*--shm-size",
        ):
            again.take(1)
    again.close()


def test_no_room_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model, optimizer = trained(0)
    for path in _files.paths(tmp_path, "fsdp_c-snapshots-main", 0):
        path.mkdir()
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path)
    with pytest.warns(UserWarning, match="none are taken, and the run goes on: .*cannot be opened"):
        assert snapshots.resume() == 0
    snapshots.take(1)
    snapshots.close()
    about = os.statvfs_result((4096, 4096, 10, 5, 0, 0, 0, 0, 0, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda file: about)
        patch.setattr(os, "statvfs", lambda path: about)
        snapshots = fsdp_c.Snapshots(model, optimizer, folder=tmp_path, name="full")
        with pytest.warns(UserWarning, match="none are taken, and the run goes on: .* is full"):
            assert snapshots.resume() == 0
    assert not [path for path in tmp_path.iterdir() if "full" in path.name]


# ---- files ----


def test_left_overs_of_dead_launchers(in_memory: Path) -> None:
    model, optimizer = trained(0)

    def names() -> set[str]:
        return {path.name for path in in_memory.iterdir()}

    first = fsdp_c.Snapshots(model, optimizer)
    first.resume()
    mine = names()
    assert len(mine) == 2 and all(
        (path.stat().st_mode & 0o777) == 0o600 for path in in_memory.iterdir()
    )
    first.take(1)
    first.finish()
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = _rendezvous.this_process().split()[0]
    outside = f"{here} 0 None"  # `docker exec`, which may start it again
    dead = f"{here} {gone.pid} 1"
    for run, launcher in (("dead", dead), ("alive", _run.launcher()), ("outside", outside)):
        slot = _files.Slot(in_memory / f"fsdp_c-snapshots-0-{run}-main-0.0")
        slot.set_owner(_files.Owner("x.py", launcher, dead, "main", 0, 1))
        slot.close()
    for run, age_s in (("new", 0), ("nameless", 3600)):  # killed before there was an owner in it
        path = in_memory / f"fsdp_c-snapshots-0-{run}-main-0.0"
        _files.Slot(path).close()
        os.utime(path, (time.time() - age_s,) * 2)
    second = fsdp_c.Snapshots(model, optimizer, name="second")
    second.resume()
    alive = {f"fsdp_c-snapshots-0-{run}-main-0.0" for run in ("alive", "outside", "new")}
    assert mine | alive < names() and len(names()) == 7
    second.close()
    first.close()
    assert names() == alive


def test_runs_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launcher = _run.launcher()
    assert launcher.split()[1] == str(os.getppid())
    named = _run.digest(launcher)
    assert named == _run.digest(launcher) != _run.digest(launcher + "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    assert named != _run.digest(launcher)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    named = _run.digest(launcher)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--lr=0.2"])
    assert named != _run.digest(launcher)


def test_launcher_is_past_shells() -> None:
    program = "from fsdp_c._snapshots import _run; print(_run.launcher())"
    command = ["sh", "-c", '("$0" -c "$1"; true); true', sys.executable, program]
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHELASTIC_RUN_ID": "some-run"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == _rendezvous.this_process(), done.stderr


ENDS = """
import os, sys
import torch
import fsdp_c

def live(name, end):
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters())
    snapshots = fsdp_c.Snapshots(model, optimizer, folder=sys.argv[1], name=name)
    snapshots.resume()
    snapshots.take(3)
    end(snapshots)

def fail(snapshots):
    raise ZeroDivisionError

torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # imports what it needs
sys.stderr = open(os.devnull, "w")
for name, end in {
    "returns": lambda snapshots: None,
    "exits.with.1": lambda snapshots: sys.exit(1),
    "raises": fail,
    "ends.at.once": lambda snapshots: os._exit(0),
    "closes": lambda snapshots: snapshots.close(),
}.items():
    if os.fork() == 0:
        live(name, end)
        sys.exit(0)
    os.wait()
"""


def test_ends_of_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=60)
    left = {found.run: found.step for found in _files.find(tmp_path) if found.step is not None}
    # os._exit lets nothing finish, so that its copy may be lost.
    assert left.items() - {("ends.at.once", 3)} == {("exits.with.1", 3), ("raises", 3)}
    assert len(_files.find(tmp_path)) == 6


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str) -> str:
        _launch.main(["snapshots", "--folder", str(tmp_path), *arguments])
        return capsys.readouterr().out

    assert "there are no snapshots" in output()
    leave(tmp_path, 4, 5)
    head, row = output().splitlines()
    assert head.split()[:6] == ["run", "of", "name", "ranks", "step", "size"]
    # As `top` calls it.
    assert row.split()[0] == _open.name_of_run() == str(os.getppid())
    assert row.split()[2] == "main" and "1 of 1" in row and " 5 " in row and "MiB" in row
    assert "a living process writes it" in output("--remove")
    for path in tmp_path.iterdir():
        slot = _files.Slot(path)
        owner = slot.owner()
        assert owner is not None
        here, _, _ = owner.process.split()
        slot.set_owner(dataclasses.replace(owner, process=f"{here} 1 1"))
        slot.close()
    assert "its launcher lives" in output("--remove")
    with pytest.raises(SystemExit):
        output("--remove", "nobody")
    assert f"{os.getppid()}: removed" in output("--remove", str(os.getppid()))
    assert list(tmp_path.iterdir()) == []


def test_command_and_files_of_an_older_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in _files.paths(tmp_path, "fsdp_c-snapshots-0-abc-main", 0):
        slot = _files.Slot(path)
        slot.set_owner(_files.Owner("x.py", "nobody 1 1", "nobody 1 1", "main", 0, 1))
        slot.close()
    folder = ["snapshots", "--folder", str(tmp_path)]
    _launch.main(folder)
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["0-abc-main", "x.py", "main"]
    _launch.main([*folder, "--remove", "0-abc-main"])
    assert list(tmp_path.iterdir()) == []


def test_a_copy_under_way_is_an_error() -> None:
    """Not the end of the process: errors of Python's need the interpreter's lock."""
    from fsdp_c._native import _C

    tensor = torch.zeros(16 << 20)
    room = _C.snapshot_room(tensors=[tensor], index_bytes=1)
    files = [mmap.mmap(-1, 2 * room) for _ in range(2)]
    copier = _C.SnapshotCopier()
    job: dict[str, Any] = {
        "locals": [tensor],
        "sources": [tensor],
        "shown": [tensor],
        "now": [False],
        "watched": [True],
        "index": b"x",
    }

    def start(number: int) -> None:
        copier.start(**job, file=files[number % 2], sequence=number + 1, step=number)

    errors = []
    for number in range(0, 40, 2):  # until a copy is slower than this thread
        start(number)
        try:
            start(number + 1)
        except RuntimeError as error:
            errors.append(str(error))
        assert copier.finish() == []
        if errors:
            break
    assert errors and "a copy is under way" in errors[0]


class Interrupted:
    """Ctrl-C comes when a call has done its work."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method = inner, method

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._inner, name)
        self._method = ""

        def call(*args: Any, **given: Any) -> None:
            getattr(self._inner, name)(*args, **given)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize(
    ("method", "is_whole"),
    [("reserve", False), ("start", False), ("finish", True), ("tell", True)],
)
def test_interrupted(tmp_path: Path, method: str, is_whole: bool) -> None:
    """A program that goes on after Ctrl-C has snapshots of its later steps."""
    model, optimizer = trained(1)
    with fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots:
        snapshots.resume()
        taking = snapshots._taking
        if method == "reserve":
            taking.slots[:] = [Interrupted(slot, method) for slot in taking.slots]
        elif method == "tell":
            taking.peers = Interrupted(taking.peers, method)
        else:
            taking.copier = Interrupted(taking.copier, method)
        with pytest.raises(KeyboardInterrupt):
            snapshots.take(1)
            optimizer.step()
        assert set(by_step(tmp_path)) == ({None, 1} if is_whole else {None})
        if method == "reserve":  # of the other file, too
            taking.slots[:] = [slot._inner for slot in taking.slots]
        for step in (2, 3):
            train(model, optimizer)
            snapshots.take(step)
        snapshots.finish()
        assert set(by_step(tmp_path)) == {2, 3}


def test_interrupted_before_it_is_known_what_was_written(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    with fsdp_c.Snapshots(model, optimizer, folder=tmp_path) as snapshots:
        snapshots.resume()
        snapshots.take(1)
        snapshots.finish()
        snapshots.take(2)
        snapshots._taking.copier = Interrupted(snapshots._taking.copier, "finish")
        with torch.no_grad():
            model.wide.add_(1)
        with pytest.raises(KeyboardInterrupt):
            snapshots.finish()
        snapshots.take(3)
        snapshots.finish()
        assert set(by_step(tmp_path)) == {1, 3}  # and not over what the ranks have in common
