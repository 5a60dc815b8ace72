"""Attributes of torch's FSDPParamGroup: what the core answers, and who sets what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from fsdp_c import _env
from fsdp_c._comm import _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import _fqns, _replaced_functions
from fsdp_c._fully_shard._param_group_visible import VisibleGroup
from fsdp_c._fully_shard._training_state import training_state

# Attributes that hold collectives; in the order of _compat.default_comms().
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")
_SEEN = {"_all_reduce_hook", *_COMMS}  # what may look at the unit's collectives
_CALLED = _replaced_functions.CALLED_METHODS
_UNCALLED = _replaced_functions.GROUP_METHODS - _CALLED
# What the next forward looks at.
_LOOKED_AT = _SEEN | _versions.LAYOUT_FUNCTIONS.keys()


@contextmanager
def partial_sums_hidden(groups: Sequence[GroupAttributes]) -> Iterator[None]:
    """Inside, `_partial_reduce_output` of the units is None."""
    for group in groups:
        group._hides_partial_sums = True
    try:
        yield
    finally:
        for group in groups:
            group._hides_partial_sums = False


class GroupAttributes(VisibleGroup):
    """What code outside of the package reads and sets on a unit, as torch spells it."""

    _hides_partial_sums = False
    _separate_group: Any = None  # that reductions had of their own

    # ---- state ----

    _training_state = training_state

    @property
    def _sharded_state(self) -> ShardedState:
        if self._is_bound:
            if self._core_is_unsharded:
                return ShardedState.UNSHARDED
            if self._core_has_slices:
                return ShardedState.SHARDED_POST_FORWARD
            return ShardedState.SHARDED
        return self.__dict__["_sharded_state"]

    @_sharded_state.setter
    def _sharded_state(self, state: ShardedState) -> None:
        self.__dict__["_sharded_state"] = state

    @property
    def _all_gather_result(self) -> Any:
        """Not None while an unshard waits to be waited for."""
        if self._is_bound:
            return self if self._core_is_pending else None
        return self.__dict__["_all_gather_result"]

    @_all_gather_result.setter
    def _all_gather_result(self, result: Any) -> None:
        self.__dict__["_all_gather_result"] = result

    @property
    def _partial_reduce_output(self) -> Any:
        """Averages over shards that the replicas have not seen: a copy, laid out as torch's.

        On a device only whether there are any can be seen. None drops them.
        """
        if not self._is_bound:
            return self.__dict__["_partial_reduce_output"]
        if self._hides_partial_sums or not self._core_has_partial_sums:
            return None
        parts = [
            torch.nn.functional.pad(part, (0, p.padded_sharded_param_size.numel() - part.numel()))
            for p, part in zip(self.fsdp_params, self._core_partial_sums(), strict=True)
            if part is not None
        ]
        divisor = self.gradient_divide_factor or getattr(self.mesh_info, "shard_mesh_size", 1)
        return torch.cat(parts) / divisor if parts else self

    @_partial_reduce_output.setter
    def _partial_reduce_output(self, output: Any) -> None:
        if not self._is_bound:
            self.__dict__["_partial_reduce_output"] = output
        elif output is None:
            self._core_drop_partial_sums()
        else:
            raise NotImplementedError(
                f"_partial_reduce_output of FSDP unit '{_fqns.unit_name(self)}' can be read, and"
                " set to None"
            )

    # ---- what others put in ----

    def __setattr__(self, name: str, value: Any) -> None:
        self.refuse_if_torchs()
        if name in _UNCALLED:
            _replaced_functions.refuse(name, f"FSDP unit '{_fqns.unit_name(self)}'")
        if name in _LOOKED_AT and self._core_has_accumulated:
            raise RuntimeError(
                f"{name} of FSDP unit '{_fqns.unit_name(self)}' was set while gradients of"
                " backward passes without synchronization are held: set it before the first of"
                " them, or after the backward that synchronizes"
            )
        if name in _COMMS:
            value = self._checked_comm(name, value)
        super().__setattr__(name, value)
        if name in _CALLED:
            self._core_calls_methods = True
            if self._root is not None:
                self._root.calls_methods = True
        if name in _LOOKED_AT and self._root is not None:
            self._root.look_again()

    def find_replaced(self) -> bool:
        """Whether hooks have to call methods: those of the class may be back."""
        self._core_calls_methods = _replaced_functions.calls_methods(self)
        return self._core_calls_methods

    def _checked_comm(self, name: str, comm: Any) -> Any:
        """A user's collective, or torch's own for None."""
        if comm is None:
            return _versions.default_comms()[_COMMS.index(name)]()
        if not (callable(comm) and callable(getattr(comm, "allocate", None))) and (
            not _env.is_strict()
        ):
            raise TypeError(
                f"{name} of FSDP unit '{_fqns.unit_name(self)}' needs an object with allocate() and"
                f" __call__(), such as a subclass of AllGather or ReduceScatter, not"
                f" {type(comm).__name__}"
            )
        return comm

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        gather = self._all_gather_comm
        try:
            super().set_allocate_memory_from_process_group(enable)
        except AssertionError:
            self._all_gather_comm = gather  # torch's class has switched that one already
            raise

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: Any) -> None:
        """Switched off and on again, the process group is that of before."""
        mesh_info = self.mesh_info
        if enable and self._separate_group is not None:
            mesh_info.reduce_scatter_process_group = self._separate_group
        super()._set_separate_reduce_scatter_group(enable, new_groups)
        if enable:
            self._separate_group = mesh_info.reduce_scatter_process_group
        self.choose_reduce_group()

    def choose_reduce_group(self) -> None:
        """Tells the schedule of a device which process group sums gradients; collective there."""
        if _device.is_taken(self) and not self.visible.reason:  # else it asks the unit
            assert self._binding is not None
            process_group = _device.reduce_group(self)
            _device.connect(self._binding[0].streams, process_group, self)
            self._core_set_reduce_group(_device.name_of(process_group, self))
