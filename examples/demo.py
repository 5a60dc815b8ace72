"""The demo: trains a GPT under fsdp_c, then under torch's own fully_shard, and compares the two.

  python examples/demo.py --ranks 2

Ctrl-C saves a checkpoint; the same command with --resume goes on from it. With --kill a rank is
killed half way, and the run goes on from memory: beside one that nobody has killed.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from runlog import Run, log_path, read
from settings import positive, to_arguments, training_options

SCRIPT = Path(__file__).resolve().parent / "train_gpt.py"
INTERRUPTED = 128 + signal.SIGINT


class Launcher:
    """Runs one training at a time under torchrun and hands signals on to it."""

    def __init__(self) -> None:
        self.stopped = 0  # how often the user asked to stop
        self._process: subprocess.Popen | None = None
        self._log: Path | None = None
        self._began = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def run(self, options: argparse.Namespace) -> int:
        """Trains to the end and returns torchrun's exit code."""
        self._log = log_path(options.out, options.impl)
        if not options.resume:
            self._log.unlink(missing_ok=True)
        self._began = time.time()
        launch = ["-m", "torch.distributed.run", "--standalone"]
        variables = {"OMP_NUM_THREADS": "1", **os.environ}
        if options.die_at >= 0:
            launch += ["--max-restarts", "1", "--monitor-interval", "0.1"]
            # A store for each start: in that of dead ranks gloo finds addresses of theirs.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launch += ["--nproc_per_node", str(options.ranks), str(SCRIPT), *to_arguments(options)]
        # One thread a rank, unless the user says otherwise. A session of its own keeps a Ctrl-C
        # of the terminal from torchrun, which would end with a traceback.
        self._process = subprocess.Popen(
            [sys.executable, *launch],
            env=variables,
            start_new_session=True,
        )
        code = self._process.wait()
        self._process = None
        return code

    def _stop(self, number: int, frame: object) -> None:
        self.stopped += 1
        if self._process is None or self._process.poll() is not None:
            return
        rank_0 = self._rank_0()
        if self.stopped == 1 and rank_0:
            # One rank is enough: the ranks agree on the step to stop after.
            os.kill(rank_0, signal.SIGINT)
        else:
            self._process.send_signal(signal.SIGTERM)

    def _rank_0(self) -> int | None:
        """The process of rank 0, if training has begun and not ended."""
        try:
            if self._log.stat().st_mtime < self._began:
                return None  # the log of an earlier run, whose process is gone
            run = read(self._log)
        except (OSError, ValueError):
            return None
        return None if run.end else run.start.get("pid")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[training_options()],
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes to train with")
    parser.add_argument("--no-compare", action="store_true", help="leave out the run under torch")
    parser.add_argument(
        "--kill", action="store_true", help="kill a rank half way; the run goes on from memory"
    )
    return parser.parse_args(arguments)


def has_trained(launcher: Launcher, options: argparse.Namespace, what: str) -> bool:
    """False if the run was interrupted."""
    print(f"\n{what} on {options.ranks} ranks", flush=True)
    code = launcher.run(options)
    if code and not launcher.stopped:
        sys.exit(f"training under {options.impl} failed with exit code {code}; its output is above")
    return not launcher.stopped


def kill_and_go_on(launcher: Launcher, options: argparse.Namespace) -> int:
    """A run whose last rank is killed, one that is left alone, and their losses."""
    died = {"impl": "fsdp_c", "resume": False, "sample_bytes": 0}
    lives = {"killed": {"snapshots": True, "die_at": options.steps // 2}, "undisturbed": {}}
    runs: dict[str, Run] = {}
    for name, more in lives.items():
        out = options.out / name
        mine = argparse.Namespace(**{**vars(options), **died, **more, "out": out})
        if not has_trained(launcher, mine, f"Training, {name},"):
            return INTERRUPTED
        runs[name] = read(log_path(out, "fsdp_c"))
    import demo_report

    demo_report.show_seam(runs["killed"], runs["undisturbed"], options.steps // 2)
    return 0


def train_all(launcher: Launcher, options: argparse.Namespace) -> dict[str, Run] | None:
    """Runs each implementation in turn. None if a run was interrupted or failed."""
    runs: dict[str, Run] = {}
    names = [options.impl]
    if not options.no_compare and options.impl != "torch":
        names.append("torch")
    for name in names:
        mine = argparse.Namespace(**{**vars(options), "impl": name})
        if runs:
            mine.sample_bytes = 0
        if not has_trained(launcher, mine, f"Training under {name}"):
            return None
        runs[name] = read(log_path(options.out, name))
        if not runs[name].steps:
            sys.exit(f"{log_path(options.out, name)} has no steps: run again without --resume")
    return runs


def how_to_resume(options: argparse.Namespace) -> str:
    saved = sorted(options.out.glob("*/checkpoints/step-*"))
    if not saved:
        return "\nInterrupted before there was anything to save."
    given = [a for a in sys.argv[1:] if a != "--resume"] + ["--resume"]
    return (
        f"\nInterrupted. The last checkpoint is {saved[-1]}. To go on:\n"
        f"  make demo ARGS={shlex.quote(shlex.join(given))}\n"
        f"  {shlex.join([Path(sys.executable).name, *sys.argv[:1], *given])}"
    )


def main() -> int:
    options = parse()
    launcher = Launcher()
    if options.kill:
        return kill_and_go_on(launcher, options)
    runs = train_all(launcher, options)
    if runs is None:
        print(how_to_resume(options), flush=True)
        return INTERRUPTED
    import demo_report

    demo_report.show(runs)
    picture = options.out / "demo.png"
    demo_report.draw(runs, picture)
    print(f"Picture: {picture.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
