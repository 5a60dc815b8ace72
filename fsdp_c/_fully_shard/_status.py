"""What runs where: the core or torch's implementation, and over what ranks talk."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_c import _built, _env
from fsdp_c._built import __version__
from fsdp_c._comm import _device, _nccl, _transport
from fsdp_c._native import _C


@dataclass(frozen=True)
class TreeStatus:
    """One model: a root and all units below it.

    Examples:
        >>> on_torch = [tree for tree in fsdp_c.status().trees if tree.runs_on == "torch"]
        >>> print([(tree.root, tree.reason) for tree in on_torch])
    """

    root: str  # class of the root module
    n_units: int
    runs_on: str  # "core" or "torch"
    reason: str  # why not on the core; empty if it is
    transports: tuple[
        str, ...
    ]  # of the core: "shm", "rails", "callback" or "nccl" per process group
    n_ranks: int

    def __str__(self) -> str:
        what = f"{self.root} ({self.n_units} unit{'s' * (self.n_units != 1)})"
        if self.runs_on == "torch":
            return f"{what} runs on torch's own implementation: {self.reason}"
        ways = {
            "shm": "shared memory",
            "rails": "rails between hosts",
            "callback": "the process group's collectives",
            "nccl": "NCCL",
        }
        way = " and ".join(ways[kind] for kind in self.transports)
        over = f" over {way} between {self.n_ranks} ranks" if self.n_ranks > 1 else ""
        return f"{what} runs on the C core{over}"


@dataclass(frozen=True)
class Status:
    """What `fsdp_c.status()` returns; `str()` of it is one line per model.

    Examples:
        >>> found = fsdp_c.status()
        >>> print(found.version, found.kernels, len(found.trees))
    """

    torch: str  # version
    kernels: str  # instruction set
    trees: tuple[TreeStatus, ...]  # models that have run forward and still live
    nccl: str  # the library that has been opened, and what it cannot do
    version: str  # fsdp_c's
    built_for: str  # the torch whose build is loaded

    def __str__(self) -> str:
        own = f"fsdp_c {self.version} built for torch {self.built_for}"
        lines = [f"{own}, torch {self.torch}, {self.kernels} kernels", *map(str, self.trees)]
        return "\n".join([*lines, self.nccl] if self.nccl else lines)


# Root states by which implementation they took: state -> why torch's, empty for the core.
_roots: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_printed: set[str] = set()


def status() -> Status:
    """Which implementation runs each model that has run forward, why, and over which transport.

    Examples:
        >>> print(fsdp_c.status())
    """
    run = [root for root in list(_roots) if root._is_root and not getattr(root, "torchs", None)]
    trees = tuple(_describe(root, _roots[root]) for root in run)
    return Status(
        torch=torch.__version__,
        kernels=_C.kernels(),
        trees=trees,
        nccl=_nccl.describe(),
        version=__version__,
        built_for=_built.minor_of(torch.__version__),
    )


def note(root: Any, reason: str) -> None:
    """Remembers a root's implementation and prints it once, on rank 0."""
    _roots[root] = reason
    if _env.QUIET.get() or (dist.is_initialized() and dist.get_rank() != 0):
        return
    line = str(_describe(root, reason))
    if line not in _printed:
        _printed.add(line)
        print(f"[fsdp_c] {line}", file=sys.stderr)


def _describe(root: Any, reason: str) -> TreeStatus:
    states = root._state_ctx.all_states or [root]  # none before the first forward
    groups = [group for state in states for group in state._fsdp_param_groups]
    meshes = [g.mesh_info for g in groups]
    bound = [g for g in groups if getattr(g, "_is_bound", False)]
    in_sight = {id(g) for g in bound if g.visible.reason}
    several = [p for g in groups if id(g) not in in_sight for p in _several(g.mesh_info)]
    kinds = {_transport.transport_kind(p) for p in several}
    if any((g.visible.reason or g.visible.is_watched) and _several(g.mesh_info) for g in bound):
        kinds.add("callback")
    taken = [g for g in bound if _device.is_taken(g)]
    if taken:
        kinds = {way.kind for group in taken for way in _device.ways(group).values()}
    return TreeStatus(
        root=type(root._modules[0]).__mro__[2].__name__,
        n_units=sum(bool(state._fsdp_param_groups) for state in states),
        runs_on="torch" if reason else "core",
        reason=reason,
        transports=() if reason else tuple(sorted(kind for kind in kinds if kind)),
        n_ranks=max((m.mesh.size() for m in meshes), default=1),
    )


def _several(mesh_info: Any) -> list[dist.ProcessGroup]:
    """Process groups of a mesh that have more than one rank."""
    names = ("shard_process_group", "replicate_process_group")
    process_groups = (getattr(mesh_info, name, None) for name in names)
    return [p for p in process_groups if p is not None and p.size() > 1]
