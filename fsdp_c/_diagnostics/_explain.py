"""explain: a table of a model's units, how each of them runs and why, and what looks wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_c import _text
from fsdp_c._comm import _device, _hosts, _transport
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _torchs_own, _unmanaged_params
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c.strategy import _advice, _chosen
from fsdp_c.strategy._chosen import Choice
from fsdp_c.strategy._units import can_be_split

_HEAD = (
    "unit",
    "params",
    "size",
    "of it here",
    "placements",
    "reshard",
    "dtypes",
    "gradients",
    "road",
    "state",
)
_WHOLE = "frozen and held by no FSDP unit: each rank keeps them whole"
_WAYS = {"shm": "shared memory", "callback": "messages", "nccl": "NCCL", "": "one rank"}


@dataclass(frozen=True)
class UnitRow:
    """One unit; all but the numbers are words to read.

    Examples:
        >>> for row in fsdp_c.explain(model).units:
        ...     print(row.unit, row.params, row.cells)
    """

    unit: str
    params: int  # elements
    bytes: int  # of the whole parameters, as they are stored
    local_bytes: int  # of this rank's shards
    placements: str
    reshard: str  # when its parameters are given up, and why
    dtypes: str  # stored -> computed with (inputs too, where they are cast), reduced in
    gradients: str  # averaged, summed or divided by another factor
    road: str  # the core and over what, or torch's implementation and why
    state: str

    @property
    def cells(self) -> tuple[str, ...]:
        unit, params, full, local, *words = astuple(self)
        return (unit, f"{params:,}", _text.bytes_text(full), _text.bytes_text(local), *words)


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; `str()` of it is the table.

    Examples:
        >>> found = fsdp_c.explain(model)
        >>> print(len(found.units), found.choice, found.advice)
    """

    units: tuple[UnitRow, ...]
    choice: Choice | None  # None: sharded by hand
    advice: tuple[str, ...]

    def __str__(self) -> str:
        table = [_HEAD, *(row.cells for row in self.units)]
        widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD))]
        lines = [
            "  ".join(
                cell.rjust(width) if 0 < i < 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        if self.choice is not None:
            strategy = self.choice.strategy
            lines = [f"strategy {strategy.name}: {strategy.summary}", *lines]
            lines += [f"= {call}" for call in self.choice.calls]
        return "\n".join([*lines, *(f"warning: {sentence}" for sentence in self.advice)])


def explain(model: nn.Module) -> Explanation:
    """How each unit of a sharded model runs and why; print it. Local, at any time.

    Warns of one huge unit, of thousands of tiny ones, of units that no forward has used, of a mesh
    with replicas and shards the wrong way round, and of parameters that no unit holds.

    Raises:
        ValueError, TypeError: a model without units, or no model.

    Examples:
        >>> print(fsdp_c.explain(model))
        >>> slow = [row.unit for row in fsdp_c.explain(model).units if "torch" in row.road]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain expects a module, not {type(model).__name__}: pass the model")
    found = list(_units_of(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no units to explain: call fully_shard() or shard() first"
        )
    rows = tuple(_row_of(name, state, group) for name, state, group in found)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sizes = [
        _advice.Size(row.unit, row.bytes, any(can_be_split(m, units) for m in state._modules))
        for row, (_, state, _) in zip(rows, found, strict=True)
    ]
    advice = _advice.on_sizes(sizes)
    meshes = {id(group.mesh_info.mesh): group.mesh_info.mesh for _, _, group in found}
    for mesh in meshes.values():
        advice += _advice.on_mesh(mesh)
    advice += _on_unused(found)
    advice += _on_unheld(model, found)
    return Explanation(rows, _chosen.choice_of(model), tuple(advice))


def _units_of(model: nn.Module) -> Iterable[tuple[str, Any, Any]]:
    """Name, state and group of each unit, the model's own last."""
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for group in _versions.groups_of(state):
            if id(group) not in seen and group.fsdp_params:
                seen.add(id(group))
                found.append((_fqns.clean(name) or "(root)", state, group))
    return found[1:] + found[:1] if found and found[0][0] == "(root)" else found


def _row_of(name: str, state: Any, group: Any) -> UnitRow:
    params = group.fsdp_params
    if not getattr(group, "_is_bound", False):
        group._init_mp_dtypes()  # as the first forward does
    policy = state._mp_policy
    casts = policy.param_dtype if policy.cast_forward_inputs else None
    return UnitRow(
        unit=name,
        params=sum(math.prod(p._orig_size) for p in params),
        bytes=sum(math.prod(p._orig_size) * p.orig_dtype.itemsize for p in params),
        local_bytes=sum(math.prod(p.sharded_size) * p.orig_dtype.itemsize for p in params),
        placements=_listed(_placed(p) for p in params),
        reshard=_reshard_of(state, group),
        dtypes=_listed(_dtypes_of(p, casts) for p in params),
        gradients=_gradients_of(group),
        road=_implementation_of(group),
        state=_state_of(group),
    )


def _state_of(group: Any) -> str:
    if group.is_sharded_post_forward:
        return f"sharded over {group.post_forward_mesh_info.shard_mesh_size} ranks"
    return "unsharded" if group.is_unsharded else "sharded"


def _placed(fsdp_param: Any) -> str:
    return str(fsdp_param.sharded_param.placements)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _dtypes_of(fsdp_param: Any, casts: Any) -> str:
    orig, compute = fsdp_param.orig_dtype, _versions.compute_dtype(fsdp_param)
    is_ours = isinstance(fsdp_param, FSDPParam)
    reduced = _versions.reduce_dtype(fsdp_param) if is_ours else fsdp_param.reduce_dtype or compute
    text = _short(orig) if orig is compute else f"{_short(orig)} -> {_short(compute)}"
    if compute is casts:
        text += " (inputs too)"
    return f"{text}, reduced in {_short(reduced)}"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _gradients_of(group: Any) -> str:
    if not any(p.sharded_param.requires_grad for p in group.fsdp_params):
        return "none, frozen"
    n_ranks, factor = group.mesh_info.mesh.size(), group.gradient_divide_factor
    ranks = f"{n_ranks} rank{'s' * (n_ranks != 1)}"
    if factor in (None, n_ranks):
        return f"mean of {ranks}"
    return f"sum of {ranks}" if factor == 1 else f"sum of {ranks} / {factor:g}"


def _reshard_of(state: Any, group: Any) -> str:
    after = group.post_forward_mesh_info
    is_auto = state._auto_reshard_after_forward
    if after is None:
        why = "the root, backward begins with it" if is_auto else "reshard_after_forward=False"
        return f"kept for backward ({why})"
    if after is not group.mesh_info:
        n_ranks = after.shard_mesh_size
        return f"after forward to groups of {n_ranks} (reshard_after_forward={n_ranks})"
    return f"after forward ({'the default' if is_auto else 'reshard_after_forward=True'})"


def _implementation_of(group: Any) -> str:
    reason = getattr(group, "why_torchs", "torch's fully_shard made it")
    if not getattr(group, "_is_bound", False):
        reason = reason or _torchs_own.why(group)
        return f"torch: {reason}" if reason else "core, from the first forward on"
    if _device.is_taken(group):
        over = _over(_device.ways(group))
        if group.visible.reason:
            over = f"collectives in sight ({group.visible.reason})"
        return f"core, on streams of {group.device.type}, over {over}, {_gathered(group)}"
    if group.visible.reason:
        return f"core over collectives in sight: {group.visible.reason}"
    info = group.mesh_info
    names = ("shard_process_group", "replicate_process_group")
    process_groups = [getattr(info, name, None) for name in names]
    several = [p for p in process_groups if p is not None and p.size() > 1]
    ways = {_hosts.describe(p) or _WAYS[_transport.transport_kind(p)] for p in several}
    return f"core over {' and '.join(sorted(ways or {_WAYS['']}))}"


def _over(ways: dict[str, _device.Way]) -> str:
    """What carries collectives between ranks that hold shards, and between replicas."""
    words = {
        dim: f"{_WAYS[way.kind]} ({way.why_not})" if way.why_not else _WAYS[way.kind]
        for dim, way in ways.items()
    }
    if len(set(words.values())) < 2:
        return next(iter(words.values()), _WAYS[""])
    return " and ".join(f"{way} for {dim}" for dim, way in words.items())


def _gathered(group: Any) -> str:
    """Where all-gathers bring a unit on a device."""
    if group._core_is_resident:
        return "shards used where they lie"
    why_staged = group._core_why_staged
    if why_staged:
        return f"gathered and copied out ({why_staged})"
    has_slices = _device.smaller_group(group) is not None
    return "gathered in place" + ", slices copied out" * has_slices


def _on_unheld(model: nn.Module, found: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Parameters that no unit holds, trained ones and frozen ones; ignored ones cost as much."""
    if all(group.mesh_info.mesh.size() == 1 for _, _, group in found):
        return []
    held = _unmanaged_params.managed()
    for fsdp_param in (p for _, _, group in found for p in group.fsdp_params):
        held |= {id(fsdp_param.sharded_param), id(fsdp_param.__dict__.get("_unsharded_param"))}
    rest = [(_fqns.clean(n), p) for n, p in model.named_parameters() if id(p) not in held]
    cure = (
        "take them out of ignored_params, or add them before fully_shard"
        if isinstance(model, FSDPModule)
        else f"call fully_shard on the whole {type(model).__name__} too, after its blocks"
    )
    advice = []
    for is_trained, cost in ((True, _unmanaged_params.DRIFT), (False, _WHOLE)):
        params = {name: p for name, p in rest if p.requires_grad is is_trained}
        if params:
            size = _text.bytes_text(sum(p.numel() * p.itemsize for p in params.values()))
            names = _unmanaged_params.listed(list(params))
            advice.append(f"{names} ({size} on each rank): {cost}. Unless that is meant, {cure}")
    return advice


def _on_unused(found: Iterable[tuple[str, Any, Any]]) -> list[str]:
    """Units that no forward has used though the model has run."""
    bound = [(name, group) for name, _, group in found if getattr(group, "_is_bound", False)]
    idle = [name for name, group in bound if not group._core_was_used]
    if not idle or len(idle) == len(bound):
        return []
    more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
    return [
        f"no forward has used unit{'s' * (len(idle) > 1)} {', '.join(idle[:3])}{more}: if that is"
        " meant, freeze or ignore it; if not, its module is called by another way than forward"
        " (register_fsdp_forward_method)"
    ]
