"""Run by path at the start of a spawned process whose parent has replaced torch's fully_shard."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:  # the parent's path comes later
    sys.path.append(_ROOT)

from fsdp_c._install import _launch  # noqa: E402

_launch.watch(globals()["fsdp1"])  # given by the parent
