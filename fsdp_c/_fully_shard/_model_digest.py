"""Whether ranks built the same model: a few values of each parameter, compared at set-up.

fully_shard sees full parameters. Ranks whose seeds differed would each keep a part of another
model. What was written or replaced since, by a checkpoint or an initialization, does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._fully_shard import _fsdp_module

_N_VALUES = 16  # of a parameter, evenly spread
_WORD = 16  # hex digits that stand for them


class Origin:
    """Values of a parameter as it came to fully_shard, and of its shard as that left it."""

    def __init__(self, full: Tensor, shard: Any, of_shard: Tensor) -> None:
        self.full = full
        self.shard = shard
        self.of_shard = of_shard
        self.versions = _versions_of(shard)

    def word(self, shard: Any) -> str:
        """Stands for the whole parameter's values; empty if the shard was written since."""
        if shard is not self.shard or _versions_of(shard) != self.versions:
            return ""
        now = sample(shard._local_tensor)
        if now is None or _bytes_of(now) != _bytes_of(self.of_shard):  # as `param.data` does
            return ""
        return hashlib.sha256(_bytes_of(self.full)).hexdigest()[:_WORD]


def sample(tensor: Tensor) -> Tensor | None:
    """A copy of a few of its values; None if there are none, or nobody should look."""
    tensor = tensor.detach()
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.numel() == 0 or tensor.is_inference():
        return None
    if torch._C._len_torch_dispatch_stack() != 0 or not _is_dense(tensor):
        return None
    n_values = min(_N_VALUES, tensor.numel())
    step = tensor.numel() // n_values
    return tensor.as_strided((n_values,), (step,)).clone()


def origin_of(full: Tensor | None, shard: Any) -> Origin | None:
    """To be kept until set-up, with a sample of the parameter before it was cut."""
    local = getattr(shard, "_local_tensor", None)
    of_shard = None if full is None or local is None else sample(local)
    return None if full is None or of_shard is None else Origin(full, shard, of_shard)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride)[::-1]).is_contiguous()


def _versions_of(shard: Any) -> tuple[int, int]:
    return shard._version, shard._local_tensor._version


def _bytes_of(values: Tensor) -> bytes:
    return bytes(values.view(torch.uint8).tolist())


# ---- at set-up ----


def words_of(fsdp_params: Sequence[Any]) -> list[str]:
    """For each parameter what stands for its first values; empty where they do not count."""
    return [p.origin.word(p.sharded_param) if p.origin is not None else "" for p in fsdp_params]


def forget(fsdp_params: Sequence[Any]) -> None:
    for fsdp_param in fsdp_params:
        fsdp_param.origin = None


def digest_of(words: Sequence[str]) -> bytes:
    return hashlib.sha256(json.dumps(words).encode()).digest()


def compare(
    exchange: Callable[[str, bytes], list[bytes]],
    words: Sequence[str],
    names: Sequence[str],
    ranks: Sequence[int],
) -> None:
    """Warns of parameters whose first values were different; collective.

    `names` say what each word stands for, `ranks` are those that exchange words.
    """
    answers = exchange("initial values", json.dumps(words).encode())
    models = [json.loads(answer) for answer in answers]
    if any(len(model) != len(names) for model in models):
        return  # an error of its own
    different = []  # (parameter, two ranks)
    for i, name in enumerate(names):
        known = [(model[i], rank) for model, rank in zip(models, ranks, strict=True) if model[i]]
        others = [rank for word, rank in known if word != known[0][0]]
        if others:
            different.append((name, known[0][1], others[0]))
    if different:
        name, first, other = different[0]
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        _fsdp_module.warn_user(
            f"ranks built different models: parameter '{name}'{more} came to fully_shard with"
            f" other values on rank {other} than on rank {first}, and what is trained is a mix of"
            " them. Call torch.manual_seed() with the same number on all ranks before the model is"
            " built, or load a checkpoint into the sharded model before its first forward."
            " sync=True of shard(), sync_module_states=True of FSDP1 send rank 0's values to all"
        )
