"""What a training run will take before it runs: memory, bytes, messages, time. Needs no ranks."""

from fsdp_c._estimate._estimate import estimate
from fsdp_c._estimate._hardware import HARDWARE, Hardware
from fsdp_c._estimate._result import Estimate

__all__ = ["HARDWARE", "Estimate", "Hardware", "estimate"]
