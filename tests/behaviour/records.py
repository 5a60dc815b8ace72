"""Records what a piece of code does: its collectives, or the calls of chosen functions."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# What torch's implementation calls, by short name.
NAMES = {
    "all_gather_single": "AG",
    "reduce_scatter_single": "RS",
    "all_reduce": "AR",
}


@contextlib.contextmanager
def collectives(sizes: bool = False) -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """The collectives that torch's implementation issues: name, dtype and ranks in the group.

    With `sizes`, elements of the output in place of the ranks.
    """
    seen: list[tuple[str, torch.dtype, int]] = []
    originals = {name: getattr(dist, name) for name in NAMES}

    def record(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs.get("output", kwargs.get("output_tensor"))
            tensor = kwargs["tensor"] if tensor is None else tensor
            group = kwargs.get("group") or dist.group.WORLD
            seen.append((NAMES[name], tensor.dtype, tensor.numel() if sizes else group.size()))
            return originals[name](*args, **kwargs)

        return call

    for name in NAMES:
        setattr(dist, name, record(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def names(seen: list[tuple[str, torch.dtype, int]]) -> list[str]:
    return [name for name, _, _ in seen]
