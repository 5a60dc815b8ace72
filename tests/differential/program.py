"""What a random program is: lines of Python in blocks, and how near its sides must be."""

from dataclasses import dataclass, field, replace

from parity import Tolerance

# By seed; the more ranks, the more a seed costs.
WORLDS = (1, 2, 1, 1, 2, 3, 1, 2, 1, 1, 2, 1, 4, 1, 2, 1, 1, 2, 3, 1, 2, 1, 1, 2, 1)


@dataclass
class Program:
    """The lines of one block belong together and leave the model fit for any other block."""

    seed: int
    world: int
    setup: list[str] = field(default_factory=list)
    blocks: list[list[str]] = field(default_factory=list)
    tolerance: Tolerance = field(default_factory=Tolerance)
    # Whether gradients are added in half precision: what they round by depends on the addends.
    rounds: bool = False
    # Whether collectives are counted, by a mode that is active all the time.
    counted: bool = False
    # Whether our side shards through torch's names, with install() before and uninstall() after.
    installed: bool = False
    # What it draws of `features.NAMES`.
    features: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return [*self.setup, *(line for block in self.blocks for line in block)]

    def has(self, *texts: str) -> bool:
        """Whether any line so far contains any of the texts."""
        return any(text in line for line in self.lines for text in texts)

    def with_parts(self, setup: list[str], blocks: list[list[str]]) -> "Program":
        return replace(self, setup=setup, blocks=blocks)
