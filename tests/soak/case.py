"""What a family of the campaign is made of: cases that are run one by one, each named by a key."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    fate: str = PASSED
    text: str = ""  # what went wrong, or why it was not run
    n: int = 1  # how many trials the case was
    command: str = ""  # reproduces a failure; empty: this case by its key
    facts: dict[str, Any] = field(default_factory=dict)


def failed(text: str, **more: Any) -> Verdict:
    return Verdict(FAILED, text[-6000:], **more)


@dataclass(frozen=True)
class Family:
    """Cases of one kind."""

    name: str
    what: str  # one line for the report
    cases: Callable[[int], Iterator[str]]  # keys, drawn by a seed; may never end
    run: Callable[[str], Verdict]
    # Around all its cases: what has to be built, ranks that are started with it.
    prepared: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    unit: str = "cases"
    # What all of it would be, where that is known.
    whole: Callable[[], str] = str


def command_of(family: str, key: str) -> str:
    return f"python -m tests.soak --case '{family}/{key}'"
