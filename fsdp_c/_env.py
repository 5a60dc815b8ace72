"""Every environment variable that fsdp_c reads: name, accepted values, default, meaning.

`.get()` reads at the time of the call. Nothing else in the package looks at the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable; unset and empty mean the default."""

    name: str
    accepted: str
    default: T
    meaning: str
    parse: Callable[[str], T]

    def get(self) -> T:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: expected {self.accepted}") from None


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


TRANSPORT = Variable(
    name="FSDP_C_TRANSPORT",
    accepted="auto, shm or callback",
    default="auto",
    meaning=(
        "How ranks talk: shared memory, the process group's own collectives, or shared memory"
        " wherever all ranks of the group can use it."
    ),
    parse=_one_of("auto", "shm", "callback"),
)

STRICT = Variable(
    name="FSDP_C_STRICT",
    accepted="0 or 1",
    default=False,
    meaning="Refuse what torch's fully_shard refuses, also where fsdp_c could do it.",
    parse=_flag,
)

KERNELS = Variable(
    name="FSDP_C_KERNELS",
    accepted="ref, avx2, avx512 or avx512_bf16",
    default="",
    meaning="The set of kernels to use; empty: the best one that this CPU runs.",
    parse=_one_of("ref", "avx2", "avx512", "avx512_bf16"),
)

VARIABLES: tuple[Variable[str] | Variable[bool], ...] = (TRANSPORT, STRICT, KERNELS)
