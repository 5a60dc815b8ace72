"""The only importer of fsdp_c._C: checks first that it was built for the installed torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_REBUILD = "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`"


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def load() -> ModuleType:
    """The extension; ImportError with the cure if it is missing or made for another torch."""
    try:
        built_for: str = importlib.import_module("fsdp_c._build").TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            f"fsdp_c's extension has not been built; from its source folder, {_REBUILD}"
        ) from None
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"fsdp_c was built against torch {built_for}, but torch {torch.__version__} is"
            f" installed; from its source folder, {_REBUILD}"
        )
    try:
        return importlib.import_module("fsdp_c._C")
    except ModuleNotFoundError:
        raise ImportError(
            "fsdp_c's extension is missing or was built for another Python;"
            f" from its source folder, {_REBUILD}"
        ) from None


_C = load()
