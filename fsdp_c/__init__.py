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

from fsdp_c import _compat
from fsdp_c._comm import Communicator
from fsdp_c._fully_shard import fully_shard

globals().update(_compat.OPTIONAL_NAMES)

__all__ = [
    "CPUOffloadPolicy",
    "Communicator",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    *_compat.OPTIONAL_NAMES,
]
