"""A unit whose collectives others look at: who does, and what it gathers ahead, as torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_c._fully_shard._param_group_binding import BoundGroup


class VisibleGroup(BoundGroup):
    """See `_visibility` for who looks."""

    # The gather that is being made was asked for by unshard(async_op=True).
    gathers_async = False
    # Units to gather behind this one, as the user has named them: in forward, in backward.
    named_prefetches: tuple[Sequence[Any], Sequence[Any]] = ((), ())

    def _note_forward(self) -> None:
        """The unit's forward has ended; a backward gathers units in the opposite order."""
        assert self._root is not None
        order = self.comm_ctx.__dict__.setdefault("forwards_of", [0, []])
        if order[0] != self._root.backward:
            order[:] = self._root.backward, []
        order[1].append(self)

    def _prefetch_in_forward(self) -> None:
        for group in self.named_prefetches[False]:
            group._core_unshard_async()

    def _prefetch_in_backward(self) -> None:
        groups = self.named_prefetches[True] or self._before_in_forward()
        for group in groups:
            if group.unshard_in_backward:
                group._core_unshard_async()

    def _before_in_forward(self) -> Sequence[Any]:
        backward, order = self.comm_ctx.__dict__.get("forwards_of", (0, []))
        if self._root is None or backward != self._root.backward:
            return ()
        while order and order.pop() is not self:
            pass
        return order[-1:]
