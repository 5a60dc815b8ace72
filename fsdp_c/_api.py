"""The public names, gathered; the package loads them when the first one is asked for."""

from typing import TYPE_CHECKING

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from fsdp_c._checkpoint._clone import clone
from fsdp_c._checkpoint._full import IncompatibleKeys, load_full
from fsdp_c._checkpoint._iter_full_params import iter_full_params
from fsdp_c._checkpoint._replicas import check_replicas
from fsdp_c._checkpoint._sharded import load_shards, save_shards
from fsdp_c._comm._communicator import Communicator
from fsdp_c._compat import _versions
from fsdp_c._diagnostics._explain import Explanation, UnitRow, explain
from fsdp_c._diagnostics._links import Link
from fsdp_c._diagnostics._stats import MemoryStats, release_buffers, stats
from fsdp_c._diagnostics._traffic import Traffic
from fsdp_c._diagnostics._waits import Wait, WaitStats
from fsdp_c._estimate import Estimate, Hardware, estimate
from fsdp_c._fully_shard._fully_shard import fully_shard
from fsdp_c._fully_shard._status import Status, TreeStatus, status
from fsdp_c._install._install import install, uninstall
from fsdp_c._memory._memory_plan import MemoryPlan, memory_plan
from fsdp_c._memory._offload import offload, onload
from fsdp_c._optim._gather_to_owner import Owned, gather_to_owner, scatter_from_owner
from fsdp_c._snapshots._snapshots import Snapshots
from fsdp_c.fsdp1 import FullyShardedDataParallel
from fsdp_c.strategy import STRATEGIES, Strategy, Units, find_units, no_sync, shard

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims, GradientReductionHandle
else:
    globals().update(_versions.OPTIONAL_NAMES)

__all__ = [
    "CPUOffloadPolicy",
    "Communicator",
    "DataParallelMeshDims",
    "Estimate",
    "Explanation",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "Hardware",
    "IncompatibleKeys",
    "Link",
    "MemoryPlan",
    "MemoryStats",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owned",
    "STRATEGIES",
    "Snapshots",
    "Status",
    "Strategy",
    "Traffic",
    "TreeStatus",
    "UnitRow",
    "Units",
    "UnshardHandle",
    "Wait",
    "WaitStats",
    "check_replicas",
    "clone",
    "estimate",
    "explain",
    "find_units",
    "fully_shard",
    "gather_to_owner",
    "install",
    "iter_full_params",
    "load_full",
    "load_shards",
    "memory_plan",
    "offload",
    "onload",
    "no_sync",
    "register_fsdp_forward_method",
    "release_buffers",
    "save_shards",
    "scatter_from_owner",
    "shard",
    "share_comm_ctx",
    "stats",
    "status",
    "uninstall",
]
__all__[:] = [name for name in __all__ if name in globals()]  # an older torch lacks some
