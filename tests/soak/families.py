"""All of them, in the order in which they run."""

from soak import failing, kills, programs
from soak.case import Family

ALL: list[Family] = [programs.FAMILY, kills.FAMILY, failing.FAMILY]
