"""shard: a whole model by the name of a strategy, in calls of fully_shard."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.utils import _sync_module_states

from fsdp_c._fully_shard import _fsdp_init
from fsdp_c._fully_shard._fully_shard import fully_shard
from fsdp_c.strategy import _advice, _checkpoint, _chosen, _mesh
from fsdp_c.strategy._strategies import Strategy, strategy_named
from fsdp_c.strategy._units import Units, can_be_split, find_units, listed

_PRECISIONS = {
    "fp32": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# What a policy may say of one unit, and what FSDP1 calls it.
_UNIT_OPTIONS = ("reshard_after_forward", "precision", "offload", "shard_placement_fn")
_BY_FSDP1 = {
    "sharding_strategy": "reshard_after_forward",
    "mixed_precision": "precision",
    "cpu_offload": "offload",
}
_SYNC_BUCKET_BYTES = 250 << 20  # as FSDP1 and DDP

_warned: set[str] = set()

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    strategy: str | Strategy = "zero3",
    *,
    units: Any = "auto",
    mesh: DeviceMesh | int | tuple[int, ...] | None = None,
    precision: str | torch.dtype | MixedPrecisionPolicy | None = None,
    offload: bool | OffloadPolicy | None = None,
    checkpoint: Any = None,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    sync: bool | None = None,
) -> Model:
    """Spreads a model over ranks by the name of a strategy; returns the model, changed in place.

    It comes to calls of ``fully_shard``, on each unit and then on the model; ``explain(model)``
    shows them. What a strategy sets:

    | strategy     | mesh                      | reshard_after_forward | in ``no_sync``          |
    | ------------ | ------------------------- | --------------------- | ----------------------- |
    | ddp          | (ranks, 1): replicas only | False                 | gradients stay whole    |
    | zero1        | (ranks,)                  | False                 | gradients stay whole    |
    | zero2        | (ranks,)                  | False                 | gradients sharded       |
    | zero3        | (ranks,)                  | True, the root too    | gradients sharded       |
    | hybrid       | (replicas, shards)        | True, the root too    | summed over shards only |
    | hybrid_zero2 | (replicas, shards)        | False                 | summed over shards only |

    Optimizer, clipping, accumulation and checkpoints are those of ``fully_shard`` under all of
    them: parameters are DTensors, whole ones under "ddp".

    Args:
        units: modules that travel together, as ``find_units`` takes them; the model holds the rest.
            Options that a ``CustomPolicy`` or predicate gives for a unit: reshard_after_forward,
            precision, offload, shard_placement_fn.
        mesh: a DeviceMesh, or sizes over all ranks. Hybrid strategies: replicas, then shards;
            default: a host's ranks shard, as torchrun's LOCAL_WORLD_SIZE says.
        precision: "fp32", "bf16", "fp16" (reduced in float32; fp16 needs a GradScaler), a dtype, or
            a MixedPrecisionPolicy. Default: the parameters' own dtypes.
        offload: True or a policy: shards live in CPU memory. Not with "ddp", which has no shards.
        checkpoint: True recomputes each unit in backward; or classes, names, a predicate, ... as
            ``units``. State-dict keys stay as they are.
        ignored: modules and parameters to leave alone, as they are on every rank.
        sync: whether rank 0's parameters and buffers are sent to all ranks first. Default: for
            "ddp", as DDP does.

    Raises:
        ValueError, TypeError: before anything is changed.

    Examples:
        >>> model = fsdp_c.shard(model, "zero2", units=Block, precision="bf16")
    """
    chosen = strategy_named(strategy)
    _check_model(model)
    if sync not in (None, True, False):
        raise TypeError(f"sync={sync!r}: use True (rank 0's states for all), False or None")
    if not dist.is_initialized():
        _fsdp_init.check_arguments(model, None, MixedPrecisionPolicy(), OffloadPolicy())
    ignored = listed(ignored)
    found = find_units(model, units, ignored=ignored)
    options = _options_of(chosen, precision, offload)
    by_unit = {unit: _with_own(chosen, options, found.options.get(unit)) for unit in found}
    recomputed = _checkpoint.modules_for(model, checkpoint, found, ignored)
    sizes = _mesh.check(chosen, mesh)
    device_mesh = _mesh.make(chosen, mesh, sizes)
    advice = _advice_for(model, found, device_mesh)
    ignored_params = {p for p in ignored if isinstance(p, nn.Parameter)}
    ignored_params.update(p for m in ignored if isinstance(m, nn.Module) for p in m.parameters())
    with _fsdp_init.undone_on_error([model]):
        if sync or (sync is None and not chosen.is_sharded):
            _send_states(model, device_mesh, ignored_params)
        _checkpoint.apply(recomputed)
        for unit, own in by_unit.items():
            fully_shard(unit, mesh=device_mesh, ignored_params=ignored_params, **own)
        fully_shard(model, mesh=device_mesh, ignored_params=ignored_params, **options)
    _chosen.remember(model, _chosen.Choice(chosen, _calls(found, device_mesh, options, recomputed)))
    _warn_once(advice)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add up gradients for one that follows outside; of a sharded model.

    What waits is what the strategy of ``shard`` allows: whole gradients and no collective ("ddp",
    "zero1"), sums over shards without the all-reduce between replicas ("hybrid",
    "hybrid_zero2"), or nothing ("zero2", "zero3"), since sharded gradients add up anyway. A model
    that ``fully_shard`` made keeps whole gradients.

    Examples:
        >>> with fsdp_c.no_sync(model):
        ...     model(x).sum().backward()  # adds up, sends nothing
        >>> model(x).sum().backward()
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"no_sync needs a sharded model, not {type(model).__name__}: call shard()")
    choice = _chosen.choice_of(model)
    if choice is None or choice.strategy.keeps_unsharded_gradients:
        switch = model.set_requires_gradient_sync
    elif choice.strategy.is_hybrid:
        switch = model.set_requires_all_reduce
    else:
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


# ---- arguments ----


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard expects a module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{f'module {name!r}' if name else 'the model'} is sharded already: call shard"
                " once, on a model as it was built, or fully_shard on every part by hand"
            )


def _options_of(strategy: Strategy, precision: Any, offload: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"reshard_after_forward": strategy.reshard_after_forward}
    if precision is not None:
        options["mp_policy"] = policy_of(precision)
    policy = _offload_of(offload)
    if policy is not None:
        if not strategy.is_sharded and isinstance(policy, CPUOffloadPolicy):
            raise ValueError(
                f"offload moves shards to the CPU, and strategy {strategy.name!r} has none: every"
                ' rank computes with the whole model. Use strategy="zero2", or no offload'
            )
        options["offload_policy"] = policy
    return options


def policy_of(precision: Any) -> MixedPrecisionPolicy:
    """What ``precision=`` stands for."""
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    name = _DTYPES.get(precision, precision) if isinstance(precision, torch.dtype) else precision
    if isinstance(name, str) and name in _PRECISIONS:
        return replace(_PRECISIONS[name])
    raise ValueError(
        f"precision={precision!r}: use one of {', '.join(_PRECISIONS)}, their dtypes, or a"
        " MixedPrecisionPolicy"
    )


def _offload_of(offload: Any) -> OffloadPolicy | None:
    if offload is None or offload is False:
        return None
    if offload is True:
        return CPUOffloadPolicy()
    if isinstance(offload, OffloadPolicy):
        return offload
    raise TypeError(f"offload={offload!r}: use True, or a policy such as CPUOffloadPolicy()")


def _with_own(strategy: Strategy, options: dict[str, Any], own: Any) -> dict[str, Any]:
    """The options of a unit that a policy said something about."""
    if not own:
        return options
    for name in own:
        if name not in _UNIT_OPTIONS:
            better = _BY_FSDP1.get(name)
            hint = f": write {better}=" if better else f": {', '.join(_UNIT_OPTIONS)} are"
            raise ValueError(f"units: {name!r} is no option of a unit{hint}")
    merged = options | _options_of(strategy, own.get("precision"), own.get("offload"))
    kept = ("reshard_after_forward", "shard_placement_fn")
    return merged | {name: own[name] for name in kept if name in own}


# ---- effects ----


def _send_states(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Rank 0's values to all ranks of the mesh; tensors without values stay as they are."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    names = {name for name, param in model.named_parameters() if param in ignored}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if group.size() > 1:
            first = 0  # in the group, whatever its number among all ranks
            _sync_module_states(
                model, group, _SYNC_BUCKET_BYTES, first, params_and_buffers_to_ignore=names
            )


def _advice_for(model: nn.Module, units: Units, mesh: DeviceMesh) -> list[str]:
    names = {module: name or "(root)" for name, module in model.named_modules()}
    seen: set[nn.Parameter] = set()
    sizes = []
    for unit in [*units, model]:
        params = [param for param in unit.parameters() if param not in seen]
        seen.update(params)
        n_bytes = sum(p.numel() * p.itemsize for p in params)
        sizes.append(_advice.Size(names[unit], n_bytes, can_be_split(unit, units)))
    return _advice.on_sizes(sizes) + _advice.on_mesh(mesh)


def _warn_once(advice: list[str]) -> None:
    for sentence in advice:
        if sentence not in _warned and dist.get_rank() == 0:
            _warned.add(sentence)
            warnings.warn(f"fsdp_c.shard: {sentence}", stacklevel=3)


def _calls(
    units: Units, mesh: DeviceMesh, options: dict[str, Any], recomputed: list[nn.Module]
) -> tuple[str, ...]:
    """What a script without `shard` would say."""
    given = "".join(f", {name}={value}" for name, value in options.items())
    call = f"mesh={tuple(mesh.shape)}{given})"
    lines = []
    if recomputed:
        lines.append(f"checkpoint(module)  # {len(recomputed)} modules")
    if units:
        lines.append(f"fully_shard(unit, {call}  # {len(units)} units")
    return (*lines, f"fully_shard(model, {call}")
