"""What looks wrong about a model's units: sentences for a person, each with a cure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import _text

# A unit is gathered as a whole: below this nothing is worth a word.
_HUGE_BYTES = 1 << 20
# Each unit costs a fixed time per step (9 us on the core, hundreds under torch).
_MANY_UNITS = 1000
_TINY_BYTES = 64 << 10


@dataclass(frozen=True)
class Size:
    """One unit, as far as advice needs it."""

    name: str
    n_bytes: int
    can_be_split: bool  # has repeated blocks


def on_sizes(units: Sequence[Size]) -> list[str]:
    """One huge unit, thousands of tiny ones."""
    advice = []
    total = sum(unit.n_bytes for unit in units)
    for unit in units:
        if unit.n_bytes > max(_HUGE_BYTES, total / 2) and unit.can_be_split:
            advice.append(
                f"unit '{unit.name}' holds {unit.n_bytes / total:.0%} of the model and is gathered"
                f" as a whole: make its repeated blocks units of their own (units=)"
            )
    if len(units) >= _MANY_UNITS:
        median = statistics.median(unit.n_bytes for unit in units)
        if median < _TINY_BYTES:
            advice.append(
                f"{len(units)} units of {_text.bytes_text(median)} in the middle: each costs a"
                " collective per step, so choose larger ones (blocks rather than layers)"
            )
    return advice


def on_mesh(mesh: DeviceMesh) -> list[str]:
    """Replicas and shards the wrong way round."""
    if mesh.ndim != 2:
        return []
    names = [name.lower() for name in mesh.mesh_dim_names or ("", "")]
    by_name = "shard" in names[0] or "replica" in names[1]
    if by_name or _is_transposed(mesh.mesh):
        return [
            f"the mesh {tuple(mesh.shape)} with dims {mesh.mesh_dim_names} looks swapped: dim 0"
            " replicates, dim 1 shards and should join neighbouring ranks, those of one host"
        ]
    return []


def _is_transposed(ranks: Any) -> bool:
    if min(ranks.shape) < 2:
        return False
    return int(ranks[1, 0] - ranks[0, 0]) == 1 and int(ranks[0, 1] - ranks[0, 0]) != 1
