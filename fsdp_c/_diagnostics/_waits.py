"""How long this rank waited for others, by unit and by what it waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# In the order of the core's enum fc_wait_kind: of a unit, and without one.
_KINDS = ("forward gather", "backward gather", "reduction")
_ENDS = ("end of forward", "end of backward")


@dataclass(frozen=True)
class Wait:
    """All waits of one kind that one unit had.

    Examples:
        >>> for wait in fsdp_c.stats(model).waits.waits:
        ...     print(wait.unit, wait.kind, wait.seconds, wait.longest_rank)
    """

    unit: str  # empty: an end of forward or backward, which belongs to no unit
    kind: str
    count: int
    seconds: float
    longest: float  # seconds
    longest_rank: int | None  # for whom the longest was; None: a collective of the process group


@dataclass(frozen=True)
class WaitStats:
    """Waits of this rank since set-up, or since the last reset; the longest sum first.

    Who is there in time costs no wait: a row that is missing means that nothing was exposed.

    Examples:
        >>> waits = fsdp_c.stats(model, reset=True).waits
        >>> print(waits.seconds, waits.seconds_per_step, waits.by_rank)
    """

    waits: tuple[Wait, ...] = ()
    by_rank: dict[int, float] = field(default_factory=dict)  # seconds for each other rank
    forwards: int = 0  # steps: forwards of the root (and unshard() calls outside of them)
    backwards: int = 0

    @property
    def seconds(self) -> float:
        return sum(wait.seconds for wait in self.waits)

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / max(self.forwards, 1)

    def __str__(self) -> str:
        lines = [
            f"waited {self.seconds * 1e3:.2f} ms in {self.forwards} forwards and"
            f" {self.backwards} backwards",
            *(f"  for rank {rank}: {s * 1e3:.2f} ms" for rank, s in self.by_rank.items()),
        ]
        for wait in self.waits:
            whom = "" if wait.longest_rank is None else f" for rank {wait.longest_rank}"
            lines.append(
                f"{wait.unit or '-':24} {wait.kind:24}{wait.count:7} x{wait.seconds * 1e3:11.2f} ms"
                f", longest {wait.longest * 1e3:.2f} ms{whom}"
            )
        return "\n".join(lines)


def collect(domains: Iterable[tuple[Any, bool]], reset: bool) -> WaitStats:
    """Of the core's domains, each with whether it is between replicas."""
    rows: list[Wait] = []
    by_rank: dict[int, float] = defaultdict(float)
    forwards = backwards = 0
    for domain, is_replicate in domains:
        found = domain.waits(reset)
        forwards = max(forwards, found["forwards"])
        backwards = max(backwards, found["backwards"])
        for rank, ns in found["ns_by_rank"].items():
            by_rank[rank] += ns / 1e9
        for row in found["waits"]:
            unit, rank = row["unit"], row["longest_rank"]
            name = (_ENDS if unit is None else _KINDS)[row["kind"]]
            if is_replicate:
                name = f"{name} of replicas"
            whom = None if rank < 0 else rank
            seconds, longest = row["ns"] / 1e9, row["longest_ns"] / 1e9
            rows.append(Wait(unit or "", name, row["count"], seconds, longest, whom))
    rows.sort(key=lambda wait: -wait.seconds)
    waited = {rank: seconds for rank, seconds in sorted(by_rank.items()) if seconds}
    return WaitStats(tuple(rows), waited, forwards, backwards)
