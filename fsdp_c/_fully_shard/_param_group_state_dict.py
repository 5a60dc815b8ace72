"""State dicts of a unit: they show shards, whatever stands in the modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_c._fully_shard import _param_attributes
from fsdp_c._fully_shard._param_group_attributes import GroupAttributes


def show_shards(group: Any) -> None:
    """In the unit's modules, as before a state_dict; of torch's own units too."""
    (group._before_state_dict if isinstance(group, StateDictGroup) else group._to_sharded)()


class StateDictGroup(GroupAttributes):
    """The hooks on the unit's modules, in the place of torch's."""

    is_summoned = False  # unsharded, and other tensors stand where its parameters were

    def _register_state_dict_hooks(self) -> None:
        is_new = not self._module_to_pre_save_state_dict_hook_handle
        super()._register_state_dict_hooks()
        if is_new:
            for module, handle in self._module_to_pre_save_state_dict_hook_handle.items():
                handle.remove()
                self._module_to_pre_save_state_dict_hook_handle[module] = (
                    module.register_state_dict_pre_hook(self._before_state_dict)
                )
                self._post_save_state_dict_hook_handles.append(
                    module._register_state_dict_hook(self._put_shards)
                )
            for module, handle in self._module_to_pre_load_state_dict_hook_handle.items():
                handle.remove()
                self._module_to_pre_load_state_dict_hook_handle[module] = (
                    module._register_load_state_dict_pre_hook(self._before_load)
                )

    def remove_state_dict_hooks(self) -> None:
        """For good."""
        handles: list[Any] = [*self._post_save_state_dict_hook_handles]
        for by_module in (
            self._module_to_pre_save_state_dict_hook_handle,
            self._module_to_pre_load_state_dict_hook_handle,
        ):
            handles.extend(by_module.values())
            by_module.clear()
        self._post_save_state_dict_hook_handles.clear()
        for handle in handles:
            handle.remove()

    def _before_state_dict(self, *_: Any) -> None:
        if self.is_summoned:  # what stands in the modules now is to be saved
            return
        # Slices over messages stay: a rank that saves alone would gather between other ranks.
        if self._is_bound and not (self._core_has_slices and self._binding.smaller):  # type: ignore[union-attr]
            self._to_sharded()

    def _before_load(self, *_: Any) -> None:
        self._core_count_load()  # all ranks load: what was gathered is out of date
        self._to_sharded()

    def _put_shards(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """After a module's state_dict: shards in place of parameters that are unsharded now.

        Copies in place of summoned ones, since their memory is the unit's.
        """
        if not (self.is_unsharded or self.is_sharded_post_forward):
            return
        for fsdp_param in self.fsdp_params:
            for owner, name in _param_attributes.registrations(fsdp_param):
                if owner is not module or (found := state.get(prefix + name)) is None:
                    continue
                if not self.is_summoned:
                    shard = fsdp_param.sharded_param
                    state[prefix + name] = shard if found.requires_grad else shard.detach()
                elif not found.requires_grad:
                    state[prefix + name] = found.clone()
