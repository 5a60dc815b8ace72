"""Which tensors share a collective."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


def check(bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")


def fill(
    kinds: Iterable[Hashable], sizes: Sequence[int], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Indices of tensors in order; those of one bucket are of one kind.

    A bucket closes before it would exceed its bytes; a larger tensor has one of its own.
    """
    full: list[tuple[int, ...]] = []
    opened: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        members, held = opened.get(kind, ([], 0))
        if members and held + size > bucket_bytes:
            full.append(tuple(members))
            members, held = [], 0
        opened[kind] = [*members, index], held + size
    return [*full, *(tuple(members) for members, _ in opened.values())]
