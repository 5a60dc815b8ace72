"""What malloc keeps on its heap, in this process."""

from __future__ import annotations

import ctypes

from fsdp_c import _env

_LIBC = ctypes.CDLL(None)
# mallopt's, in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def trim() -> None:
    """Gives back what set-up freed: shards that moved, placeholders of unsharded parameters."""
    _LIBC.malloc_trim(0)


def _set(largest: int, slack: int) -> None:
    """Allocations of `largest` bytes and more stay off the heap, which keeps up to `slack` free
    bytes at its end (0: no change).

    glibc's aligned allocation cannot reuse a hole of exactly the size asked for, so a heap of large
    gradients grows with every unit.
    """
    _LIBC.mallopt(_MMAP_THRESHOLD, largest)
    if slack > 0:
        _LIBC.mallopt(_TRIM_THRESHOLD, slack)


class _Heap:
    """Large shards and gradients of the core leave holes there. torch's implementation
    allocates what it gathers in each step, and would pay for new pages each time.
    """

    # What glibc's own, moving thresholds end at (DEFAULT_MMAP_THRESHOLD_MAX, and twice that).
    LEARNED = (32 << 20, 64 << 20)

    def __init__(self) -> None:
        self.is_set = self.serves_core = False

    def prepare_for_shards(self) -> None:
        """Shards leave the heap again when they move to shared memory."""
        if threshold := _env.mmap_threshold():
            _set(threshold, 0)
            self.is_set = True

    def prepare_for_core(self) -> None:
        self.serves_core = True
        self.prepare_for_shards()
        trim()

    def prepare_for_torch(self) -> None:
        if self.is_set and not self.serves_core:
            _set(*self.LEARNED)


HEAP = _Heap()
