"""The public names, gathered; the package loads them when the first one is asked for."""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from fsdp_c import _compat
from fsdp_c._comm import Communicator
from fsdp_c._fully_shard import fully_shard
from fsdp_c._install import install, uninstall
from fsdp_c._owner import Owned, gather_to_owner, scatter_from_owner
from fsdp_c._status import Status, TreeStatus, status

globals().update(_compat.OPTIONAL_NAMES)

__all__ = [
    "CPUOffloadPolicy",
    "Communicator",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owned",
    "Status",
    "TreeStatus",
    "UnshardHandle",
    "fully_shard",
    "gather_to_owner",
    "install",
    "register_fsdp_forward_method",
    "scatter_from_owner",
    "share_comm_ctx",
    "status",
    "uninstall",
    *_compat.OPTIONAL_NAMES,
]
