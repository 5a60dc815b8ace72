"""What training will hold in memory, by purpose, before the first step."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from fsdp_c import _env, _text
from fsdp_c._compat import _versions
from fsdp_c._diagnostics import _stats
from fsdp_c._fully_shard import _fqns, _fsdp_init, _torchs_own
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._param_spec import ParamSpec, UnitSpec, is_summable, parts_of, spec_of
from fsdp_c._memory._optimizer_state import StateSize, known_optimizer, shard_numel
from fsdp_c._native import _C
from fsdp_c.strategy import Units, find_units
from fsdp_c.strategy._shard import policy_of

_OF_SNAPSHOTS = {"snapshots": "copies by Snapshots, on the host: of parameters and optimizer"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. What ranks of a host share is counted in equal parts, as PSS does.

    Examples:
        >>> plan = fsdp_c.memory_plan(model, optimizer=optimizer)
        >>> print(plan.rank_total, plan.rank_peak, plan.rank["gradients"])
    """

    n_ranks: int
    ranks_per_host: int
    rank: dict[str, int]  # between two steps, with gradients
    backward: int  # on top while backward runs: whole gradients of a unit; without activations
    notes: tuple[str, ...] = ()

    @property
    def rank_total(self) -> int:
        """Between two steps."""
        return sum(self.rank.values())

    @property
    def rank_peak(self) -> int:
        """In backward, without activations."""
        return self.rank_total + self.backward

    def _where(self) -> str:
        if self.ranks_per_host < self.n_ranks:
            return f"{self.n_ranks} ranks, {self.ranks_per_host} on each host"
        if self.n_ranks == 1:
            return "1 rank"
        return f"{self.n_ranks} ranks, all taken to be on one host (ranks_per_host= says otherwise)"

    def __str__(self) -> str:
        rows = [
            (name, n_bytes, {**_stats.PURPOSES, **_OF_SNAPSHOTS}[name])
            for name, n_bytes in self.rank.items()
        ]
        rows.append(("between steps", self.rank_total, "the sum"))
        rows.append(("in backward", self.rank_peak, "with whole gradients, without activations"))
        lines = [
            f"{self._where()}; bytes of a rank, of a host",
            *(_text.row(name, what, n, n * self.ranks_per_host) for name, n, what in rows),
            *self.notes,
        ]
        return "\n".join(lines)


def memory_plan(
    model: nn.Module,
    *,
    world_size: int | None = None,
    replicas: int | None = None,
    ranks_per_host: int | None = None,
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], Any] | None = None,
    units: Any = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    snapshots: bool | int = False,
) -> MemoryPlan:
    """What a rank, and a host, will hold when the model trains on the core. Local; print it.

    The model may be sharded or not, on the meta device or not; of the world nothing has to run.

    Args:
        world_size: ranks in all; default: those of the model's mesh.
        replicas: copies of the model among them (HSDP); default: the mesh's, else 1.
        ranks_per_host: default: all, so that one host has them all and they share its memory. With
            fewer they share none, and the plan is an upper bound.
        optimizer: one that was made, what makes one of parameters (a class, a partial), or a name
            in ``torch.optim``. It is tried on a small parameter of each dtype to see what state it
            keeps.
        units, mp_policy: of a model without ``fully_shard``, what its units will be, as ``shard``
            takes them, and the policy.
        snapshots: count what `Snapshots` of model and optimizer keep, too; 2: with `copies=2`.

    Raises:
        ValueError, TypeError: arguments that do not fit each other, an optimizer that is not known
            or cannot be tried.
        NotImplementedError: torch's implementation runs a unit.

    Examples:
        >>> plan = fsdp_c.memory_plan(whole_model, world_size=64, optimizer="AdamW")
        >>> print(plan)
    """
    state_size = StateSize(known_optimizer(optimizer))
    for module in model.modules():
        _torchs_own.refuse("memory_plan", _fsdp_init.groups_of(module))
    groups = _stats.groups_of(model)
    mesh = groups[0].mesh_info if groups else None
    has_replicas = isinstance(mesh, HSDPMeshInfo) or (replicas or 1) > 1
    replicas = replicas or (mesh.replicate_mesh_size if isinstance(mesh, HSDPMeshInfo) else 1)
    if world_size is None:
        if mesh is None:
            raise ValueError("memory_plan: a model that is not sharded needs world_size")
        world_size = mesh.mesh.size()
    if world_size % replicas or world_size < 1:
        raise ValueError(f"memory_plan: {world_size} ranks cannot hold {replicas} replicas")
    if groups and (mp_policy is not None or not _is_auto(units)):
        raise ValueError("memory_plan: the model is sharded, its units and policies are known")
    n_shards = world_size // replicas
    per_host = ranks_per_host or world_size
    notes: tuple[str, ...] = ()
    if groups:
        specs = [_unit_of(group, n_shards) for group in groups]
    else:
        found = find_units(model, units)
        specs = _units_of_modules(model, found, mp_policy or MixedPrecisionPolicy(), n_shards)
        if not found and _is_auto(units):
            notes = ("No repeated blocks were found, so one unit was assumed: name others, units=",)
    plan = _planned(
        specs,
        _outside(model, groups),
        n_shards,
        replicas,
        per_host,
        state_size,
        notes,
        has_replicas,
    )
    kept = plan.rank["parameters"] + plan.rank["optimizer"]
    if not snapshots:
        return plan
    n_pinned = int(any(group.device.type not in ("cpu", "meta") for group in groups))
    n_kept = 2 * int(snapshots) + n_pinned
    return replace(plan, rank={**plan.rank, "snapshots": n_kept * kept})


def _planned(
    units: list[UnitSpec],
    unsharded: int,
    n_shards: int,
    replicas: int,
    per_host: int,
    state_size: StateSize,
    notes: tuple[str, ...],
    has_replicas: bool = False,
) -> MemoryPlan:
    """`has_replicas`: the mesh has a dim of them, if only of one: sums over shards have room."""
    world = n_shards * replicas
    mapped = per_host >= world
    plan = functools.partial(_C.Domain.plan, units=units, n_shards=n_shards, is_mapped=mapped)
    shard = plan(is_replicate=False, n_ranks=n_shards)
    rows = [row for unit in units for row in unit.params]
    params = sum(_shard_bytes(row, n_shards) for row in rows)
    reduce = shard["arena"]
    control = shard["control"] // n_shards
    if has_replicas and (n_shards > 1 or replicas == 1):
        reduce += shard["parts"]
    if replicas > 1:
        lanes = plan(is_replicate=True, n_ranks=replicas)
        reduce += lanes["arena"]
        control += lanes["control"] // replicas
    rank = {
        "parameters": params + unsharded,
        "gradients": shard["grads"],
        "optimizer": sum(state_size(row, n_shards) for row in rows),
        "unsharded": max(shard["full"] - n_shards * shard["aliased"], 0) // n_shards,
        "gather slots": 0,
        "reduce slots": reduce,
        "control": control,
    }
    wholes = sorted(
        (sum(_whole_bytes(row) for row in unit.params if row.trainable) for unit in units),
        reverse=True,
    )
    largest = wholes[0] if wholes else 0
    borrowed = min(largest, _C.BORROWED_BYTES_MAX) if n_shards > 1 and len(wholes) > 1 else 0
    if world == 1 and any(map(_casts, rows)):
        rank["gather slots"] = -(-shard["part"] // mmap.PAGESIZE) * mmap.PAGESIZE
    if not mapped:
        rank["gather slots"] = shard["largest"] + (n_shards + 1) * shard["pack"]
        rank["reduce slots"] = (n_shards + 1) * shard["part"]
        if shard["small"] and not has_replicas:
            # What comes ahead, twice with its packs; parts of a batch, and their sums.
            rank["gather slots"] += 3 * min(shard["small"], _env.batch_bytes())
            rank["reduce slots"] += 2 * _env.batch_bytes()
        notes += ("Ranks on several hosts share no memory: slots are an upper bound",)
    return MemoryPlan(world, per_host, rank, largest + borrowed, notes)


# ---- parameters: rows are ParamSpec ----


def _unit_of(group: FSDPParamGroup, n_shards: int) -> UnitSpec:
    if not group._is_bound:  # else the first forward has settled its dtypes
        group._init_mp_dtypes()
    return UnitSpec(_fqns.unit_name(group), [_row_of(p, n_shards) for p in group.fsdp_params])


def _row_of(fsdp_param: Any, n_shards: int) -> ParamSpec:
    row = spec_of(fsdp_param)._replace(n_inputs=0)  # which only a gather tells
    return row if fsdp_param._orig_size else row._replace(outer=1, rows=n_shards)


def _is_auto(units: Any) -> bool:
    return isinstance(units, str) and units == "auto"


def _units_of_modules(
    model: nn.Module, units: Units, policy: MixedPrecisionPolicy, n_shards: int
) -> list[UnitSpec]:
    own = {
        unit: policy_of(options["precision"])
        for unit, options in units.options.items()
        if options.get("precision") is not None
    }
    by_module = rows_by_module(model, units, policy, n_shards, own_policies=own)
    return [UnitSpec(type(unit).__name__, rows) for unit, rows in by_module]


def rows_by_module(
    model: nn.Module,
    units: Sequence[nn.Module],
    policy: MixedPrecisionPolicy,
    n_shards: int,
    without_gradient: Container[nn.Parameter] = (),
    own_policies: Mapping[nn.Module, MixedPrecisionPolicy] | None = None,
) -> list[tuple[nn.Module, list[ParamSpec]]]:
    """Rows of the units' own parameters; units without any are left out.

    `without_gradient`: parameters that get none though they want one. `own_policies`: of units
    that have another one.
    """
    found = []
    seen: set[nn.Parameter] = set()
    for unit in [*units, model]:
        params = [param for param in unit.parameters() if param not in seen]
        seen.update(params)
        if params:
            trained = [p.requires_grad and p not in without_gradient for p in params]
            pairs = zip(params, trained, strict=True)
            its = (own_policies or {}).get(unit, policy)
            found.append((unit, [_planned_row(p, its, n_shards, t) for p, t in pairs]))
    return found


def _planned_row(
    param: nn.Parameter, policy: MixedPrecisionPolicy, n_shards: int, is_trained: bool
) -> ParamSpec:
    orig = param.dtype
    has_grad = is_summable(orig)
    compute = (policy.param_dtype if orig.is_floating_point else None) or orig
    asked = policy.reduce_dtype or _versions.unset_reduce_dtype(orig, compute)
    reduce = _versions.with_both_parts(asked, compute)
    size = tuple(param.shape)
    geometry = (1, size[0], math.prod(size[1:])) if size else (1, n_shards, 1)
    return ParamSpec(
        *geometry[:2],
        inner=geometry[2] * (2 if orig.is_complex else 1),
        orig=parts_of(orig),
        compute=parts_of(compute),
        reduce=parts_of(reduce) if has_grad else orig,
        grad=parts_of(orig),
        has_grad=has_grad,
        trainable=is_trained,
        is_complex=orig.is_complex,
    )


def _shard_bytes(row: ParamSpec, n_shards: int) -> int:
    return shard_numel(row, n_shards) * row.orig.itemsize


def _casts(row: ParamSpec) -> bool:
    """Whether gradients come in another dtype than that of their sums."""
    return row.has_grad and row.compute != row.reduce


def _whole_bytes(row: ParamSpec) -> int:
    """Of the gradient as autograd makes it."""
    return row.outer * row.rows * row.inner * row.compute.itemsize


def _outside(model: nn.Module, groups: Sequence[FSDPParamGroup]) -> int:
    """Bytes of what no unit manages: ignored parameters, buffers."""
    managed = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    tensors = _stats.tensors_of(model) if groups else model.buffers()
    return sum(t.numel() * t.itemsize for t in tensors if id(t) not in managed)
