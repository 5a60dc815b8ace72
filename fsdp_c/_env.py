"""Every environment variable that fsdp_c reads: name, accepted values, default, meaning.

`.get()` reads at the time of the call. Nothing else in the package looks at the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable; unset and empty mean the default."""

    name: str
    accepted: str
    default: T
    meaning: str
    parse: Callable[[str], T]

    def get(self) -> T:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: expected {self.accepted}") from None


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return parse


def _some_of(*words: str) -> Callable[[str], tuple[str, ...]]:
    parse = _one_of(*words)
    return lambda text: tuple(parse(word.strip()) for word in text.split(","))


def _size(text: str) -> int:
    size = int(text)
    if not 0 <= size < 1 << 31:
        raise ValueError(text)
    return size


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _absolute(text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError(text)
    return text


TRANSPORT = Variable(
    name="FSDP_C_TRANSPORT",
    accepted="auto, shm, rails or callback",
    default="auto",
    meaning=(
        "How ranks talk: shared memory; rails, which are shared memory inside of hosts and the"
        " process group's send and receive between them; the process group's own collectives; or"
        " the first of these that the group's ranks can use."
    ),
    parse=_one_of("auto", "shm", "rails", "callback"),
)

HOST_TIMEOUT = Variable(
    name="FSDP_C_HOST_TIMEOUT",
    accepted="a number of seconds",
    default=30.0,
    meaning=(
        "A host of which nothing has been heard for so long is given up by ranks that wait for it"
        " over rails."
    ),
    parse=_seconds,
)

VERIFY = Variable[int | None](
    name="FSDP_C_VERIFY",
    accepted="a number of steps",
    default=None,
    meaning=(
        "How many first steps of a model are compared with plain collectives. Empty: one on several"
        " GPUs, else none."
    ),
    parse=_size,
)

KERNELS = Variable(
    name="FSDP_C_KERNELS",
    accepted="ref, avx2, avx512 or avx512_bf16",
    default="",
    meaning="The set of kernels to use; empty: the best one that this CPU runs.",
    parse=_one_of("ref", "avx2", "avx512", "avx512_bf16"),
)

MMAP_THRESHOLD = Variable(
    name="FSDP_C_MMAP_THRESHOLD",
    accepted="a number of bytes",
    default=8 << 20,
    meaning=(
        "Allocations of this many bytes and more are kept off malloc's heap, which would grow with"
        " every unit; 0 leaves malloc as it is."
    ),
    parse=_size,
)

BATCH_BYTES = Variable(
    name="FSDP_C_BATCH_BYTES",
    accepted="a number of bytes",
    default=1 << 20,
    meaning=(
        "Where ranks share no memory, units of up to 64 KiB share collectives of up to this many"
        " bytes on all ranks together; 0: each has its own, and between hosts none begins before it"
        " is asked for. Equal on all ranks."
    ),
    parse=_size,
)

STRICT = Variable(
    name="FSDP_C_STRICT",
    accepted="0 or 1",
    default=False,
    meaning=(
        "1: refuse what torch's `fully_shard` refuses, with its errors, also where fsdp_c could go"
        " on."
    ),
    parse=_switch,
)

QUIET = Variable(
    name="FSDP_C_QUIET",
    accepted="0 or 1",
    default=False,
    meaning=(
        "1: rank 0 does not say at a model's first forward what runs it, nor after a script that"
        " nothing was sharded."
    ),
    parse=_switch,
)

TRACE = Variable(
    name="FSDP_C_TRACE",
    accepted="0 or 1",
    default=False,
    meaning=(
        "1: the process keeps when phases, units and waits of its last steps began and ended, for"
        " `python -m fsdp_c trace`. Read once, as the first model is set up."
    ),
    parse=_switch,
)

KEEP_UNSHARDED = Variable(
    name="FSDP_C_KEEP_UNSHARDED",
    accepted="0 or 1",
    default=False,
    meaning=(
        "1: what `unshard()` was called on stays unsharded until `reshard()`, or resharding after"
        " backward; resharding after forward leaves it alone."
    ),
    parse=_switch,
)

NCCL = Variable(
    name="FSDP_C_NCCL",
    accepted="an absolute path",
    default="",
    meaning="The NCCL to use on GPUs in place of the one that torch has loaded.",
    parse=_absolute,
)

# torch's own word for a device type that an extension implements and names.
EXTENSION = "privateuseone"

DEVICES = Variable[tuple[str, ...]](
    name="FSDP_C_DEVICES",
    accepted="cuda, privateuseone, cpu or none, separated by commas",
    default=(),
    meaning=(
        "Devices whose units the core's stream schedule runs. Others, but for the CPU, have torch's"
        " own units: none asks for that on GPUs. Empty: NVIDIA GPUs, over the process group's own"
        " collectives. cuda: these over communicators of NCCL of our own. privateuseone: an"
        " accelerator that is an extension of torch, whatever its name. cpu: host memory as if it"
        " were a device's, which is slow, for tests."
    ),
    parse=_some_of("cuda", EXTENSION, "cpu", "none"),
)

VARIABLES: tuple[
    Variable[str]
    | Variable[int]
    | Variable[int | None]
    | Variable[float]
    | Variable[bool]
    | Variable[tuple[str, ...]],
    ...,
] = (
    TRANSPORT,
    HOST_TIMEOUT,
    VERIFY,
    KERNELS,
    MMAP_THRESHOLD,
    BATCH_BYTES,
    STRICT,
    QUIET,
    TRACE,
    KEEP_UNSHARDED,
    NCCL,
    DEVICES,
)


def is_strict() -> bool:
    """Whether FSDP_C_STRICT asks for torch's refusals."""
    return STRICT.get()


def batch_bytes() -> int:
    """FSDP_C_BATCH_BYTES; torch has no batches."""
    return 0 if is_strict() else BATCH_BYTES.get()


def keeps_unsharded() -> bool:
    """Whether an explicit unshard outlasts forward; torch's never does."""
    return KEEP_UNSHARDED.get() and not is_strict()


def mmap_threshold() -> int:
    """FSDP_C_MMAP_THRESHOLD, or 0 where the user has told glibc a threshold already."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap" in os.environ.get("GLIBC_TUNABLES", ""):
        return 0
    return MMAP_THRESHOLD.get()


def rank() -> int | None:
    """The number that a launcher gave this process (RANK); None if none did."""
    return _number("RANK")


def world_size() -> int | None:
    """How many ranks a launcher has started (WORLD_SIZE); None if nobody says."""
    return _number("WORLD_SIZE")


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def ranks_per_host() -> int | None:
    """How many ranks torchrun started on this host (LOCAL_WORLD_SIZE); None if nobody says."""
    return _number("LOCAL_WORLD_SIZE")


def run_id() -> str:
    """How torchrun calls a run (TORCHELASTIC_RUN_ID); empty: there is none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restart_count() -> int:
    """How often torchrun has started the run's ranks again (TORCHELASTIC_RESTART_COUNT)."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def restarts_with_old_store() -> bool:
    """Whether torchrun starts ranks again and gives them the store of those before."""
    uses_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return uses_agents and bool(_number("TORCHELASTIC_MAX_RESTARTS"))


def shares_gpus() -> bool:
    """Whether NCCL lets two ranks use one GPU (NCCL_MULTI_RANK_GPU_ENABLE)."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1"


def orders_launches() -> bool:
    """Whether NCCL keeps the order of calls in different communicators of a GPU
    (NCCL_LAUNCH_ORDER_IMPLICIT)."""
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "") == "1"


def device_connections() -> int | None:
    """How many queues CUDA gives a process (CUDA_DEVICE_MAX_CONNECTIONS); None: its default."""
    return _number("CUDA_DEVICE_MAX_CONNECTIONS")
