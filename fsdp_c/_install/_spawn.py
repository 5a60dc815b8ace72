"""Carries the replacement of torch's fully_shard into processes that multiprocessing spawns."""

from __future__ import annotations

import runpy
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_get_preparation_data = spawn.get_preparation_data


_has_fsdp1 = False


class _InChild:
    """Unpickled in a child before it imports the parent's main module."""

    def __reduce__(self) -> tuple[Any, ...]:
        path = str(Path(__file__).with_name("_spawn_main.py"))
        return runpy.run_path, (path, {"fsdp1": _has_fsdp1})


def _with_child(name: str) -> dict[str, Any]:
    data = _get_preparation_data(name)
    data["fsdp_c"] = _InChild()
    return data


def carry(fsdp1: bool) -> None:
    """Children that are spawned from now on replace torch's fully_shard, too."""
    global _has_fsdp1
    _has_fsdp1 = fsdp1
    spawn.get_preparation_data = _with_child


def stop() -> None:
    """Undoes `carry`."""
    if spawn.get_preparation_data is _with_child:
        spawn.get_preparation_data = _get_preparation_data
