"""`make gpu-check`: builds, then checks and times on a GPU all that runs there, beside torch's.

Each part is a process of its own with a limit of time: one that fails, crashes or hangs does not
stop the others. What was found is written to a JSON and a markdown file. `--device cpu` runs the
same parts over host memory, as far as that goes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rows import BAD, Row, Rows, read, shown

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import report  # noqa: E402


@dataclass(frozen=True)
class Part:
    """`run(rows, device_type)` in a module of this folder or of the benchmarks."""

    name: str
    about: str
    module: str
    run: str
    limit_s: int


# In the order of what one wants to know first.
PARTS = [
    Part("build", "the extension and the kernels, for this torch", "gpu_check", "build", 600),
    Part("kernels", "each kernel beside torch", "gpu_kernels_check", "run", 240),
    Part("training", "programs beside torch's", "gpu_train", "run_checks", 600),
    Part("steps", "steps, and host time per unit", "gpu_train", "run_figures", 300),
    Part("optimizers", "their steps, and clipping", "gpu_optim", "run", 120),
    Part("copies", "kernels beside the device's copies", "bench_cuda_kernels", "run", 240),
    Part("nccl", "one rank, and two and three on one GPU", "gpu_nccl", "run", 300),
    Part("sanitizer", "compute-sanitizer", "gpu_kernels_check", "run_sanitizer", 420),
]


def build(rows: Rows, device_type: str) -> None:
    """With nvcc's kernels where nvcc is; the rest runs without them."""
    sys.path.append(str(ROOT / "tests" / "support"))
    import build_script

    rows.check("extension", build_script.build_in_place)
    if not (ROOT / "fsdp_c" / "libfsdp_c_cuda.so").exists():
        rows.left_out("kernels", "nvcc was not found; torch's operators take their place")


# ---- a part, in a process of its own ----


def run_part(part: Part, file: Path, device_type: str) -> None:
    getattr(importlib.import_module(part.module), part.run)(Rows(file, part.name), device_type)


def start(part: Part, file: Path, device_type: str, limit_s: float) -> None:
    """Runs it to its end; what goes wrong with the process itself becomes a row."""
    print(f"{part.name}: {part.about}", flush=True)
    command = [sys.executable, __file__, "--device", device_type]
    command += ["--part", part.name, "--rows", str(file)]
    begun, n_before = time.monotonic(), len(read(file))
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    rows = Rows(file, part.name)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        rows.end("the part itself", "failed", begun, f"not done within {limit_s:.0f} s")
    else:
        if status != 0 or len(read(file)) == n_before:
            rows.end("the part itself", "failed", begun, f"ended with status {status}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
        process.wait()


# ---- all of them ----


def device_name(device_type: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device_type == "cuda" else "host memory"


def tables_of(rows: list[Row]) -> list[report.Table]:
    checks = [row for row in rows if "check" in row]
    table = report.Table("Checks", ["part", "check", "result", "seconds", "note"])
    for row in checks:
        note = " ".join(row["note"].replace("|", "/").split())[:200]
        cells = [row["part"], row["check"], row["result"], str(row["seconds"]), note]
        table.rows.append(cells)
    tables = [table]
    for title in dict.fromkeys(row["table"] for row in rows if "table" in row):
        found = [row for row in rows if row.get("table") == title]
        columns = [name for name in found[0] if name not in ("part", "table")]
        lines = [[_text(row.get(name)) for name in columns] for row in found]
        tables.append(report.Table(title, columns, lines))
    return tables


def _text(cell: Any) -> str:
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)


def write_results(folder: Path, device_type: str, rows: list[Row]) -> Path:
    import torch

    words = argparse.Namespace(quick=device_type == "cpu", impl=["torch", "fsdp_c"])
    facts = report.record("gpu_check", words, rows)
    facts["device"] = device_name(device_type)
    facts["versions"] |= {"cuda": torch.version.cuda}
    kind = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    path = report.result_path(folder, f"gpu_check_{kind}", words.quick, ".json")
    report.write_json(path, facts)
    parts = [f"`{facts['command']}`", f"{facts['device']}; {report.heading(facts)}"]
    path.with_suffix(".md").write_text(
        "\n\n".join([*parts, *(table.render() for table in tables_of(rows))])
    )
    return path


def parser() -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        given, known = text.split(","), [part.name for part in PARTS]
        if unknown := set(given) - set(known):
            raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {known}")
        return given

    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--only", type=names, help="parts, with commas between them")
    made.add_argument("--skip", type=names, default=[])
    made.add_argument("--minutes", type=float, default=25, help="for everything; default 25")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return made


def run_parts(options: argparse.Namespace, file: Path) -> None:
    end = time.monotonic() + options.minutes * 60
    for part in PARTS:
        if part.name in options.skip or (options.only and part.name not in options.only):
            continue
        left = end - time.monotonic()
        if left < 10:
            Rows(file, part.name).not_run("all of it", f"{options.minutes:g} minutes are over")
        else:
            start(part, file, options.device, min(part.limit_s, left))


def main(arguments: list[str] | None = None) -> int:
    """0: all passed, 1: something failed or was not run, 2: there is no GPU."""
    options = parser().parse_args(arguments)
    if options.part:
        run_part(next(p for p in PARTS if p.name == options.part), options.rows, options.device)
        return 0
    import torch  # parts that need it import it themselves

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} sees no GPU here, nothing was checked;"
            " --device cpu tries the checks themselves",
            file=sys.stderr,
        )
        return 2
    print(f"{device_name(options.device)}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows")
        run_parts(options, file)
        rows = read(file)
    path = write_results(options.out, options.device, rows)
    print(f"{counted(rows)}: {path}")
    bad = [row for row in rows if row.get("result") in BAD]
    for row in bad:
        print(f"  {shown(row['result'])} {row['part']}, {row['check']}: {row['note']}")
    return int(bool(bad))


def counted(rows: list[Row]) -> str:
    n = {kind: sum(row.get("result") == kind for row in rows) for kind in ("passed", *BAD)}
    return f"{n['passed']} checks passed, {n['failed']} failed, {n['not run']} not run"


if __name__ == "__main__":
    sys.exit(main())
