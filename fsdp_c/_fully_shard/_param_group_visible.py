"""A unit whose collectives or methods others look at: who does, what it gathers ahead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_c._fully_shard._param_group_binding import BoundGroup
from fsdp_c._native import _C


class _ForwardOrder:
    """Units as their forwards came whose backward is still to come, of all roots that share a
    context. As torch's ``post_forward_order`` it is over when a backward of one of them is."""

    def __init__(self) -> None:
        self.number = 0  # grows with each that is over
        self.groups: list[Any] = []
        self._backwards: dict[_C.Root, int] = {}  # which one each root was in then

    def append(self, group: Any, root: _C.Root) -> tuple[int, int]:
        """The order's number, and the place in it."""
        if self.is_over():
            self.number += 1
            self.groups = []
            self._backwards = {}
        self._backwards.setdefault(root, root.backward)
        self.groups.append(group)
        return self.number, len(self.groups) - 1

    def is_over(self) -> bool:
        return any(root.backward != backward for root, backward in self._backwards.items())


class VisibleGroup(BoundGroup):
    """See `_visibility` for who looks."""

    # The gather that is being made was asked for by unshard(async_op=True).
    gathers_async = False
    # Units to gather behind this one, as the user has named them: in forward, in backward.
    named_prefetches: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    # In which order, and as the how-manieth: forwards whose backward is still to come.
    _forwards: tuple[tuple[int, int], ...] = ()

    def _note_forward(self) -> None:
        """The unit's forward has ended; a backward gathers units in the opposite order."""
        assert self._root is not None
        order = self.comm_ctx.__dict__.setdefault("forward_order", _ForwardOrder())
        place = order.append(self, self._root)
        known = tuple(entry for entry in self._forwards if entry[0] == order.number)
        self._forwards = (*known, place)

    def _is_last_of_unit(self) -> bool:
        return self._param_group_index == self._num_param_groups - 1

    def _gather_ahead(self, state: TrainingState) -> None:
        # Over messages a rank whose methods nobody has replaced would not gather ahead.
        if self._core_calls_methods and (self._core_is_mapped or self.visible.reason):
            with self.use_training_state(state):
                self.unshard(self.unshard_async_op)
        elif self.visible.reason:  # else nothing moves, and nobody sees it
            self._core_unshard_async()

    def _prefetch_in_forward(self) -> None:
        for group in self.named_prefetches[False] if self._is_last_of_unit() else ():
            group._gather_ahead(TrainingState.FORWARD)

    def _prefetch_in_backward(self) -> None:
        before = self._before_in_forward()
        if named := self.named_prefetches[True]:
            before = named if self._is_last_of_unit() else ()
        for group in before:
            if group.unshard_in_backward:
                group._gather_ahead(TrainingState.PRE_BACKWARD)

    def _before_in_forward(self) -> Sequence[Any]:
        """The groups of the unit before this one; of several groups the second one asks."""
        order = self.comm_ctx.__dict__.get("forward_order")
        if self._root is None or order is None or order.is_over() or not self._forwards:
            return ()
        *others, (number, at) = self._forwards
        self._forwards = tuple(others)
        if number != order.number or self._num_param_groups > 1 and self._param_group_index != 1:
            return ()
        before = [group for group in order.groups[:at] if group.modules is not self.modules]
        if self._num_param_groups == 1:
            return order.groups[at - 1 : at]
        same = itertools.takewhile(lambda g: g.modules is before[-1].modules, reversed(before))
        return list(same)
