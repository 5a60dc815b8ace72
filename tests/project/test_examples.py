"""Runs the examples and the demo, and stops and resumes a training run.

Most runs are in forked ranks of the harness, which have imported torch already; those through
torchrun show that it starts them too, and what it does with signals.
"""

import contextlib
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import RankOutcome, run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))
import corpus  # noqa: E402
import runlog  # noqa: E402

TIMEOUT_S = 300
pytestmark = pytest.mark.usefixtures("quick_scripts")
TINY = ["--layers", "1", "--dim", "32", "--seq", "16", "--batch", "2", "--sample-bytes", "8"]
NUMBERED = [
    ("01_minimal.py", 2, "rank 1 holds (32, 64) of (64, 64)"),
    ("02_mixed_precision.py", 2, "gradients torch.float32"),
    ("03_hsdp.py", 4, "rank 3 holds (32, 64) of (64, 64)"),
    ("04_gradient_accumulation.py", 2, "gradient norm"),
]


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen]:
    """A Python process with all that it starts in a session, which does not outlive the block."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def torchrun(script: str, n_ranks: int, *arguments: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n_ranks)]
    return [*launch, str(EXAMPLES / script), *arguments]


def run(arguments: list[str]) -> str:
    """What the command prints; fails if it fails."""
    with started(arguments) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
    return output


def be_a_script(rank: int, n_ranks: int, script: str, arguments: list[str], stop_at: int) -> None:
    """Runs a script as torchrun would; rank 0 gets SIGINT after step `stop_at` of the log."""
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[:] = [str(EXAMPLES / script), *arguments]
    write = runlog.Writer.write

    def write_and_stop(log: runlog.Writer, kind: str, **facts: Any) -> None:
        write(log, kind, **facts)
        if kind == "step" and facts["step"] == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    runlog.Writer.write = write_and_stop
    runpy.run_path(sys.argv[0], run_name="__main__")


def outcomes(script: str, n_ranks: int, *arguments: str, stop_at: int = -1) -> list[RankOutcome]:
    """How the ranks of a script ended."""
    settings = (script, list(arguments), stop_at)
    return run_ranks(be_a_script, n_ranks, *settings, fresh=True, timeout=TIMEOUT_S)


def run_script(script: str, n_ranks: int, *arguments: str, stop_at: int = -1) -> str:
    """What the ranks print; fails if one fails."""
    ended = outcomes(script, n_ranks, *arguments, stop_at=stop_at)
    for outcome in ended:
        assert outcome.ok, f"{outcome.error}\n{outcome.output}"
    return "".join(outcome.output for outcome in ended)


def wait_for_steps(log: Path, n_steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not log.exists() or log.read_text().count('"kind": "step"') < n_steps:
        assert time.monotonic() < deadline, f"{log} did not reach step {n_steps}"
        time.sleep(0.005)


def trajectory(log: Path) -> list[tuple[int, float, float]]:
    return [(s["step"], s["loss"], s["grad_norm"]) for s in runlog.read(log).steps]


@pytest.mark.parametrize(("script", "n_ranks", "expected"), NUMBERED)
def test_numbered_example(script: str, n_ranks: int, expected: str) -> None:
    assert expected in run_script(script, n_ranks)


def test_hugging_face_example() -> None:
    """Where its libraries are installed; elsewhere it says that they are not."""
    if all(importlib.util.find_spec(name) for name in ("transformers", "peft", "accelerate")):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        output = run([*launch, "-m", "fsdp_c", str(EXAMPLES / "07_huggingface.py")])
        assert "runs as FSDPLlamaForCausalLM" in output and "LoRA: loss" in output
    else:
        assert "skipped: No module named" in run_script("07_huggingface.py", 1)


def test_muon_example_equals_one_process() -> None:
    """Step by step, up to the order in which gradients are added (and Muon's bfloat16)."""
    outputs = [run_script("06_muon.py", n_ranks) for n_ranks in (1, 2)]
    assert "rank 1 owns 3 of 6 matrices" in outputs[1]
    losses = [
        [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
        for output in outputs
    ]
    assert len(losses[0]) == 6 and losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_checkpoint_example_goes_on_with_more_ranks(tmp_path: Path) -> None:
    assert "saved after step 20" in run_script("05_checkpoint.py", 2, str(tmp_path))
    output = run_script("05_checkpoint.py", 3, str(tmp_path))
    assert "goes on after step 20" in output and "saved after step 40" in output


def test_demo_compares_and_draws(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "demo.py"), *TINY, "--steps", "6", "--out", str(tmp_path)]
    output = run(command)
    assert "fsdp_c / torch" in output and "tokens/s" in output and "peak memory" in output
    assert "THEY DISAGREE" not in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    losses = [
        [loss for _, loss, _ in trajectory(runlog.log_path(tmp_path, i))]
        for i in ("fsdp_c", "torch")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 6


def test_demo_kills_and_goes_on(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "demo.py"), *TINY, "--steps", "8", "--kill", "--out", str(tmp_path)]
    output = run(command)
    assert "rank 1 kills itself in step 5" in output
    assert re.search(r"started again; goes on after step [34], from memory", output)
    assert "All 8 losses" in output and "THEY DISAGREE" not in output


@pytest.mark.parametrize("impl", ["torch", "fsdp_c"])
def test_interrupted_run_resumes_bit_exactly(tmp_path: Path, impl: str) -> None:
    options = ["--impl", impl, "--steps", "14", *TINY]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_script("train_gpt.py", 2, *options, "--out", str(whole))

    log = runlog.log_path(parts, impl)
    output = run_script("train_gpt.py", 2, *options, "--out", str(parts), stop_at=4)
    assert runlog.read(log).end.get("interrupted"), output
    done = len(runlog.read(log).steps)
    assert 5 <= done < 14

    output = run_script("train_gpt.py", 2, *options, "--out", str(parts), "--resume")
    assert f"at step {done}" in output
    assert trajectory(log) == trajectory(runlog.log_path(whole, impl))
    assert runlog.read(log).end == runlog.read(runlog.log_path(whole, impl)).end
    kept = sorted(p.name for p in (parts / impl / "checkpoints").iterdir())
    assert len(kept) == 2 and kept[-1] == "step-0000014"


def test_interrupted_torchrun_saves(tmp_path: Path) -> None:
    """SIGINT to torchrun and all ranks, as from a terminal."""
    log = runlog.log_path(tmp_path, "fsdp_c")
    command = torchrun("train_gpt.py", 2, *TINY, "--steps", "5000", "--out", str(tmp_path))
    with started(command) as process:
        wait_for_steps(log, 5)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    end = runlog.read(log).end
    assert end.get("interrupted"), output
    saved = tmp_path / "fsdp_c" / "checkpoints" / f"step-{end['n_steps']:07d}" / ".metadata"
    assert saved.exists(), output


def test_demo_says_how_to_resume(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "demo.py"), *TINY, "--impl", "torch", "--steps", "5000"]
    command += ["--ranks", "1", "--out", str(tmp_path)]
    with started(command) as process:
        wait_for_steps(runlog.log_path(tmp_path, "torch"), 2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, output
    assert "Interrupted" in output and "--resume" in output and "Traceback" not in output
    assert list((tmp_path / "torch" / "checkpoints").glob("step-*/.metadata"))


def test_resume_without_and_with_another_checkpoint(tmp_path: Path) -> None:
    """Nothing to resume from is no error; a checkpoint of another model is."""
    options = ["--impl", "torch", "--steps", "2", *TINY, "--out", str(tmp_path), "--resume"]
    assert "no checkpoint" in run_script("train_gpt.py", 1, *options)
    assert len(trajectory(runlog.log_path(tmp_path, "torch"))) == 2
    (refused,) = outcomes("train_gpt.py", 1, *options, "--dim", "64")
    assert not refused.ok
    assert "was written with --dim 32, not 64" in refused.error + refused.output


def test_corpus_keeps_validation_apart() -> None:
    text = corpus.Corpus()
    files = {p.read_bytes() for p in corpus.stdlib_files(Path(os.__file__).parent)}
    kept = {content for content in files if corpus.is_validation(content)}
    assert 0.05 < len(kept) / len(files) < 0.2
    assert not any(content in text.train.tobytes() for content in kept if len(content) > 1000)
    assert all(content in text.validation.tobytes() for content in kept)


def test_batches_depend_on_their_key_alone() -> None:
    first, second = corpus.Corpus(), corpus.Corpus()
    second.batch((9, 9, 9), 4, 16)
    (x, y), (again, _) = first.batch((0, 7, 1), 4, 16), second.batch((0, 7, 1), 4, 16)
    assert x.equal(again) and x[:, 1:].equal(y[:, :-1])
    assert not x.equal(first.batch((0, 8, 1), 4, 16)[0])
