"""FSDP1's API, FullyShardedDataParallel, over the units of fully_shard."""

from fsdp_c.fsdp1._wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
