"""torch.nn.utils' gradient norms and clipping, over tensors of several meshes and plain ones.

torch's functions take one mesh at a time: the norms of several cannot be stacked. Here each mesh,
and the plain tensors, give one number, which is the same on every rank; the rest is arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from fsdp_c import _clip, _delegate, _env

_FUNCTIONS: tuple[Any, ...] = (
    clip_grad._get_total_norm,
    clip_grad._clip_grads_with_norm_,
    clip_grad.clip_grad_norm_,
)
_originals: dict[Any, Callable[..., Any]] = {}  # what torch's functions have inside


def install() -> None:
    """Everybody who holds torch's functions gets these: the decorated functions change inside."""
    for function, inside in zip(_FUNCTIONS, _INSIDES, strict=True):
        cell = _delegate.decorated(function)
        if cell is not None and function not in _originals:
            original = _originals[function] = cell.cell_contents
            cell.cell_contents = functools.partial(inside, original)


def uninstall() -> None:
    """Gives torch's functions back, until the next fully_shard."""
    for function, original in _originals.items():
        _delegate.decorated(function).cell_contents = original
    _originals.clear()


def _by_mesh(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of the tensors, those of one mesh together; plain tensors count as a mesh."""
    found: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(i)
    return list(found.values())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _total_norm(
    original: Callable[..., Tensor],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm_type = float(norm_type)
    layout = None if error_if_nonfinite else _clip.layout_of(tensors)
    found = _clip.collect(layout, tensors)
    parts = [] if found is not None or _env.is_strict() else _by_mesh(tensors)
    if len(parts) < 2:
        total = None if layout is None else layout.total(found, norm_type)
        return original(tensors, norm_type, error_if_nonfinite, foreach) if total is None else total
    norms = [
        _whole(_total_norm(original, [tensors[i] for i in part], norm_type, False, foreach))
        for part in parts
    ]
    if norm_type == 0:  # counts tensors
        return torch.stack(norms).sum()
    return original(norms, norm_type, error_if_nonfinite, None)


def _clip_with_norm(
    original: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    layout = _clip.layout_of(param.grad for param in parameters)
    if _clip.multiply(_clip.collect_gradients(layout, parameters), max_norm, total_norm):
        return None
    with_grad = [param for param in parameters if param.grad is not None]
    parts = [] if _env.is_strict() else _by_mesh([param.grad for param in with_grad])
    if len(parts) < 2:
        return original(parameters, max_norm, total_norm, foreach)
    for part in parts:
        _clip_with_norm(
            original, [with_grad[i] for i in part], max_norm, _whole(total_norm), foreach
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
    if isinstance(parameters, list) and not error_if_nonfinite and _are_ours():
        layout = _clip.layout_of(param.grad for param in parameters)
        found = _clip.collect_gradients(layout, parameters)
        if found is not None:
            total = layout.total(found, float(norm_type))
            if not _clip.multiply(found, max_norm, total):
                clip_grad._clip_grads_with_norm_(parameters, max_norm, total, foreach)
            return total
    return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _are_ours() -> bool:
    """Whether torch's clip_grad_norm_ would come here with both of its steps."""
    return (
        clip_grad._get_total_norm is _FUNCTIONS[0]
        and clip_grad._clip_grads_with_norm_ is _FUNCTIONS[1]
    )


_INSIDES = (_total_norm, _clip_with_norm, _clip_grad_norm)
