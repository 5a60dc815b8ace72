"""What the core has to know of a parameter to lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fsdp_c._compat import _versions

_SUMMABLE = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def parts_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers that an element is: the core takes a complex one as two."""
    return dtype.to_real() if dtype.is_complex else dtype


def is_summable(dtype: torch.dtype) -> bool:
    return parts_of(dtype) in _SUMMABLE


class ParamSpec(NamedTuple):
    """Read by name in csrc/bind/fsdp/domain.cpp."""

    outer: int
    rows: int  # of the dim that ranks shard
    inner: int
    orig: torch.dtype  # of numbers: none is complex
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    has_grad: bool  # is of a type that can be summed
    trainable: bool
    is_made: bool = False  # what is gathered is made by Python, for each gather
    n_inputs: int = 0  # of an extension, which are gathered in its place
    is_complex: bool = False  # pairs of numbers, along `inner`


class UnitSpec(NamedTuple):
    """Read by name there, too."""

    name: str
    params: list[ParamSpec]
    inputs: Sequence[ParamSpec] = ()  # of all parameters, in their order


def spec_of(fsdp_param: Any) -> ParamSpec:
    orig = fsdp_param.orig_dtype
    outer, rows, inner = fsdp_param.geometry()
    reduce, grad = gradient_dtypes(fsdp_param)
    return ParamSpec(
        outer,
        rows,
        inner * (2 if orig.is_complex else 1),
        orig=parts_of(orig),
        compute=parts_of(_versions.compute_dtype(fsdp_param)),
        reduce=parts_of(reduce),
        grad=parts_of(grad),
        has_grad=_has_gradient(fsdp_param),
        trainable=bool(fsdp_param.sharded_param.requires_grad),
        is_made=fsdp_param.is_extended,
        n_inputs=len(fsdp_param.inputs),
        is_complex=orig.is_complex,
    )


def gradient_dtypes(fsdp_param: Any) -> tuple[torch.dtype, torch.dtype]:
    """In which gradients are summed over ranks, and which the shard's has; the parameter's own if
    it has none."""
    if not _has_gradient(fsdp_param):
        return fsdp_param.orig_dtype, fsdp_param.orig_dtype
    return _versions.reduce_dtype(fsdp_param), _versions.grad_dtype(fsdp_param)


def _has_gradient(fsdp_param: Any) -> bool:
    dtypes = (fsdp_param.orig_dtype, _versions.reduce_dtype(fsdp_param))
    return all(is_summable(dtype) for dtype in dtypes)
