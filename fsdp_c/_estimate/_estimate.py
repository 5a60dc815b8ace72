"""`fsdp_c.estimate`: memory, bytes, messages and time of a training step that nobody has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_c._estimate import _advice, _measured, _setting
from fsdp_c._estimate._evaluate import Estimator
from fsdp_c._estimate._hardware import Hardware
from fsdp_c._estimate._result import Estimate
from fsdp_c.strategy import Strategy


def estimate(
    model: nn.Module | str,
    *,
    world_size: int,
    strategy: str | Strategy = "zero3",
    hardware: str | Hardware = "h100",
    batch: int = 1,
    seq: int | None = None,
    inputs: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    precision: str | MixedPrecisionPolicy = "bf16",
    optimizer: Any = torch.optim.AdamW,
    units: Any = "auto",
    checkpoint: Any = False,
    offload: bool = False,
    micro_batches: int = 1,
    shards: int | None = None,
    ranks_per_host: int | None = None,
    measured: tuple[int, float] | None = None,
) -> Estimate:
    """Memory, traffic and time of training the model on ranks and devices that need not exist.

    Local; the model may be on the meta device, and no memory is taken: one step is traced on fake
    tensors, of repeated blocks four. ``print`` the result.

    Args:
        model: one that is not sharded; or a name: "gpt", "gpt-175b", "gpt-1t", "llama-7b" (of Llama
            2), "llama-8b", "llama-70b", "llama-405b" (of Llama 3), with the published sizes and a
            batch of one sequence as long as they were trained with.
        strategy, units, checkpoint: as of ``shard``.
        hardware: a name ("h100", "h200", "a100", "rtx4090"), "here" (CPU ranks of this host, whose
            rates are measured first), or a ``Hardware``.
        batch, seq: token ids of a rank, as input; or
        inputs: what forward takes (tensors, on any device), of one rank's batch.
        loss: of what forward returns; default: cross-entropy (seq), or a mean of squares.
        precision: "fp32", "bf16" or "fp16" (parameters as they are, computation in that dtype),
            "bf16-true" (parameters, gradients and optimizer too), or a policy of ``fully_shard``.
        optimizer: a class, a partial, its name in ``torch.optim``, one that was made, or None. It
            is tried on a small parameter.
        offload: shards, their gradients and the optimizer live in the host's memory.
        micro_batches: forwards and backwards per optimizer step.
        shards: ranks of a shard group of hybrid strategies; default: those of a host.
        ranks_per_host: default: one for each GPU of such a host; all ("here"). CPU ranks of a host
            have equal parts of its memory.
        measured: (ranks, seconds) of a step of this training that was run, on few ranks and
            otherwise as described here: work is taken to be as fast as it was there.

    Raises:
        ValueError, TypeError: arguments that do not fit each other, a model that cannot be traced.

    Examples:
        >>> found = fsdp_c.estimate(whole_model, world_size=8, inputs=x, hardware="h100")
        >>> print(found.fits, found.step_seconds)
        >>> print(fsdp_c.estimate("gpt", world_size=8, seq=256, optimizer="SGD"))
    """
    setting = _setting.make(
        model,
        world_size=world_size,
        strategy=strategy,
        hardware=hardware,
        batch=batch,
        seq=seq,
        inputs=inputs,
        loss=loss,
        precision=precision,
        optimizer=optimizer,
        units=units,
        checkpoint=checkpoint,
        offload=offload,
        micro_batches=micro_batches,
        shards=shards,
        ranks_per_host=ranks_per_host,
    )
    estimator = Estimator()
    notes: tuple[str, ...] = ()
    if measured is not None:
        setting, note = _measured.adjusted(setting, measured, estimator)
        notes = (note,)
    found = estimator.evaluate(setting)
    advice = "" if found.fits else _advice.change_that_fits(setting, estimator)
    return replace(found, advice=advice, notes=(*found.notes, *notes))
