"""All of them, in the order in which they run."""

from soak import failing, flips, kills, limits, programs, restarts
from soak.case import Family

ALL: list[Family] = [
    programs.FAMILY,
    kills.FAMILY,
    failing.FAMILY,
    flips.FAMILY,
    limits.FAMILY,
    restarts.FAMILY,
]
