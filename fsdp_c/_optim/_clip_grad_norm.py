"""torch.nn.utils' gradient norms and clipping, over tensors of several meshes and plain ones.

torch's functions take one mesh at a time: the norms of several cannot be stacked. Here each mesh,
and the plain tensors, give one number, which is the same on every rank; the rest is arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from fsdp_c import _env
from fsdp_c._compat import _redirection
from fsdp_c._optim import _grad_norm

_FUNCTIONS: tuple[Any, ...] = (
    clip_grad._get_total_norm,
    clip_grad._clip_grads_with_norm_,
    clip_grad.clip_grad_norm_,
)
_originals: dict[Any, Callable[..., Any]] = {}  # what torch's functions have inside


def install() -> None:
    """Everybody who holds torch's functions gets these: the decorated functions change inside."""
    for function, inside in zip(_FUNCTIONS, _INSIDES, strict=True):
        cell = _redirection.decorated(function)
        if cell is not None and function not in _originals:
            original = _originals[function] = cell.cell_contents
            cell.cell_contents = functools.partial(inside, original)


def uninstall() -> None:
    """Gives torch's functions back, until the next fully_shard."""
    for function, original in _originals.items():
        _redirection.decorated(function).cell_contents = original
    _originals.clear()


def _by_mesh(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of the tensors, those of one mesh together; plain tensors count as a mesh."""
    found: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(i)
    return list(found.values())


def _parts(tensors: list[Tensor] | None, found: Any) -> list[tuple[list[Tensor] | None, Any]]:
    """Those of each mesh, and what was collected of them; none if there is one mesh."""
    if found is not None:
        groups = _by_mesh(found.given()) if found.n_meshes > 1 else []
        return [(None, found.part(group)) for group in groups]
    groups = _by_mesh(tensors) if tensors and _grad_norm.has_dtensors(tensors) else []
    if len(groups) < 2:
        return []
    parts = [[tensors[i] for i in group] for group in groups]
    return [(part, _grad_norm.collect(part)) for part in parts]


def _whole(norm: Tensor, whole: Tensor | None) -> Tensor:
    if whole is not None:
        return whole
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _total_norm(
    original: Callable[..., Tensor],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    found = _grad_norm.collect(tensors)
    return _total(original, tensors, found, float(norm_type), error_if_nonfinite, foreach)[0]


def _total(
    original: Callable[..., Tensor],
    tensors: list[Tensor] | None,
    found: Any,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> _grad_norm.Total:
    """Of `tensors`, or if these are None, of what was collected."""
    parts = _parts(tensors, found)
    if parts and not _env.is_strict():
        norms = [_whole(*_total(original, *part, norm_type, False, foreach)) for part in parts]
        if norm_type == 0:  # counts tensors
            total = torch.stack(norms).sum()
        else:
            total = original(norms, norm_type, error_if_nonfinite, None)
        return total, total
    first = _grad_norm.layout_of(tensors or []) if found is None else _grad_norm.first_layout(found)
    known = _grad_norm.total(first, None if parts else found, norm_type, foreach)
    if known is None:
        tensors = found.given() if tensors is None else tensors
        return original(tensors, norm_type, error_if_nonfinite, foreach), None
    if error_if_nonfinite and _is_nonfinite(*known):
        original([torch.tensor(math.nan, device="cpu")], norm_type, True)
    return known


def _is_nonfinite(norm: Tensor, whole: Tensor | None) -> bool:
    if whole is not None:
        return not math.isfinite(whole.item())
    return bool(torch.logical_or(norm.isnan(), norm.isinf()))


def _clip_with_norm(
    original: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = _grad_norm.collect_gradients(parameters)
    is_possible = found is not None and (found.n_meshes == 1 or not _env.is_strict())
    if is_possible and _grad_norm.multiply(found, max_norm, total_norm, None, foreach):
        return None
    if not _grad_norm.has_dtensors(parameters, gradients=True):
        return original(parameters, max_norm, total_norm, foreach)
    with_grad = [param for param in parameters if param.grad is not None]
    parts = _by_mesh([param.grad for param in with_grad])
    if len(parts) < 2 or _env.is_strict():
        return original(parameters, max_norm, total_norm, foreach)
    for part in parts:
        _clip_with_norm(
            original, [with_grad[i] for i in part], max_norm, _whole(total_norm, None), foreach
        )
    return None


def _clip_grad_norm(
    original: Callable[..., Tensor],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Both of the above with one look at the gradients; `original` calls the two one by one."""
    if not isinstance(parameters, Tensor | list):
        parameters = list(parameters) or parameters  # torch warns of an exhausted generator
    if isinstance(parameters, list) and _are_ours():
        found = _grad_norm.collect_gradients(parameters)
        if found is not None and (found.n_meshes == 1 or not _env.is_strict()):
            total_norm = _originals[clip_grad._get_total_norm]
            norm, whole = _total(
                total_norm, None, found, float(norm_type), error_if_nonfinite, foreach
            )
            if not _grad_norm.multiply(found, max_norm, norm, whole, foreach):
                clip_grad._clip_grads_with_norm_(parameters, max_norm, norm, foreach)
            return norm
    return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _are_ours() -> bool:
    """Whether torch's clip_grad_norm_ would come here with both of its steps."""
    return (
        clip_grad._get_total_norm is _FUNCTIONS[0]
        and clip_grad._clip_grads_with_norm_ is _FUNCTIONS[1]
    )


_INSIDES = (_total_norm, _clip_with_norm, _clip_grad_norm)
