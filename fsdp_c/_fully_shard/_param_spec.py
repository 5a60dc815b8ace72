"""What the core has to know of a parameter to lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fsdp_c._compat import _versions

SUMMABLE = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class ParamSpec(NamedTuple):
    """Read by name in csrc/bind/fsdp/domain.cpp."""

    outer: int
    rows: int  # of the dim that ranks shard
    inner: int
    orig: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    has_grad: bool  # is of a type that can be summed
    trainable: bool
    is_made: bool = False  # what is gathered is made by Python, for each gather
    n_inputs: int = 0  # of an extension, which are gathered in its place


class UnitSpec(NamedTuple):
    """Read by name there, too."""

    name: str
    params: list[ParamSpec]
    inputs: Sequence[ParamSpec] = ()  # of all parameters, in their order


def spec_of(fsdp_param: Any) -> ParamSpec:
    orig = fsdp_param.orig_dtype
    has_grad = orig in SUMMABLE and _versions.reduce_dtype(fsdp_param) in SUMMABLE
    return ParamSpec(
        *fsdp_param.geometry(),
        orig=orig,
        compute=_versions.compute_dtype(fsdp_param),
        reduce=_versions.reduce_dtype(fsdp_param) if has_grad else orig,
        grad=_versions.grad_dtype(fsdp_param) if has_grad else orig,
        has_grad=has_grad,
        trainable=bool(fsdp_param.sharded_param.requires_grad),
        is_made=fsdp_param.is_extended,
        n_inputs=len(fsdp_param.inputs),
    )
