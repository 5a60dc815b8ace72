"""install() and uninstall(): fsdp_c's functions in the place of torch's, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.distributed.fsdp import fully_sharded_data_parallel as _fsdp1
from torch.distributed.fsdp._fully_shard import _fully_shard as _torch

from fsdp_c._compat import _redirection
from fsdp_c._fully_shard import _replicate
from fsdp_c._fully_shard._fully_shard import fully_shard
from fsdp_c._install import _integrations, _spawn
from fsdp_c.fsdp1 import FullyShardedDataParallel

_TORCHS: Any = _torch.fully_shard
_TORCHS_FSDP1: Any = _fsdp1.FullyShardedDataParallel
_rebound: list[tuple[ModuleType, str]] = []
_is_installed = False
_has_fsdp1 = False


def install(*, fsdp1: bool = False) -> None:
    """Makes every ``fully_shard`` of torch fsdp_c's, for scripts that must stay as they are.

    The names in torch's modules and in all modules that imported the function by name are bound
    anew; torch's function itself delegates, for those who hold it in another way. Processes that
    `multiprocessing` spawns do the same. Models that are sharded already stay with torch.
    Calling it again does nothing.

    Args:
        fsdp1: the same for torch's ``FullyShardedDataParallel``: also the class itself, however it
            is held, makes fsdp_c's objects, which are instances of it.

    Examples:
        >>> fsdp_c.install()
        >>> from torch.distributed.fsdp import fully_shard  # fsdp_c's
        >>> model = fully_shard(model)
        >>> fsdp_c.uninstall()
    """
    global _is_installed, _has_fsdp1
    if fsdp1 and not _has_fsdp1:
        _has_fsdp1 = True
        _redirection.redirect_class(_TORCHS_FSDP1, lambda: FullyShardedDataParallel)
        FullyShardedDataParallel.stands_for_torchs = True
        _bind_anew(_TORCHS_FSDP1, FullyShardedDataParallel)
    _spawn.carry(_has_fsdp1)
    _integrations.watch(_has_fsdp1)
    if _is_installed:
        return
    _is_installed = True
    _redirection.redirect(_TORCHS, fully_shard)
    _bind_anew(_TORCHS, fully_shard)
    _replicate.install()


def uninstall() -> None:
    """Takes `install` back; models that are sharded already stay with fsdp_c.

    A module outside of torch that imported the name in between keeps fsdp_c's function.

    Examples:
        >>> fsdp_c.install()
        >>> fsdp_c.uninstall()
    """
    global _is_installed, _has_fsdp1
    if not _is_installed:
        return
    _is_installed = False
    _spawn.stop()
    _replicate.uninstall()
    _integrations.stop()
    if _has_fsdp1:
        _has_fsdp1 = False
        _redirection.restore_class(_TORCHS_FSDP1)
        FullyShardedDataParallel.stands_for_torchs = False
        _bind_back(FullyShardedDataParallel, _TORCHS_FSDP1)
    _bind_back(fully_shard, _TORCHS)
    _rebound.clear()
    _redirection.restore(_TORCHS)


def is_installed() -> bool:
    return _is_installed


def _bind_anew(torchs: Any, ours: Any) -> None:
    for module, name in _holders(torchs):
        _rebound.append((module, name))
        setattr(module, name, ours)


def _bind_back(ours: Any, torchs: Any) -> None:
    in_torch = [(m, n) for m, n in _holders(ours) if m.__name__.startswith("torch.")]
    for module, name in (*_rebound, *in_torch):
        if module.__dict__.get(name) is ours:
            setattr(module, name, torchs)


def _holders(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Modules outside of this package, and names there, that are bound to the function."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] == "fsdp_c":
            continue
        names = [name for name, value in vars(module).items() if value is function]
        yield from ((module, name) for name in names)
