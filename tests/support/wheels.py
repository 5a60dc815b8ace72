"""Builds a wheel for each Python and torch, and trains with each where nothing else is installed.

    python tests/support/wheels.py --torches 2.13.0 2.15.0 --pythons 3.11

An environment has that torch alone when pip builds the wheel, as a user's `pip install .` does, and
then the wheel. Environments are removed again; a torch for GPUs takes 5 GB while it is tried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 10)
NEWEST = (3, 14)
_ASK = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('include'))"

TRAINING = """
import torch
import torch.distributed as dist
from torch import nn
import fsdp_c

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
fsdp_c.shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
torch.manual_seed(1 + dist.get_rank())
x, losses = torch.randn(8, 16), []
for _ in range(5):
    losses.append(model(x).square().mean())
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0], losses
roads = {row.road for row in fsdp_c.explain(model).units}
assert roads == {"core over shared memory"}, roads
assert "site-packages" in fsdp_c.__file__, fsdp_c.__file__
dist.destroy_process_group()
"""


class Failed(Exception):
    """What was run, and the end of what it said."""


def run(*command: str | Path, cwd: Path) -> str:
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(words)}\n{done.stdout[-3000:]}")
    return done.stdout


def pythons() -> dict[str, Path]:
    """Every CPython here that is new enough and has its headers, by its version."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    places = [found for name in names if (found := shutil.which(name))]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        places += [p for name in names for p in Path(root).glob(f"versions/*/bin/{name}")]
    found: dict[str, Path] = {}
    for place in [sys.executable, *places]:
        asked = subprocess.run([place, "-c", _ASK], capture_output=True, text=True)
        if asked.returncode == 0:  # else a name that stands for none
            major, minor, include = asked.stdout.split(maxsplit=2)
            if Path(include.strip(), "Python.h").exists():
                found.setdefault(f"{major}.{minor}", Path(place))
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def has_torch(python: Path, version: str, folder: Path) -> bool:
    """Whether there is one to install for this Python."""
    command = [python, "-m", "pip", "install", "-q", f"torch=={version}"]
    try:
        run(*command, cwd=folder)
    except Failed as failure:
        if "No matching distribution found for torch" in str(failure):
            return False
        raise
    return True


def build(python: Path, wheels: Path, folder: Path) -> Path:
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        extensions = [n for n in archive.namelist() if n.startswith("fsdp_c/_C-torch")]
    if len(extensions) != 1:
        raise Failed(f"{wheel.name} has {extensions or 'no extension'}, not one")
    wheels.mkdir(exist_ok=True)
    return Path(shutil.move(wheel, wheels / wheel.name))


def train(python: Path, wheel: Path, folder: Path) -> None:
    run(python, "-m", "pip", "install", "-q", wheel, cwd=folder)
    (folder / "train.py").write_text(TRAINING)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(*torchrun, "train.py", cwd=folder)


def tried(base: Path, torch: str, wheels: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="fsdp_c_wheel_") as name:
        folder = Path(name)
        run(base, "-m", "venv", folder / "env", cwd=folder)
        python = folder / "env/bin/python"
        if not has_torch(python, torch, folder):
            return "this torch has none for this Python"
        wheel = build(python, wheels, folder)
        train(python, wheel, folder)
        return f"{wheel.name} trains on 2 ranks"


def outcomes(
    chosen: Sequence[tuple[str, Path]], torches: Sequence[str], wheels: Path
) -> Iterator[bool]:
    for version, python in chosen:
        for torch in torches:
            try:
                said, is_good = tried(python, torch, wheels), True
            except Failed as failure:
                said, is_good = f"FAILED\n{failure}", False
            print(f"Python {version}, torch {torch}: {said}", flush=True)
            yield is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Wheels for each Python here and each torch.")
    parser.add_argument("--torches", nargs="+", default=["2.13.0", "2.14.0", "2.15.0"])
    parser.add_argument("--pythons", nargs="+", help="versions such as 3.11; default: all here")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="default: dist/")
    args = parser.parse_args()
    here = pythons()
    missing = [version for version in args.pythons or () if version not in here]
    if missing:
        parser.error(f"no Python {', '.join(missing)} with headers here, but {', '.join(here)}")
    chosen = [(v, p) for v, p in here.items() if v in (args.pythons or here)]
    good = list(outcomes(chosen, args.torches, args.wheels.resolve()))
    return 0 if all(good) and good else 1


if __name__ == "__main__":
    sys.exit(main())
