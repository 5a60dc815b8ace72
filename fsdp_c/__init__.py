"""PyTorch FSDP2 with a C core: ``from fsdp_c import fully_shard``, the rest as before."""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from fsdp_c._comm import Communicator
from fsdp_c._fully_shard import fully_shard

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch before 2.12
    pass

__all__ = [
    "CPUOffloadPolicy",
    "Communicator",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
