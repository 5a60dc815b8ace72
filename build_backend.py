"""What pip calls to build fsdp_c: setuptools' functions, or one line where they could not work.

Without them pip shows a page of traceback for an old setuptools, and one for none at all. Only what
is needed is there: no requirements to ask for, and metadata ahead of a build for wheels alone, as
that of an editable install is not theirs (setup.py).
"""

from __future__ import annotations

from types import ModuleType

NEEDED = 77  # the first that reads pyproject.toml's license


def setuptools_backend() -> ModuleType:
    try:
        import setuptools
        from setuptools import build_meta
    except ImportError:
        found = "none is installed here"
    else:
        if int(setuptools.__version__.split(".")[0]) >= NEEDED:
            return build_meta
        found = f"here is {setuptools.__version__}"
    raise SystemExit(
        f"fsdp_c is built with setuptools {NEEDED} or newer, and {found}: leave out"
        f" --no-build-isolation, or run `pip install 'setuptools>={NEEDED}'` first"
    )


def prepare_metadata_for_build_wheel(folder: str, settings: dict | None = None) -> str:
    return setuptools_backend().prepare_metadata_for_build_wheel(folder, settings)


def build_wheel(folder: str, settings: dict | None = None, metadata: str | None = None) -> str:
    return setuptools_backend().build_wheel(folder, settings, metadata)


def build_editable(folder: str, settings: dict | None = None, metadata: str | None = None) -> str:
    return setuptools_backend().build_editable(folder, settings, metadata)


def build_sdist(folder: str, settings: dict | None = None) -> str:
    return setuptools_backend().build_sdist(folder, settings)
