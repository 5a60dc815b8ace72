"""Carries the replacement of torch's fully_shard into processes that multiprocessing spawns."""

from __future__ import annotations

import runpy
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_get_preparation_data = spawn.get_preparation_data


class _InChild:
    """Unpickled in a child before it imports the parent's main module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (str(Path(__file__).with_name("_child.py")),)


def _with_child(name: str) -> dict[str, Any]:
    data = _get_preparation_data(name)
    data["fsdp_c"] = _InChild()
    return data


def carry() -> None:
    """Children that are spawned from now on replace torch's fully_shard, too."""
    spawn.get_preparation_data = _with_child


def stop() -> None:
    """Undoes `carry`."""
    if spawn.get_preparation_data is _with_child:
        spawn.get_preparation_data = _get_preparation_data
