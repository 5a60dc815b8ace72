"""Strategies by name, from replicas (DDP) to ZeRO-3, and the units of a model found by a rule."""

from fsdp_c.strategy._shard import no_sync, shard
from fsdp_c.strategy._strategies import STRATEGIES, Strategy, strategy_named
from fsdp_c.strategy._units import Units, find_units

__all__ = [
    "STRATEGIES",
    "Strategy",
    "Units",
    "find_units",
    "no_sync",
    "shard",
    "strategy_named",
]
