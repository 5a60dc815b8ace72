"""What units have moved between ranks, as the core counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from fsdp_c._fully_shard import _fqns
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup


@dataclass(frozen=True)
class Traffic:
    """Collectives of a unit on this rank, and their bytes, since it was made.

    Bytes are what a collective brings to this rank over any transport: the peers' chunks of an
    all-gather in the dtype of forward, a chunk per peer of a reduce-scatter and twice (n-1)/n of
    what n replicas all-reduce in the dtype of the reduction, without padding. ``copied`` is what
    this rank really wrote to move them: over shared memory an all-gather without a cast is free.

    Examples:
        >>> for moved in fsdp_c.stats(model).traffic:
        ...     print(moved.unit, moved.gathers, moved.payload, moved.copied)
    """

    unit: str
    gathers: int = 0
    gathered: int = 0
    reductions: int = 0
    reduced: int = 0
    all_reductions: int = 0
    all_reduced: int = 0
    copied: int = 0

    @property
    def payload(self) -> int:
        return self.gathered + self.reduced + self.all_reduced

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What came since ``earlier``."""
        pairs = zip(astuple(self)[1:], astuple(earlier)[1:], strict=True)
        return Traffic(self.unit, *(now - then for now, then in pairs))


def traffic_of(groups: Iterable[FSDPParamGroup]) -> tuple[Traffic, ...]:
    """By unit; torch's implementation counts nothing."""
    return tuple(Traffic(_fqns.unit_name(group), **group._core_traffic()) for group in groups)


def total(units: Iterable[Traffic]) -> Traffic:
    rows = [astuple(unit)[1:] for unit in units]
    return Traffic("all", *map(sum, zip(*rows, strict=True))) if rows else Traffic("all")
