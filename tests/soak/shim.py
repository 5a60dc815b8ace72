"""What shim.c offers, for the process that has loaded it."""

import ctypes
import functools
from typing import Any


@functools.cache
def _library() -> Any:
    from fsdp_c._native import _C

    return ctypes.CDLL(_C.__file__)


def plan(kind: str, name: str, nth: int, note: str = "") -> None:
    """`kill` at the n-th time that a state is reached, `fail` the n-th call, `flip` bits, one time
    in n, drawn by the seed `name`; counts begin anew."""
    _library().soak_plan(kind.encode(), name.encode(), ctypes.c_long(nth), note.encode())


def clear() -> None:
    plan("", "", 0)


def counts() -> dict[str, int]:
    """How often each has been reached since the last plan."""
    text = ctypes.create_string_buffer(1 << 14)
    _library().soak_names(text, ctypes.c_long(len(text)))
    rows = [line.split() for line in text.value.decode().splitlines()]
    return {name: int(n) for name, n in rows if int(n)}
