"""The version, which the build reads here too; which torches this copy was built for, and how to
get it for another one. Loads no torch."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__version__ = "0.1.0"  # wheels add a suffix for their torch

FOLDER = Path(__file__).parent
_PREFIX = "_C-torch"


class NotBuilt(ImportError):
    """No file of the extension fits this torch and this Python; the text says what to do."""


def minor_of(version: str) -> str:
    """2.13 of 2.13.1+cpu: what a build depends on."""
    return ".".join(version.split(".")[:2])


def torches(folder: Path = FOLDER) -> list[str]:
    """The torches that `folder` has a build for, by this Python; oldest first."""
    suffix = EXTENSION_SUFFIXES[0]
    files = folder.glob(f"{_PREFIX}*{suffix}")
    found = (file.name[len(_PREFIX) : -len(suffix)] for file in files)
    return sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])


def extension(torch_version: str, folder: Path = FOLDER) -> Path:
    """The extension's file for a version of torch; NotBuilt with the cure if none fits."""
    minor = minor_of(torch_version)
    path = folder / f"{_PREFIX}{minor}{EXTENSION_SUFFIXES[0]}"
    if path.exists():
        return path
    others = torches(folder)
    if others:
        what = f"built for torch {' and '.join(others)}, but torch {torch_version} is installed"
    else:
        what = "not built for this Python"
    raise NotBuilt(f"fsdp_c {__version__} was {what}: {_cure(minor, others, folder)}")


def _cure(minor: str, others: list[str], folder: Path) -> str:
    root = folder.parent
    if (root / "setup.py").is_file() and (root / "csrc").is_dir():
        return (
            f"build it for this environment with `pip install --no-deps -e {root}`, or, if one is"
            f" installed, run from another folder than {root}, which hides it"
        )
    wheel = f"install a build for torch {minor}, whose version ends in +torch{minor}"
    if not others:
        return wheel
    return f"go back with `pip install 'torch=={others[-1]}.*'`, or {wheel}"


def describe() -> str:
    """One line: this version, what it was built for, and the torch that is installed."""
    import importlib.metadata  # takes as long as the rest of a start

    found = torches()
    built = f"built for torch {' and '.join(found)}" if found else "not built for this Python"
    try:
        torch = f"torch {importlib.metadata.version('torch')} is installed"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch is installed"
    return f"fsdp_c {__version__}, {built}; {torch}"
