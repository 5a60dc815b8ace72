"""A step that was run on few ranks, used for all others: how fast work is, as seen in it."""

from __future__ import annotations

import math

from fsdp_c._estimate._evaluate import Estimator
from fsdp_c._estimate._setting import Setting
from fsdp_c._estimate._table import seconds_text

# Work that is a thousand times slower or faster than the hardware's figures is another hardware's.
_FARTHEST = 1000.0
_HALVINGS = 30


def adjusted(setting: Setting, measured: object, estimator: Estimator) -> tuple[Setting, str]:
    """The setting on hardware whose work takes as long as it did in that run, and a note on it.

    Collectives keep their figures: a run on few ranks says little about the links of many.
    """
    ranks, seconds = _checked(measured)
    shards = None if setting.shards is None else min(setting.shards, ranks)
    as_run = setting.replaced(world_size=ranks, shards=shards)

    def slowed(to: Setting, factor: float) -> Setting:
        return to.replaced(hardware=setting.hardware.slowed(factor))

    def step(factor: float) -> float:
        return estimator.evaluate(slowed(as_run, factor)).times.step

    low, high = 1 / _FARTHEST, _FARTHEST
    if not step(low) <= seconds <= step(high):
        raise ValueError(
            f"estimate: measured=({ranks}, {seconds:g}): such a step on {setting.hardware.name}"
            f" takes {seconds_text(step(1.0))} s, and its collectives alone"
            f" {seconds_text(step(low))} s: no speed of work makes that {seconds:g} s; pass the"
            " seconds of one optimizer step, and the hardware that it ran on"
        )
    for _ in range(_HALVINGS):  # a step takes longer the slower its work is, if not in proportion
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step(middle) < seconds else (low, middle)
    note = (
        f"{seconds_text(seconds)} s were measured on {ranks} rank{'s' * (ranks > 1)}: work is taken"
        f" to need {high:.2f} of the time that follows from the hardware's figures"
    )
    return slowed(setting, high), note


def _checked(measured: object) -> tuple[int, float]:
    match measured:
        case (int(ranks), int() | float() as seconds) if (
            not isinstance(ranks, bool) and ranks > 0 and 0 < seconds < math.inf
        ):
            return ranks, seconds
    raise ValueError(
        f"estimate: measured={measured!r}: pass the ranks and the seconds of a step that was run,"
        " such as measured=(8, 2.9)"
    )
