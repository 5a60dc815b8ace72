"""What malloc keeps on its heap, in this process."""

from __future__ import annotations

from fsdp_c import _env
from fsdp_c._native import _C


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
            _C.Domain.set_heap(threshold, 0)
            self.is_set = True

    def prepare_for_core(self) -> None:
        self.serves_core = True
        self.prepare_for_shards()
        _C.Domain.trim_heap()

    def prepare_for_fallback(self) -> None:
        if self.is_set and not self.serves_core:
            _C.Domain.set_heap(*self.LEARNED)


HEAP = _Heap()
