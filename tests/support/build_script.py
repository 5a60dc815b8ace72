"""setup.py as a module: tests call the build's own functions, with any setuptools."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    """A module of its own each time: what a caller changes in it stays there."""
    spec = importlib.util.spec_from_file_location("fsdp_c_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def build_in_place() -> None:
    """As `setup.py build_ext --inplace`, also by a setuptools that cannot read pyproject.toml."""
    script = load()
    extension = script.Extension("fsdp_c._C", sources=[])
    distribution = Distribution({"name": "fsdp_c", "ext_modules": [extension]})
    distribution.package_dir = {}
    distribution.packages = ["fsdp_c"]
    command = script.BuildExtension(distribution)
    command.inplace = True
    os.chdir(ROOT)
    command.ensure_finalized()
    command.run()
