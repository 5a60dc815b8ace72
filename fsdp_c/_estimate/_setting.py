"""What is estimated: a model, the world it would run in, and how it would be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_c import _text
from fsdp_c._estimate import _measure
from fsdp_c._estimate._hardware import Hardware, hardware_named
from fsdp_c._estimate._models import build, config_named
from fsdp_c._memory._optimizer_state import known_optimizer
from fsdp_c.strategy import Strategy, _checkpoint, strategy_named

_FLOAT32 = torch.float32
_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=_FLOAT32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=_FLOAT32),
    "bf16-true": MixedPrecisionPolicy(),
}


@dataclass(frozen=True)
class Setting:
    """Checked arguments of `estimate`; `replaced` gives a variation."""

    model: nn.Module
    world_size: int
    strategy: Strategy
    hardware: Hardware
    inputs: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]
    precision: str | MixedPrecisionPolicy
    optimizer: Any
    units: Any
    checkpoint: Any
    offload: bool
    micro_batches: int
    shards: int | None  # ranks of a shard group, of hybrid strategies
    ranks_per_host: int | None

    def replaced(self, **changes: Any) -> Setting:
        changed = replace(self, **changes)
        check(changed)
        return changed

    @property
    def per_host(self) -> int:
        return min(self.ranks_per_host or self.hardware.per_host, self.world_size)

    @property
    def n_shards(self) -> int:
        if not self.strategy.is_sharded:
            return 1
        return (self.shards or self.per_host) if self.strategy.is_hybrid else self.world_size

    @property
    def n_replicas(self) -> int:
        return self.world_size // self.n_shards

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return _POLICIES[self.precision] if isinstance(self.precision, str) else self.precision

    @property
    def stored(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16-true" else None

    @property
    def compute(self) -> torch.dtype | None:
        """In which parameters and inputs compute; None: in their own."""
        return self.stored or self.policy.param_dtype

    @property
    def batch(self) -> int:
        first = next(t for t in self.inputs if isinstance(t, torch.Tensor))
        return first.shape[0] if first.dim() else 1

    def of_batch(self, batch: int) -> Setting:
        """The same with inputs of another first dimension."""
        old = self.batch
        inputs = tuple(
            torch.empty(batch, *t.shape[1:], dtype=t.dtype, device="meta")
            if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == old
            else t
            for t in self.inputs
        )
        return self.replaced(inputs=inputs)

    def checkpointed(self, units: list[nn.Module]) -> list[nn.Module]:
        """Modules that are computed again in backward."""
        return _checkpoint.modules_for(self.model, self.checkpoint, units, ())


def make(
    model: nn.Module | str,
    *,
    world_size: int,
    strategy: Any,
    hardware: Any,
    batch: int,
    seq: int | None,
    inputs: Any,
    loss: Any,
    precision: Any,
    **rest: Any,
) -> Setting:
    """Raises ValueError or TypeError with the cure, before anything is traced."""
    if isinstance(model, str):
        config = config_named(model)
        seq = config.sequence if seq is None and inputs is None else seq
        model = build(config.replaced(sequence=seq))
    if not isinstance(model, nn.Module):
        raise TypeError(f"estimate expects a module, not {type(model).__name__}")
    rest["optimizer"] = known_optimizer(rest["optimizer"])
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "estimate: the model is sharded; pass it as it was built, on the meta device if it is"
            " large"
        )
    if (inputs is None) == (seq is None):
        raise ValueError("estimate: pass either seq= (token ids) or inputs= (tensors for forward)")
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None:
            _check_positive_integer(name, value)
    if not (loss is None or callable(loss)):
        raise TypeError(f"estimate: loss={loss!r}: pass a function of what forward returns")
    if seq is not None:
        inputs = (torch.empty(batch, seq, dtype=torch.long, device="meta"),)
    elif not isinstance(inputs, tuple):
        inputs = (inputs,)
    if not any(isinstance(value, torch.Tensor) for value in inputs):
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise TypeError(
            f"estimate: inputs= has no tensor, but {kinds}: pass the tensor that forward takes, or"
            " a tuple of its arguments"
        )
    setting = Setting(
        model,
        world_size=world_size,
        strategy=strategy_named(strategy),
        hardware=_measure.this_host() if hardware == "here" else hardware_named(hardware),
        inputs=inputs,
        loss=loss or (token_loss if seq is not None else square_loss),
        precision=precision,
        **rest,
    )
    check(setting)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            f"estimate: no parameter of {type(model).__name__} requires a gradient, so that there"
            " is no step of training: call requires_grad_() on what is to learn"
        )
    return setting


def check(setting: Setting) -> None:
    world, shards = setting.world_size, setting.shards
    if not isinstance(setting.precision, MixedPrecisionPolicy) and (
        setting.precision not in _POLICIES
    ):
        raise ValueError(
            f"precision={setting.precision!r}: use one of {', '.join(_POLICIES)}, or in Python a"
            f" MixedPrecisionPolicy{_text.did_you_mean(str(setting.precision), _POLICIES)}"
        )
    for name in ("world_size", "micro_batches", "shards", "ranks_per_host"):
        value = getattr(setting, name)
        if value is not None:
            _check_positive_integer(name, value)
    if not isinstance(setting.offload, bool):
        raise TypeError(f"estimate: offload={setting.offload!r}: pass True or False")
    if shards is not None and not setting.strategy.is_hybrid:
        raise ValueError(f"estimate: shards= is for hybrid strategies, not {setting.strategy.name}")
    if world % setting.n_shards:
        raise ValueError(
            f"estimate: {world} ranks do not divide into shard groups of {setting.n_shards}: pass"
            " shards= or another world_size="
        )
    if setting.offload and not setting.strategy.is_sharded:
        raise ValueError('estimate: "ddp" has no shards to offload; use strategy="zero2"')


def _check_positive_integer(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"estimate: {name}={value!r}: pass a whole number, at least 1")


# ---- losses ----


def _output_of(output: Any) -> torch.Tensor:
    """Logits of a Hugging Face output, else the first floating-point tensor."""
    if isinstance(getattr(output, "logits", None), torch.Tensor):
        return output.logits
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(f"forward returned {type(output).__name__}, which has no tensor for a loss")


def token_loss(output: Any) -> torch.Tensor:
    """Cross-entropy over the last dimension, in float32."""
    logits = _output_of(output).flatten(0, -2).float()
    targets = torch.zeros(logits.shape[0], dtype=torch.long)
    return nn.functional.cross_entropy(logits, targets)


def square_loss(output: Any) -> torch.Tensor:
    return _output_of(output).float().square().mean()
