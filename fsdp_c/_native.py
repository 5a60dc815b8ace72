"""The only importer of fsdp_c._C: takes the file that was built for the installed torch."""

from __future__ import annotations

import atexit
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from fsdp_c import _env

_NAME = "fsdp_c._C"
_PREFIX = "_C-torch"
_REBUILD = (
    "from its source folder, run `pip install --no-build-isolation --force-reinstall --no-deps .`"
)


def find(folder: Path) -> Path:
    """The extension's file in `folder`; ImportError with the cure if none fits."""
    minor = ".".join(torch.__version__.split(".")[:2])
    suffix = EXTENSION_SUFFIXES[0]
    path = folder / f"{_PREFIX}{minor}{suffix}"
    if path.exists():
        return path
    files = folder.glob(f"{_PREFIX}*{suffix}")
    others = sorted(file.name[len(_PREFIX) : -len(suffix)] for file in files)
    if others:
        raise ImportError(
            f"fsdp_c was built against torch {' and '.join(others)},"
            f" but torch {torch.__version__} is installed; {_REBUILD}"
        )
    raise ImportError(f"fsdp_c's extension has not been built for this Python; {_REBUILD}")


def load() -> ModuleType:
    spec = spec_from_file_location(
        _NAME, loader=ExtensionFileLoader(_NAME, str(find(Path(__file__).parent)))
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module


def choose_kernels(module: ModuleType, name: str) -> None:
    if name and not module.use_kernels(name):
        raise ImportError(
            f"{_env.KERNELS.name}={name}: this CPU lacks these kernels; the best it runs are"
            f" {module.kernels()}"
        )


_C = load()
choose_kernels(_C, _env.KERNELS.get())
atexit.register(_C.close)
