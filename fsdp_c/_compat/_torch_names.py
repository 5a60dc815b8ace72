"""A torch newer than any tested: what the package leans on is looked for by name and parameters.

The names stand in torch_names.txt. What is missing or called in another way is an error that
says what, so that it is no wrong step later.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch

from fsdp_c import _env

OLDEST, NEWEST = (2, 13), (2, 15)  # that tests run under
LIST = Path(__file__).with_name("torch_names.txt")


class Name(NamedTuple):
    """One line of the list, for one version of torch."""

    module: str
    path: str  # in the module, with dots
    parameters: str | None  # in parentheses; None: any
    attributes: tuple[str, ...] = ()  # of the class's objects

    @property
    def is_method(self) -> bool:
        return "." in self.path


def minor_of(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def names(version: tuple[int, int]) -> Iterator[Name]:
    """What the list has for a version; for newer ones than tested what it has for the newest."""
    version = min(version, NEWEST)
    module = ""
    for line in LIST.read_text().split("\n\n", 1)[1].splitlines():
        if line and not line.startswith(" "):
            module = line.split("#")[0].strip()
            continue
        text = line.strip()
        for sign in (">=", "<"):
            if text.startswith(sign):
                bound, text = text.removeprefix(sign).split(" ", 1)
                if (version < minor_of(bound)) != (sign == "<"):
                    text = ""
        if ": " in text:
            owner, attributes = text.split(": ")
            yield Name(module, owner, None, tuple(attributes.split()))
        elif text:
            path, has_parameters, rest = text.partition("(")
            yield Name(module, path, has_parameters + rest or None)


def changes(version: tuple[int, int]) -> list[str]:
    """What the installed torch has not, or has in another way, a line each."""
    return [f"{name.module}: {what}" for name in names(version) if (what := _change_of(name))]


@functools.cache
def check() -> None:
    """Once: ImportError if a torch newer than any tested has changed what the package leans on."""
    version = minor_of(torch.__version__)
    if version <= NEWEST:
        return
    newest = ".".join(map(str, NEWEST))
    which = f"torch {torch.__version__} is newer than any that fsdp_c was tested with (up to"
    if found := changes(version):
        raise ImportError(
            f"{which} {newest}), and has changed what fsdp_c leans on:\n  "
            + "\n  ".join(found)
            + f"\nUse an older torch (pip install 'torch=={newest}.*') or a newer fsdp_c"
        )
    if not _env.QUIET.get() and _env.rank() in (None, 0):
        line = f"{which} {newest}); all that it leans on is as it was"
        print(f"[fsdp_c] {line}", file=sys.stderr)


def _change_of(name: Name) -> str:
    """How torch differs from the list; empty if it does not."""
    try:
        found: Any = importlib.import_module(name.module)
    except ImportError:
        return "there is no such module"
    for part in name.path.split("."):
        if not hasattr(found, part):
            return f"{name.path} is gone"
        found = inspect.getattr_static(found, part) if name.is_method else getattr(found, part)
    if name.attributes:
        missing = [a for a in name.attributes if a not in _attributes(found)]
        return f"{name.path} has no {', '.join(missing)}" if missing else ""
    if name.parameters is None:
        return ""
    now = _parameters(found)
    # A subclass is called as torch calls its own class; a function may take more than before.
    is_same = now == name.parameters if name.is_method else _takes(found, name.parameters)
    return "" if is_same else f"{name.path}{name.parameters} is now {name.path}{now}"


def _attributes(owner: type) -> set[str]:
    """Names that the class's code speaks of: what its objects have is among them."""
    found = set(dir(owner))
    for base in owner.__mro__:
        found |= set(base.__dict__.get("__annotations__", ()))
        for value in vars(base).values():
            function = inspect.unwrap(getattr(value, "fget", None) or value)
            if isinstance(function, FunctionType):
                found |= set(function.__code__.co_names)
    return found


def _signature(function: Any) -> list[inspect.Parameter]:
    function = getattr(function, "__func__", function)
    return list(inspect.signature(function).parameters.values())


def _parameters(function: Any) -> str:
    """(self, x, *args): names in order."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(p.kind, '') + p.name for p in _signature(function))})"


def _takes(function: Any, parameters: str) -> bool:
    """Whether a call with these parameters, in this order or by name, is one still."""
    wanted = [part for part in parameters.strip("()").split(", ") if part]
    now = _signature(function)
    first = _parameters(function).strip("()").split(", ")[: len(wanted)]
    added = now[len(wanted) :]
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return (first == wanted if wanted else True) and all(
        p.kind in free or p.default is not p.empty for p in added
    )
