"""Whether ranks call fully_shard with the same model: units, dtypes, and first values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_c._comm import _agreement, _process_group, _rendezvous
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _model_digest
from fsdp_c._fully_shard._param_spec import gradient_dtypes


def _describe(groups: Sequence[Any]) -> list[list[str]]:
    """One line per parameter: unit, name, size, dtypes, what its policy does, the divide factor."""
    lines = []
    for group in groups:
        for fsdp_param in group.fsdp_params:
            compute = _versions.compute_dtype(fsdp_param)
            reduce, grad = gradient_dtypes(fsdp_param)
            policy = fsdp_param.mp_policy
            lines.append(
                [
                    _fqns.unit_name(group),
                    fsdp_param._module_info.param_name,
                    f"size {tuple(fsdp_param._orig_size)}, {fsdp_param.fsdp_placement}",
                    f"parameter {fsdp_param.orig_dtype}, compute {compute}, reduce {reduce},"
                    f" gradient {grad}, output_dtype {policy.output_dtype},"
                    f" cast_forward_inputs {policy.cast_forward_inputs},"
                    f" divide factor {group.gradient_divide_factor}",
                    "trainable" if fsdp_param.sharded_param.requires_grad else "frozen",
                ]
            )
    return lines


def check(process_group: dist.ProcessGroup, groups: Sequence[Any]) -> None:
    """RuntimeError on every rank, naming the first difference, unless all have the same units."""
    exchange = _rendezvous.exchange_for(process_group)
    if exchange is None:
        return
    mine = json.dumps(_describe(groups)).encode()
    words = _model_digest.words_of(params_of(groups))
    digest = hashlib.sha256(mine).digest()
    digests = exchange("model", digest + _model_digest.digest_of(words))
    if len(set(digests)) == 1:
        return
    if len({other[: len(digest)] for other in digests}) == 1:
        _compare_origins(process_group, groups, words)
        return
    models = [json.loads(text) for text in exchange("model in full", mine)]
    ranks = _process_group.global_ranks(process_group)
    other = next(r for r in range(len(models)) if models[r] != models[0])
    ours, theirs = models[0], models[other]
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            difference = (
                f"rank {ranks[0]} has '{a[1]}' of unit '{a[0]}' ({', '.join(a[2:])}) where rank"
                f" {ranks[other]} has '{b[1]}' of unit '{b[0]}' ({', '.join(b[2:])})"
            )
            break
    else:
        longer, extra = (0, ours) if len(ours) > len(theirs) else (other, theirs)
        unit, name = extra[min(len(ours), len(theirs))][:2]
        difference = (
            f"rank {ranks[0]} shards {len(ours)} parameters and rank {ranks[other]} {len(theirs)};"
            f" only rank {ranks[longer]} has '{name}' of unit '{unit}'"
        )
    raise RuntimeError(
        f"ranks call fully_shard with different models: {difference}. Build the same model, with"
        " the same policies and the same parameters frozen, on every rank"
    )


def params_of(groups: Sequence[Any]) -> list[Any]:
    return [fsdp_param for group in groups for fsdp_param in group.fsdp_params]


def _compare_origins(
    process_group: dist.ProcessGroup, groups: Sequence[Any], words: Sequence[str]
) -> None:
    exchange = _rendezvous.exchange_for(process_group)
    if exchange is not None:
        infos = [(p._param_fqn, p._module_info.param_name) for p in params_of(groups)]
        names = [_fqns.clean(full or name) for full, name in infos]
        _model_digest.compare(exchange, words, names, _process_group.global_ranks(process_group))


def check_origins(groups: Sequence[Any]) -> None:
    """For torch's implementation: warns if ranks built different models. Collective."""
    of = _agreement.process_groups_of
    for process_group in of([group.mesh_info for group in groups]):
        members = [g for g in groups if process_group in of([g.mesh_info])]
        _compare_origins(process_group, members, _model_digest.words_of(params_of(members)))
    _model_digest.forget(params_of(groups))
