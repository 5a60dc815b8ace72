"""Moves a model's memory away between two steps, to a file or to private memory, and back.

What moves are storages: parameters, gradients, optimizer state and whoever holds them stay the same
objects, and have no memory until `onload`. Units leave the core for that time, so that the memory
which ranks share goes back to the system.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor

from fsdp_c._checkpoint import _safetensors
from fsdp_c._comm import _agreement
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _fsdp_module, _heap, _torchs_own
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._fsdp_state import FSDPState
from fsdp_c._native import _C

_Result = TypeVar("_Result")


@dataclass
class _Offloaded:
    """What `onload` needs."""

    tensors: dict[str, Tensor]  # local, one per storage
    states: list[FSDPState]
    path: Path | None
    memory: dict[str, Tensor] = field(default_factory=dict)  # bytes, if there is no file
    roots: list[list[FSDPState]] = field(default_factory=list)  # that ran on the core

    @property
    def groups(self) -> list[FSDPParamGroup]:
        return [group for state in self.states for group in state._fsdp_param_groups]


@torch.no_grad()
def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    to: str | os.PathLike[str] | None = None,
) -> int:
    """Takes the memory of a model's shards, of their gradients and of their optimizer state away.

    For a phase in which the same processes need it for something else. Between two steps, on the
    root, on all ranks. What the core holds for the model goes back to the system: memory that ranks
    share, unsharded copies, reduce slots. Parameters, gradients, optimizer state, hooks and
    references to them stay; until `onload`, a forward of the model or reading a tensor of it
    raises. Buffers and parameters that no unit manages are left alone.

    Args:
        optimizer: its state of the model's sharded parameters moves too.
        to: a folder, in which each rank writes a file (safetensors: others may map it), after which
            the memory is free; not one that lives in memory itself. None: private memory, which the
            system can swap out; then what is freed is shared memory and what is held for speed.

    Returns:
        the bytes of this rank's shards, gradients and states that were moved.

    Raises:
        ValueError, NotImplementedError, FileExistsError, OSError: this rank cannot.
        RuntimeError: in a step, or before a backward that is still to come; or another rank cannot,
            with its reason. Nothing has been moved on any rank then.

    Examples:
        >>> n_bytes = fsdp_c.offload(model, optimizer, to=folder)
        >>> fsdp_c.onload(model)
    """
    states = _states_of(model)
    n_bytes = 0

    def prepare() -> _Offloaded:
        nonlocal n_bytes
        _check(model, states)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        offloaded = _Offloaded(_tensors_of(model, states, optimizer), states, _file_for(to))
        contents = {name: _bytes_of(tensor) for name, tensor in offloaded.tensors.items()}
        n_bytes = sum(content.numel() for content in contents.values())
        if offloaded.path is None:
            shared = _shared_storages(offloaded.groups)
            for name, tensor in offloaded.tensors.items():
                if tensor.untyped_storage()._cdata in shared:
                    offloaded.memory[name] = contents[name].clone()
        else:
            _write(offloaded.path, offloaded.tensors, contents)
        return offloaded

    groups = [group for state in states for group in state._fsdp_param_groups]
    offloaded = _on_all_ranks("offload", groups, prepare, _remove_file)
    _leave_core(offloaded)
    for name, tensor in offloaded.tensors.items():
        memory = _C.take_memory(tensor=tensor, text=_fsdp_module.OFFLOADED)
        if offloaded.path is None:
            offloaded.memory.setdefault(name, memory)
        del memory
    _C.Domain.trim_slots()
    _heap.trim()
    return n_bytes


@torch.no_grad()
def onload(model: nn.Module) -> None:
    """Brings back what `offload` took away, bit by bit; on all ranks. The files go.

    Raises:
        ValueError: the model was not offloaded.
        OSError, RuntimeError: a rank cannot, for instance because its file is gone; named on all
            ranks, and the model stays offloaded.

    Examples:
        >>> n_bytes = fsdp_c.offload(model, optimizer)
        >>> fsdp_c.onload(model)
    """
    states = _states_of(model)
    offloaded = getattr(states[0], "offloaded", None) if states else None
    if offloaded is None or len(states) != len(offloaded.states):
        raise ValueError(
            f"onload: this {type(model).__name__} was not moved away by offload(), or not by itself"
        )

    def prepare() -> dict[str, Tensor]:
        if offloaded.path is None:
            return offloaded.memory
        return _read(offloaded.path, offloaded.tensors)

    memory = _on_all_ranks("onload", offloaded.groups, prepare)
    for name, tensor in offloaded.tensors.items():
        _C.give_memory(tensor=tensor, bytes=memory[name])
    del memory
    for state in offloaded.states:
        state.offloaded = None
    for group in offloaded.groups:
        group.is_offloaded = False
    for states in offloaded.roots:
        groups = [group for state in states for group in state._fsdp_param_groups]
        states[0]._join_core(states, groups)
    _remove_file(offloaded)


# ---- what is moved ----


def _states_of(model: nn.Module) -> list[Any]:
    """Of all fully_shard calls in the model, each once."""
    states = {id(s): s for s in map(_get_module_fsdp_state, model.modules()) if s is not None}
    return list(states.values())


def _check(model: nn.Module, states: Sequence[Any]) -> None:
    """Raises unless the model, whole and at rest, can be moved."""
    for state in states:
        _torchs_own.refuse("offload", _versions.groups_of(state))
    if not states or not all(isinstance(state, FSDPState) for state in states):
        raise ValueError(
            f"offload: {type(model).__name__} has no modules, or not only modules, that were"
            " sharded by fsdp_c"
        )
    for state in states:
        if state.offloaded is not None:
            raise RuntimeError(f"offload: {_fsdp_module.OFFLOADED}")
        if any(other not in states for other in state._state_ctx.all_states):
            raise ValueError(
                f"offload: {type(model).__name__} is only a part of a sharded model: pass its root"
            )
        is_at_rest = state._training_state == TrainingState.IDLE
        if state._root is not None:
            is_at_rest = state._root.is_between_steps
        for group in state._fsdp_param_groups:
            if not (is_at_rest and _is_at_rest(group)):
                raise RuntimeError(
                    f"offload: unit '{_fqns.unit_name(group)}' is in a step: a forward is going"
                    " on, its backward is still to come, or gradients of backward passes without"
                    " synchronization wait for a reduction. Call it after the backward that"
                    " reduces, and run forwards that have no backward under torch.no_grad()"
                )


def _is_at_rest(group: FSDPParamGroup) -> bool:
    if group._is_bound:
        return not (group._core_in_phase or group._core_has_accumulated)
    accumulated = (getattr(p, "unsharded_accumulated_grad", None) for p in group.fsdp_params)
    return (
        group._training_state == TrainingState.IDLE
        and not group._post_forward_indices
        and all(grad is None for grad in accumulated)
    )


def _tensors_of(
    model: nn.Module, states: Sequence[FSDPState], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Local tensors by name: one for each storage with memory."""
    names = {id(param): _fqns.clean(name) for name, param in model.named_parameters()}
    managed = [p for s in states for group in s._fsdp_param_groups for p in group.fsdp_params]
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for fsdp_param in managed:
        param = fsdp_param.sharded_param
        if id(param) not in names:
            raise RuntimeError(
                f"offload: parameter '{fsdp_param._param_fqn}' was replaced since the last forward:"
                " run a forward before"
            )
        for name, tensor in _with_state(names[id(param)], param, optimizer):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = _plain(name, local).untyped_storage()
            if storage.nbytes() and not local.is_meta and storage._cdata not in seen:
                seen.add(storage._cdata)
                found[name] = local
    return found


def _with_state(
    name: str, param: nn.Parameter, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    yield f"parameter/{name}", param
    if param.grad is not None:
        yield f"gradient/{name}", param.grad
    if optimizer is not None and param in optimizer.state:
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor) and value.ndim > 0:
                yield f"optimizer/{name}/{key}", value


def _plain(name: str, local: Tensor) -> Tensor:
    if type(local) not in (Tensor, nn.Parameter) or local.layout != torch.strided:
        raise NotImplementedError(
            f"offload: {name} is a {type(local).__name__} of layout {local.layout}, whose memory"
            " cannot be moved"
        )
    if local.device.type not in ("cpu", "meta"):
        raise NotImplementedError(f"offload: {name} is on {local.device}: only CPU memory is moved")
    return local


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage: with padding, and with what else lies there."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _shared_storages(groups: Sequence[FSDPParamGroup]) -> set[int]:
    """Storages that lie in memory of all ranks."""
    found = set()
    for group in groups:
        if group._binding is not None:
            places = group._binding.shard.layout(group._binding.index)["params"]
            for fsdp_param, place in zip(group.fsdp_params, places, strict=True):
                if place["is_aliased"]:
                    found.add(fsdp_param._sharded_local_tensor.untyped_storage()._cdata)
    return found


# ---- to and from the core ----


def _leave_core(offloaded: _Offloaded) -> None:
    roots = {id(s._root): s._root for s in offloaded.states if s._root is not None}
    offloaded.roots = [list(root.states) for root in roots.values()]
    for state in offloaded.states:
        state.offloaded = offloaded
        if state._root is not None:
            state._join(root=None, groups=())
            state._state_ctx.__dict__.pop("_root", None)
    for group in offloaded.groups:
        group.is_offloaded = True
        if group._is_bound:
            group._core_release_gradients()
            group.unbind()


def _on_all_ranks(
    what: str,
    groups: Sequence[FSDPParamGroup],
    prepare: Callable[[], _Result],
    undo: Callable[[_Result], None] = lambda result: None,
) -> _Result:
    """What `prepare` returns here, once it has succeeded on all ranks."""
    operation = f"fsdp_c.{what}()"
    try:
        result = prepare()
    except Exception as error:
        reason = f"{type(error).__name__}: {error} (on rank {dist.get_rank()})"
        _agreement.first_reason_of_units(operation, groups, reason)
        raise
    try:
        reason = _agreement.first_reason_of_units(operation, groups, "")
        if reason:
            raise RuntimeError(f"{what}: nothing was moved, since it failed with {reason}")
    except BaseException:
        undo(result)
        raise
    return result


# ---- files ----


def _file_for(folder: str | os.PathLike[str] | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder) / f"offload-rank-{dist.get_rank()}.safetensors"
    if path.exists():
        raise FileExistsError(
            f"offload: {path} is there already, perhaps of another model that is offloaded: choose"
            " another folder, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, tensors: dict[str, Tensor], contents: dict[str, Tensor]) -> None:
    typed = {}
    for name, content in contents.items():
        dtype = tensors[name].dtype
        is_whole = content.numel() % dtype.itemsize == 0 and dtype in _safetensors.NAMES
        typed[name] = content.view(dtype) if is_whole else content
    try:
        _safetensors.write(path, typed)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    entries = _safetensors.read(path)
    if odd := entries.keys() ^ tensors.keys():
        raise RuntimeError(f"onload: {path} is not what offload() wrote there: {sorted(odd)[0]}")
    return {name: entry.tensor().view(torch.uint8).clone() for name, entry in entries.items()}


def _remove_file(offloaded: _Offloaded) -> None:
    if offloaded.path is not None:
        offloaded.path.unlink(missing_ok=True)
