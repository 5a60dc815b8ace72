"""What `fsdp_c.estimate` returns."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_c._estimate import _table
from fsdp_c._estimate._setting import Setting
from fsdp_c._estimate._time import Times
from fsdp_c._estimate._volume import Traffic


@dataclass(frozen=True)
class Estimate:
    """Of one rank; bytes and seconds. ``print`` shows it as a table.

    Examples:
        >>> found = fsdp_c.estimate(whole_model, world_size=8, inputs=x)
        >>> print(found.total, found.fits, found.step_seconds, found.memory["activations"])
    """

    setting: Setting
    n_parameters: int
    n_units: int
    memory: dict[str, int]  # on the device, by purpose, when most is held
    host_memory: int  # offloaded
    limit: int  # bytes of memory that a rank has
    traffic: list[Traffic]  # collectives of a step
    times: Times
    model_flops: int  # of a rank's batches, without recomputation
    notes: tuple[str, ...] = ()
    advice: str = ""  # the cheapest change that makes it fit; empty if it fits, or if none does

    @property
    def total(self) -> int:
        """Bytes on the device at the worst moment of a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def step_seconds(self) -> float:
        return self.times.step

    def __str__(self) -> str:
        return _table.text_of(self)
