"""Second copies of snapshots, on another host: a run goes on after a host has lost its memory."""

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hosts import run_hosts
from models import data
from test_snapshots import Net, adamw, units

import fsdp_c
from fsdp_c._comm import _hosts
from fsdp_c._snapshots import _copies, _fetch, _files

N_STEPS = 5


class Killed(Exception):
    """Leaves the files as a killed process does."""


def started(**options: Any) -> tuple[Any, Any, Any, int]:
    torch.manual_seed(1)
    model = units(Net())
    optimizer = adamw(model)
    snapshots = fsdp_c.Snapshots(model, optimizer, **options)
    return snapshots, model, optimizer, snapshots.resume()


def train(run: tuple[Any, Any, Any, int], rank: int, n_steps: int) -> dict[int, list[torch.Tensor]]:
    """This rank's shards after each step."""
    snapshots, model, optimizer, first = run
    found = {}
    for step in range(first, n_steps):
        model(data(rank, step, 4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.take(step + 1)
        found[step + 1] = shards_of(model)
    return found


def shards_of(model: Any) -> list[torch.Tensor]:
    return [param._local_tensor.detach().clone() for param in model.parameters()]


def killed(run: Any, rank: int, n_steps: int, awaits_copy: bool = True) -> Any:
    found: Any = None
    try:
        with run[0] as snapshots:
            found = train(run, rank, n_steps)
            snapshots.finish()
            number = snapshots._taking.number
            while awaits_copy and snapshots._taking.peers._word(rank, number) >> 2 != number:
                time.sleep(0.01)
            raise Killed
    except Killed:
        pass
    dist.barrier()
    return found


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def own_files() -> list[Path]:
    return [found.path for found in _files.find()]


def lose(rank: int, n_ranks: int, dead: list[int], awaits_copy: bool) -> None:
    """All that the ranks of a host have kept, theirs and others', is gone."""
    run = started(name=f"lose{n_ranks}{dead[0]}", copies=2)
    assert run[3] == 0
    before = killed(run, rank, N_STEPS, awaits_copy)
    if rank in dead:
        for path in own_files():
            path.unlink(missing_ok=True)
    dist.barrier()
    run = started(name=f"lose{n_ranks}{dead[0]}", copies=2)
    snapshots, model, _, first = run
    assert first in (N_STEPS, N_STEPS if awaits_copy else N_STEPS - 1), first
    assert is_same(shards_of(model), before[first])
    after = train(run, rank, N_STEPS + 3)
    assert set(after) == set(range(first + 1, N_STEPS + 4))
    if first < N_STEPS:
        assert is_same(after[N_STEPS], before[N_STEPS])
    snapshots.finish()
    dist.barrier()
    snapshots.close()
    dist.barrier()
    assert own_files() == []


@pytest.mark.parametrize("awaits_copy", [True, False])
@pytest.mark.parametrize(
    ("hosts", "dead"), [((1, 1), [1]), ((1, 1), [0]), ((2, 1), [0, 1]), ((2, 1, 1), [2])]
)
def test_a_host_that_is_lost(hosts: tuple[int, ...], dead: list[int], awaits_copy: bool) -> None:
    run_hosts(lose, hosts, dead, awaits_copy, timeout=120)


def number_anew(rank: int, n_ranks: int, shelf: Path) -> None:
    """torchrun gives hosts other numbers when it starts them again: files stay where they are."""
    run = started(name="anew")
    before = killed(run, rank, N_STEPS, awaits_copy=False)
    for path in own_files():
        shutil.move(path, shelf / path.name[-3:])
    dist.barrier()
    for slot in range(2):
        shutil.copy(
            shelf / f"{1 - rank}.{slot}", f"/dev/shm/{run[0]._place.stem}-{1 - rank}.{slot}"
        )
    dist.barrier()
    run = started(name="anew")
    snapshots, model, _, first = run
    assert first == N_STEPS
    assert is_same(shards_of(model), before[first])
    train(run, rank, N_STEPS + 2)
    snapshots.close()
    dist.barrier()
    assert own_files() == []  # nor what ranks of other numbers had left


def test_ranks_that_have_other_numbers_now(tmp_path: Path) -> None:
    run_hosts(number_anew, (1, 1), tmp_path, timeout=120)


def number_anew_with_copies(rank: int, n_ranks: int, shelf: Path) -> None:
    """The same: now a rank finds copies of its snapshots on its own host."""
    run = started(name="swapped", copies=2)
    before = killed(run, rank, N_STEPS)
    stem = run[0]._place.stem
    for path in own_files():
        shutil.move(path, shelf / path.name.removeprefix(f"{stem}-"))
    dist.barrier()
    for name in [f"{1 - rank}.{slot}" for slot in (0, 1)] + [f"{rank}.{slot}" for slot in (2, 3)]:
        shutil.copy(shelf / name, f"/dev/shm/{stem}-{name}")
    dist.barrier()
    run = started(name="swapped", copies=2)
    snapshots, model, _, first = run
    assert first == N_STEPS
    assert is_same(shards_of(model), before[first])
    train(run, rank, N_STEPS + 2)
    snapshots.finish()
    dist.barrier()
    snapshots.close()
    dist.barrier()
    assert own_files() == []


def test_copies_of_ranks_that_have_other_numbers_now(tmp_path: Path) -> None:
    run_hosts(number_anew_with_copies, (1, 1), tmp_path, timeout=120)


def damaged(rank: int, n_ranks: int) -> None:
    """A copy that is not what was sent is not gone on from: an older step is."""
    run = started(name="damaged", copies=2)
    killed(run, rank, N_STEPS)
    if rank == 1:
        for path in own_files():
            path.unlink(missing_ok=True)
    else:
        newest = max(
            _files.lying(run[0]._place.folder, run[0]._place.stem, besides=0), key=lambda f: f.step
        )
        with Path(newest.path).open("r+b") as file:
            file.seek(8192)
            byte = file.read(1)
            file.seek(8192)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    snapshots, _, _, first = started(name="damaged", copies=2)
    assert first == N_STEPS - 1
    snapshots.close()


def test_a_damaged_copy() -> None:
    run_hosts(damaged, (1, 1), timeout=120)


def no_room(*_: Any) -> Any:
    raise _files.Unusable("no room")


class NoCopies(_files.Slot):
    """No file for a copy can be made."""

    def __init__(self, path: Path) -> None:
        if path.suffix in (".2", ".3"):
            no_room()
        super().__init__(path)


def without_room(rank: int, n_ranks: int, is_from_the_start: bool) -> None:
    """One host keeps no copies: told once, and the run goes on from what is on each host."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and is_from_the_start:
            patch.setattr(_files, "Slot", NoCopies)
        run = started(name="full", copies=2)
    if rank == 1 and not is_from_the_start:
        (kept,) = run[0]._taking.copies._kept
        for slot in kept.slots:
            slot.reserve = no_room
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        killed(run, rank, N_STEPS)
    texts = [str(one.message) for one in caught if "second copy" in str(one.message)]
    assert len(texts) == (rank == 0), texts
    assert all("host1" in text and "no room" in text for text in texts), texts
    snapshots, _, _, first = started(name="full", copies=2)
    assert first == N_STEPS
    snapshots.close()


@pytest.mark.parametrize("is_from_the_start", [True, False])
def test_a_host_without_room(is_from_the_start: bool) -> None:
    run_hosts(without_room, (1, 1), is_from_the_start, timeout=120)


def lose_after_failures(rank: int, n_ranks: int) -> None:
    """Snapshots that count on one rank alone push out no copy of what all have in common."""
    run = started(name="failures", copies=2)
    snapshots = run[0]
    before = train(run, rank, 1)
    snapshots.finish()
    while snapshots._taking.peers._word(rank, 1) >> 2 != 1:
        time.sleep(0.01)
    if rank == 1:
        for slot in snapshots._taking.slots:
            slot.reserve = no_room
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        killed((*run[:3], 1), rank, N_STEPS)
    if rank == 0:
        for path in own_files():
            path.unlink(missing_ok=True)
    dist.barrier()
    snapshots, model, _, first = started(name="failures", copies=2)
    assert first == 1, first
    assert is_same(shards_of(model), before[1])
    snapshots.close()


def test_a_host_that_is_lost_after_failures() -> None:
    run_hosts(lose_after_failures, (1, 1), timeout=120)


def fails_to_load(rank: int, n_ranks: int, where: str) -> str:
    """Its error is told to all at once: nobody waits for it in what comes next."""

    def fail(*_: Any) -> Any:
        raise Killed("not so")

    run = started(name="load", copies=2)
    killed(run, rank, 2)
    torch.manual_seed(1)
    model = units(Net())
    snapshots = fsdp_c.Snapshots(model, adamw(model), name="load", copies=2)
    if rank == 1:
        setattr(snapshots._resuming if where == "_open_pages" else snapshots._contents, where, fail)
    try:
        snapshots.resume()
    except (Killed, RuntimeError) as error:
        return str(error)
    finally:
        for path in own_files():
            path.unlink(missing_ok=True)
    return ""


@pytest.mark.parametrize("where", ["install", "_open_pages"])
def test_a_rank_that_fails_to_load(where: str) -> None:
    assert run_hosts(fails_to_load, (1, 1), where, timeout=60) == ["not so (rank 1)", "not so"]


def differ(rank: int, n_ranks: int) -> None:
    with pytest.raises(ValueError, match=r"copies=1 on rank 0 and 2 on rank 1"):
        started(name="differ", copies=1 + rank)
    for path in own_files():
        path.unlink(missing_ok=True)


def test_ranks_that_want_other_numbers_of_copies() -> None:
    run_hosts(differ, (1, 1), timeout=60)


def on_one_host(rank: int, n_ranks: int, folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = started(folder=folder, copies=2)
    told = [one for one in caught if "all ranks are on one host" in str(one.message)]
    assert len(told) == (rank == 0)
    train(run, rank, 2)
    run[0].close()


def test_one_host_has_one_copy(tmp_path: Path) -> None:
    run_ranks(on_one_host, 2, tmp_path)
    with pytest.raises(ValueError, match="copies=3"):
        fsdp_c.Snapshots(torch.nn.Linear(2, 2), copies=3)


# ---- who keeps what, and who gives what ----


@pytest.mark.parametrize(
    ("places", "expected"),
    [("aabb", [2, 3, 0, 1]), ("aab", [2, 2, 0]), ("abab", [1, 0, 3, 2]), ("aabc", [2, 2, 3, 0])],
)
def test_keepers_are_on_the_next_host(places: str, expected: list[int]) -> None:
    processes = [f"{place} {pid} 0" for pid, place in enumerate(places)]
    hosts = _hosts.Hosts.of(processes, list(places), list(range(len(places))))
    found = _copies.keepers(hosts)
    assert found == expected
    assert all(places[keeper] != places[rank] for rank, keeper in enumerate(found))


def lying(rank: int, sequence: int) -> _files.Lying:
    return _files.Lying(rank, sequence, sequence * 10, 1, f"{rank}.{sequence}")


def test_plans() -> None:
    both = {(1, 10), (2, 20)}
    assert _fetch.plan([both, {(1, 10)}], [[], []]) == ((1, 10), {})
    assert _fetch.plan([both, set()], [[], []]) == ((0, 0), {})
    # A copy gives more than what all have themselves; the first that has it gives it.
    common, needs = _fetch.plan([both, {(1, 10)}], [[lying(1, 2)], [lying(1, 2)]])
    assert common == (2, 20) and needs == {1: (0, lying(1, 2))}
    common, needs = _fetch.plan([both, set(), both], [[lying(1, 1)], [], [lying(7, 2)]])
    assert common == (1, 10) and needs == {1: (0, lying(1, 1))}


def test_files_of_others(tmp_path: Path) -> None:
    """Whole ones of the run, by name; not this rank's own, nor of other runs, nor links."""
    made = {}
    model = torch.nn.Linear(2, 2)
    for name, n_steps in (("run", 2), ("other", 1)):
        with pytest.raises(Killed), fsdp_c.Snapshots(model, folder=tmp_path, name=name) as one:
            one.resume()
            for step in range(n_steps):
                one.take(step + 1)
            made[name] = one._place.stem
            raise Killed
    stem = made["run"]
    os.symlink(tmp_path / f"{stem}-0.0", tmp_path / f"{stem}-5.0")
    (tmp_path / f"{stem}-6.0").write_bytes(b"short")
    assert _files.lying(tmp_path, stem, besides=0) == []
    found = _files.lying(tmp_path, stem, besides=3)
    assert {(file.rank, file.step) for file in found} == {(0, 1), (0, 2)}
    assert all(_fetch.is_readable(file) and file.n_bytes > 0 for file in found)


# ---- careless ----


def be_careless(rank: int, n_ranks: int, how: str) -> str:
    run = started(name=how, copies=2)
    snapshots, model, _, _ = run
    try:
        with snapshots:
            for step in range(4):
                if rank == 1 and step == 2 and how == "raises":
                    raise Killed
                if rank != 1 or step != 2 or how != "skips":
                    snapshots.take(step + 1)
                if rank == 1 and step == 2 and how == "twice":
                    snapshots.take(step + 1)
                snapshots.finish()
    except Killed:
        return "raised"
    except (RuntimeError, TimeoutError) as error:
        return str(error)
    finally:
        for path in own_files():
            path.unlink(missing_ok=True)
    return ""


@pytest.mark.parametrize(
    ("how", "who", "text"),
    [
        ("raises", 0, "for rank 1, which an exception has ended"),
        ("skips", 0, "of step 3 on rank 0 is of step 4 on rank 1"),
        ("twice", 1, "of step 3 on rank 1 is of step 4 on rank 0"),
    ],
)
def test_ranks_that_differ(how: str, who: int, text: str) -> None:
    """The other one is told how, and does not wait for the process group's timeout."""
    assert text in run_hosts(be_careless, (1, 1), how, timeout=40)[who]
