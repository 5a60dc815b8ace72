"""install() and uninstall(): fsdp_c's fully_shard in the place of torch's, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.distributed.fsdp._fully_shard import _fully_shard as _torch

from fsdp_c import _delegate, _replicate, _spawn
from fsdp_c._fully_shard import fully_shard

_TORCHS: Any = _torch.fully_shard
_rebound: list[tuple[ModuleType, str]] = []
_is_installed = False


def install() -> None:
    """Makes every ``fully_shard`` of torch fsdp_c's, for scripts that must stay as they are.

    The names in torch's modules and in all modules that imported the function by name are bound
    anew; torch's function itself delegates, for those who hold it in another way. Processes that
    `multiprocessing` spawns do the same. Models that are sharded already stay with torch.
    Calling it again does nothing.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _delegate.redirect(_TORCHS, fully_shard)
    for module, name in _holders(_TORCHS):
        _rebound.append((module, name))
        setattr(module, name, fully_shard)
    _replicate.install()
    _spawn.carry()


def uninstall() -> None:
    """Takes `install` back; models that are sharded already stay with fsdp_c.

    A module outside of torch that imported the name in between keeps fsdp_c's function.
    """
    global _is_installed
    if not _is_installed:
        return
    _is_installed = False
    _spawn.stop()
    _replicate.uninstall()
    in_torch = [(m, n) for m, n in _holders(fully_shard) if m.__name__.startswith("torch.")]
    for module, name in (*_rebound, *in_torch):
        if module.__dict__.get(name) is fully_shard:
            setattr(module, name, _TORCHS)
    _rebound.clear()
    _delegate.restore(_TORCHS)


def is_installed() -> bool:
    return _is_installed


def _holders(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Modules outside of this package, and names there, that are bound to the function."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] == "fsdp_c":
            continue
        names = [name for name, value in vars(module).items() if value is function]
        yield from ((module, name) for name in names)
