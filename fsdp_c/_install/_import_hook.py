"""Calls back when a module has been loaded: now, or as soon as somebody imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_Callback = Callable[[Any], None]


def when_loaded(name: str, callback: _Callback) -> None:
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback))  # type: ignore[arg-type]


def forget(callback: _Callback) -> None:
    """Takes `when_loaded` back where nothing was loaded."""
    for finder in [f for f in sys.meta_path if isinstance(f, _Finder)]:
        if finder.callback is callback:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]


class _Finder:
    """Leaves finding to the others and looks at the module once it has been loaded."""

    def __init__(self, name: str, callback: _Callback) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callback)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any, callback: _Callback) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback(module)
