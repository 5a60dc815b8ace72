"""The training programs of `make gpu-check`, over host memory; and of one that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_scripts")
sys.path.append(str(ROOT / "tests" / "gpu"))

import gpu_beside  # noqa: E402
import gpu_check  # noqa: E402
import gpu_nccl  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_rows  # noqa: E402
from gpu_rows import Rows, read  # noqa: E402
from gpu_sides import PROGRAMS, Side, compare  # noqa: E402

# Beside torch and beside the bare model, of each way to notice that something is wrong.
SOME = {
    "1 rank": ["float32", "frozen, and trained later", "a run that goes on from a snapshot"],
    "2 ranks, gloo": [
        "shards that travel as an extension says",
        "parameters in bfloat16",
        "a run that goes on from a snapshot",
        "failures in forward and backward, then on",
        "clip_grad_norm_ of gradients in memory of their own",
    ],
}


def results(tmp_path: Path, world: str, names: list[str]) -> dict[str, tuple[str, str]]:
    rows = Rows(tmp_path / "rows", "training")
    gpu_beside.run_world(rows, "cpu", world, names)
    return {row["check"]: (row["result"], row["note"]) for row in read(rows.path)}


@pytest.mark.parametrize("world", SOME)
def test_programs_run_over_host_memory(world: str, tmp_path: Path):
    assert set(SOME[world]) <= set(gpu_beside.names_for(world, "cpu"))
    found = results(tmp_path, world, SOME[world])
    assert found == {f"{name}, {world}": ("passed", "") for name in SOME[world]}


BAD = """
import os, sys, time
sys.path.append({folder!r})
import gpu_beside
from gpu_sides import program

def ours(name, **options):
    def decorate(run):
        @program(name, **options)
        def both(side):
            if side.is_ours:
                run(side)
            side.train(side.net(), n_steps=1)
    return decorate

@ours("raises")
def _(side):
    raise ValueError("here")

@ours("differs")
def _(side):
    side.note("loss 7", side.data(0))

@ours("is torch's", on_core=False)
def _(side):
    pass

@program("is more than torch can do")
def _(side):
    assert side.is_ours, "torch's"

@ours("dies")
def _(side):
    os.abort()

@ours("loses the GPU")
def _(side):
    sys.is_lost = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@ours("is good")
def _(side):
    assert not hasattr(sys, "is_lost")

@ours("hangs")
def _(side):
    time.sleep(60)

if __name__ == "__main__":
    gpu_beside.run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
"""


def test_programs_go_on_after_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each has a row, and the good one passes after two new beginnings."""
    script = tmp_path / "bad.py"
    script.write_text(BAD.format(folder=str(ROOT / "tests" / "gpu")))
    monkeypatch.setattr(gpu_beside, "__file__", str(script))
    monkeypatch.setattr(gpu_beside, "PROGRAM_S", 8)
    names = ["raises", "differs", "is torch's", "is more than torch can do", "dies"]
    names += ["loses the GPU", "is good", "hangs"]
    found = results(tmp_path, "1 rank", names)
    wanted = {
        "raises": ("failed", "ValueError: here"),
        "differs": ("failed", "different notes"),
        "is torch's": ("failed", "core"),
        "is more than torch can do": ("left out", "torch's own fails: AssertionError: torch's"),
        "dies": ("failed", "rank 0 of 1 ended with status -6"),
        "loses the GPU": ("failed", "illegal memory access"),
        "is good": ("passed", ""),
        "hangs": ("failed", "rank 0 of 1 ended with status 1"),
    }
    assert list(found) == [f"{name}, 1 rank" for name in names]
    for name, (result, words) in wanted.items():
        assert found[f"{name}, 1 rank"][0] == result, name
        assert words in found[f"{name}, 1 rank"][1], name


def test_programs_that_all_crash_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def crash(*_: object, **__: object) -> None:
        raise gpu_ranks.RankError("rank 1 of 2 ended with status -11")

    monkeypatch.setattr(gpu_ranks, "run", crash)
    names = gpu_beside.names_for("2 ranks, gloo", "cpu")
    found = results(tmp_path, "2 ranks, gloo", names)
    crashed = [f"{name}, 2 ranks, gloo" for name in names[: gpu_beside.PROCESSES_MAX]]
    n_left = len(names) - gpu_beside.PROCESSES_MAX
    assert list(found) == [*crashed, f"{n_left} programs, 2 ranks, gloo"]


def test_what_ranks_need_is_found_from_anywhere(tmp_path: Path):
    """Parts run with their own folder alone on the path."""
    code = "import gpu_nccl; print(gpu_nccl.why_not(2))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "gpu")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, gpu_nccl.why_not(2)), done.stderr


def test_two_ranks_of_a_gpu_leave_out_what_crashes_over_gloo():
    on_gpu, on_host = (gpu_beside.names_for("2 ranks, NCCL", kind) for kind in ("cuda", "cpu"))
    assert {PROGRAMS[name].gathers for name in on_gpu} == {False}
    assert set(on_host) - set(on_gpu) == {
        name for name, program in PROGRAMS.items() if program.gathers and 2 in program.ranks
    }


def test_three_ranks_run_some_and_what_is_theirs():
    found = gpu_beside.names_for("3 ranks, torch's NCCL", "cuda")
    assert {"float32", "larger units", "a mesh of (3, 1)", "a mesh of (1, 3)"} <= set(found)
    assert {PROGRAMS[name].beside for name in found} == {"torch"}
    assert any(PROGRAMS[name].gathers for name in found)  # NCCL's own collectives are there


def test_an_old_nccl_keeps_worlds_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those that need it, and of torch's alone where it is torch's."""

    def why_not(n_ranks: int, by_torch: bool) -> str:
        return "torch's is old" if by_torch else ""

    ran: list[str] = []
    monkeypatch.setattr(gpu_nccl, "why_not", why_not)
    monkeypatch.setattr(gpu_beside, "run_world", lambda rows, kind, world, names: ran.append(world))
    rows = Rows(tmp_path / "rows", "training")
    gpu_beside.run_programs(rows, "cuda")
    assert ran == ["1 rank", "2 ranks, gloo", "2 ranks, NCCL"]
    assert [(row["check"], row["result"], row["note"]) for row in read(rows.path)] == [
        (f"programs, {world}", "not run", "torch's is old")
        for world in ("2 ranks, torch's NCCL", "3 ranks, torch's NCCL", "3 ranks, NCCL")
    ]


def test_what_was_not_run_is_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def start(part: gpu_check.Part, file: Path, device_type: str, limit_s: float) -> None:
        Rows(file, part.name).end("one", "passed", 0.0)
        Rows(file, part.name).left_out("two", "there is no GPU")
        Rows(file, part.name).not_run("three", "it needs NCCL 2.30.3")

    monkeypatch.setattr(gpu_check, "start", start)
    words = ["--device", "cpu", "--only", "nccl", "--out", str(tmp_path)]
    assert gpu_check.main(words) == 1
    said = capsys.readouterr().out
    assert "NOT RUN three: it needs NCCL 2.30.3" in said
    assert "1 checks passed, 0 failed, 1 not run: " in said
    (path,) = tmp_path.glob("*.md")
    assert "not run" in path.read_text()
    assert gpu_check.main([*words, "--minutes", "0"]) == 1
    assert "NOT RUN nccl, all of it: 0 minutes are over" in capsys.readouterr().out


def test_bad_results_are_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    assert [gpu_rows.shown(result) for result in ("passed", "failed")] == ["passed", "FAILED"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert gpu_rows.shown("passed") == "passed"
    assert gpu_rows.shown("not run") == "\033[31mNOT RUN\033[0m"


def noted(*notes: tuple[str, torch.Tensor | None]) -> Side:
    side = Side.__new__(Side)
    side.notes = list(notes)
    return side


ONES, NAN = torch.ones(3), torch.full((3,), torch.nan)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (
            ONES + 1e-3,
            "off by 0.001 of its largest number; allowed 1e-06; weight is the first of 1 in 1",
        ),
        (None, "weight is None"),
        (ONES.double(), r"weight is \(torch.float64"),
        (torch.ones(4), r"weight is \(torch.float32, \(4,\)"),
        (NAN, "weight is off by inf"),
    ],
)
def test_differences_are_told(ours: torch.Tensor | None, words: str):
    with pytest.raises(AssertionError, match=words):
        compare(noted(("weight", ours)), noted(("weight", ONES)), 1e-6)


def test_equal_notes_pass():
    small = ONES + 1e-7
    notes = (("weight", NAN), ("bias", None), ("empty", torch.empty(0)), ("norm", ONES))
    compare(noted(*notes), noted(*notes[:3], ("norm", small)), 1e-6)
    with pytest.raises(AssertionError, match="norm is off by 1.2e-07"):
        compare(noted(*notes), noted(*notes[:3], ("norm", small)), 0.0)
    compare(noted(*notes), noted(*notes[:3], ("norm", small)), 0.0, ulps=1)
    with pytest.raises(AssertionError, match="off by 0.0078 .* allowed 0 or 1 ulps"):
        wide = torch.tensor([1 + 2**-7]), torch.tensor([1.0])
        compare(noted(("norm", wide[0])), noted(("norm", wide[1])), 0.0, ulps=1)
