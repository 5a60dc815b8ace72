"""The only importer of fsdp_c._C: takes the file that was built for the installed torch."""

from __future__ import annotations

import atexit
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fsdp_c import _built, _env

_NAME = "fsdp_c._C"


def load() -> ModuleType:
    path = str(_built.extension(torch.__version__))
    spec = spec_from_file_location(_NAME, loader=ExtensionFileLoader(_NAME, path))
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


if TYPE_CHECKING:
    from fsdp_c import _C
else:
    _C = load()
choose_kernels(_C, _env.KERNELS.get())
atexit.register(_C.close)
