"""A unit bound to the core, unbound again, bound anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from fsdp_c._comm import _device
from fsdp_c._compat import _versions
from fsdp_c._fully_shard import (
    _engine_bind,
    _fqns,
    _param_attributes,
    _param_spec,
    _torchs_own,
    _visibility,
)
from fsdp_c._native import _C


class BoundGroup(_C.Group, _versions.TorchGroup):
    """A unit that can be bound to the core, between two steps."""

    _binding: _engine_bind.Binding | None = None
    _bound_layout: list[_param_spec.ParamSpec] | None = None
    _root: _C.Root | None = None
    # Who looks at its collectives, as it is bound and as it is wanted.
    visible = wants_visible = _visibility.Visible()
    in_sight_as = 0  # on a device
    why_torchs = ""  # a unit of torch's own stands in its place

    # ---- binding ----

    def _bind_early(self) -> None:
        """Before the first forward a unit is in no root; collective."""
        self.refuse_if_torchs()
        mine = _torchs_own.why_here([self]) or _torchs_own.why(self)
        if reason := _torchs_own.agreed([self], mine):
            raise RuntimeError(
                f"unshard of FSDP unit '{_fqns.unit_name(self)}': torch's implementation is to run"
                f" it ({reason}), and takes it with the first forward of its root: unshard it after"
                " that"
            )
        _visibility.choose([self])
        self._bind_alone()

    def refuse_if_torchs(self) -> None:
        """RuntimeError if a unit of torch's own stands in its place."""
        if self.why_torchs:
            raise RuntimeError(
                f"FSDP unit '{_fqns.unit_name(self)}' was handed over to torch's implementation"
                f" ({self.why_torchs}): ask its module for the unit that stands in its place"
            )

    def _bind_alone(self) -> None:
        self._root = _C.Root(
            states=[], domains=_engine_bind.bind_units([self]), context=_C.Context()
        )

    def adopt_shards(self) -> None:
        """Finds shards that were replaced, moved or cast since set-up; the unit is bound still."""
        if self._core_is_unsharded:
            self._check_assigned()
        self._core_reshard()
        for fsdp_param in self.fsdp_params:
            info = fsdp_param._module_info
            registered = info.module._parameters.get(info.param_name)
            fsdp_param.check_is_there(f" of FSDP unit '{self._module_fqn}'")
            if not hasattr(registered, "_local_tensor"):
                raise ValueError(
                    f"parameter '{fsdp_param._name}' of FSDP unit '{self._module_fqn}' was"
                    f" replaced by a {type(registered).__name__} that is not sharded: assign a"
                    " DTensor with the parameter's mesh and placements (distribute_tensor), or"
                    " copy into the parameter in place"
                )
            fsdp_param.reset_sharded_param()
        self._init_mp_dtypes()
        if self._core_has_partial_sums and _device.is_taken(self) and self._has_other_layout():
            raise RuntimeError(
                f"shards of FSDP unit '{_fqns.unit_name(self)}' were cast, frozen or are trained"
                " now, while sums of their gradients wait on the device for the replicas: do that"
                " before the first of them, or after the backward that brings replicas together"
            )

    def _check_assigned(self) -> None:
        """Of an unsharded unit: a shard that was not there before takes its place for one forward,
        and who puts back what stood there puts an unsharded parameter back."""
        for fsdp_param in self.fsdp_params:
            info = fsdp_param._module_info
            registered = info.module._parameters.get(info.param_name)
            known = (fsdp_param._unsharded_param, fsdp_param.sharded_param, fsdp_param.former())
            if isinstance(fsdp_param._unsharded_param, DTensor):
                continue  # tensor parallel: it would not be told from a shard
            if hasattr(registered, "_local_tensor") and not any(registered is p for p in known):
                raise RuntimeError(
                    f"parameter '{fsdp_param._name}' of FSDP unit '{self._module_fqn}' was replaced"
                    " while the unit is unsharded, as its last forward has left it: call reshard()"
                    " on its module before"
                )

    def check_partial_sums(self) -> None:
        """Before collectives change; those on a device cannot move to another schedule."""
        if self._core_has_partial_sums and _device.is_taken(self):
            raise RuntimeError(
                f"others look at the collectives of FSDP unit '{_fqns.unit_name(self)}' now, or do"
                " no longer, while sums of its gradients wait on the device for the replicas: begin"
                " and end that before the first of them, or after the backward that brings replicas"
                " together"
            )

    def note_layout(self) -> None:
        self._bound_layout = self._layout()

    def _has_other_layout(self) -> bool:
        return self._layout() != self._bound_layout

    def _layout(self) -> list[_param_spec.ParamSpec]:
        """Frozen parameters are another one on a device alone, where they take no gradients.

        Elsewhere that only orders parts, and ranks differ in whether they find a shard replaced, as
        those of a wrapper are where they are padded: laying them out anew takes all ranks.
        """
        specs = [_param_spec.spec_of(p) for p in self.fsdp_params]
        if not _device.is_taken(self):
            specs = [spec._replace(trainable=True) for spec in specs]
        return specs

    def rebind(self) -> bool:
        """Binds the unit anew to what `adopt_shards` has found; held gradients go along.

        Returns whether the layout changed, in which case the unit is left unbound.
        """
        if self._has_other_layout():
            self._set_aside()
            return True
        assert self._binding is not None
        _engine_bind.bind_unit(self, self._binding)
        return False

    def _adopt_replaced_shards(self) -> None:
        """Outside of a step shards that were replaced since set-up count from here on."""
        if self._core_in_phase or self._core_is_unsharded or self._core_is_intact:
            return
        assert self._root is not None
        root = next((state for state in self._root.states if state._is_root), None)
        if root is not None:
            root._rebuild_units()
            return
        self.adopt_shards()
        if self.rebind():  # before the first forward a unit stands alone
            self._bind_alone()

    def find_replaced_shards(self) -> None:
        """Those that a forward on the core would take from here on."""
        if self._is_bound and not self._core_is_unsharded and not self._core_is_intact:
            self.adopt_shards()

    def unbind(self, keeps_values: bool = False) -> None:
        """Leaves the core, sharded; the values of unsharded parameters may be kept beside."""
        if keeps_values and self._is_bound and self._core_is_unsharded:
            for fsdp_param in self.fsdp_params:
                fsdp_param.keep_values()
        self._unbind()
        self._binding = self._root = None
        self._sharded_state = ShardedState.SHARDED
        for fsdp_param in self.fsdp_params:
            fsdp_param.unit = None
            fsdp_param.sharded_state = ShardedState.SHARDED

    def leave_early_binding(self) -> Callable[[], None]:
        """A unit that was unsharded before the first forward joins the schedule of its root, or
        gets other collectives.

        What is returned brings it there as it was.
        """
        has_changed = self._is_bound and self.wants_visible != self.visible
        if not (_device.is_taken(self) or has_changed):
            return lambda: None
        restore = self.remember_unsharded()
        self._unbind()
        self._binding = self._root = None
        return restore

    def remember_unsharded(self) -> Callable[[], None]:
        """What is returned makes the unit, bound anew, as unsharded and as written as now."""
        is_unsharded, is_kept = self._core_is_unsharded, self._core_is_kept_after_forward
        is_asked = is_unsharded or self._core_is_pending
        before = [p.__dict__.get("_unsharded_param") for p in self.fsdp_params]
        # Perhaps written since.
        values = [old.detach().clone() for old in before] if is_unsharded else []

        def restore() -> None:
            if is_asked:
                self._core_unshard_async()
            if is_unsharded:
                self._core_unshard()
            now = [p.__dict__.get("_unsharded_param") for p in self.fsdp_params]
            for param, old in zip(now, before, strict=True):
                if param is not None and old is not None:
                    _param_attributes.share_hooks(old, param)
            for param, value in zip(now, values, strict=False):
                if not torch.equal(param.detach(), value):
                    param.detach().copy_(value)
            before.clear()
            values.clear()
            if is_kept:
                self._core_keep_after_forward()

        return restore
