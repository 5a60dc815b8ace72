"""The line after a script that `python -m fsdp_c` ran to its end and that sharded nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

from fsdp_c import _env


def tell() -> None:
    """Says so on rank 0, and what to look at."""
    outside = sys.modules.get("fsdp_c._fully_shard._errors")
    if (outside is not None and outside.has_units) or _env.QUIET.get() or (_env.rank() or 0) != 0:
        return
    if _has_children() and not _talks():  # these may be the ranks
        return
    line = "; ".join(["nothing was sharded: fully_shard was never called", *_reasons()])
    print(f"[fsdp_c] {line}", file=sys.stderr)


def _talks() -> bool:
    """Whether this process is a rank itself."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _has_children() -> bool:
    """Whether multiprocessing has ever started one: it numbers them."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and repr(process._process_counter) != "count(1)"


def _reasons() -> Iterator[str]:
    launchers = {"torch.distributed.run", "accelerate.commands.launch"}
    if _env.rank() is None and launchers & sys.modules.keys():
        yield "the launcher comes first: torchrun -m fsdp_c SCRIPT (or accelerate launch -m fsdp_c)"
        return
    if _has_fsdp1():
        yield "the script uses FullyShardedDataParallel: write -m fsdp_c --fsdp1"
    elif {"transformers", "accelerate"} & sys.modules.keys():
        yield (
            "the Trainer and accelerate shard where they are told to: fsdp= and fsdp_config= of"
            " TrainingArguments, or accelerate launch --use_fsdp --fsdp_version 2; on CPU ranks set"
            " ACCELERATE_USE_CPU=true, too"
        )
    elif {"lightning", "pytorch_lightning", "lightning_fabric"} & sys.modules.keys():
        yield "Lightning shards where its strategy does: strategy=ModelParallelStrategy()"
    if (_env.world_size() or 1) == 1:
        yield "one process ran alone: torchrun --nproc-per-node N starts more"


def _has_fsdp1() -> bool:
    torch = sys.modules.get("torch.distributed.fsdp")
    cls = getattr(torch, "FullyShardedDataParallel", None)
    # `isinstance` would run code of proxies.
    return cls is not None and any(issubclass(type(o), cls) for o in gc.get_objects())
