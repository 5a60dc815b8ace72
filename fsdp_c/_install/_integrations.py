"""Lets accelerate (with it the Trainer) and Lightning shard on CPU ranks, which they rule out."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_c._install import _import_hook

_ORIGINAL = "_fsdp_c_original"  # attribute of a replaced method
_has_fsdp1 = False


def watch(fsdp1: bool) -> None:
    """From now on their FSDP plugins and strategies work on CPU ranks; FSDP1's with `fsdp1`."""
    global _has_fsdp1
    stop()
    _has_fsdp1 = fsdp1
    for name, cure in _CURES.items():
        _import_hook.when_loaded(name, cure)


def stop() -> None:
    """Undoes `watch`."""
    for name, cure in _CURES.items():
        _import_hook.forget(cure)
        cls = getattr(sys.modules.get(name), cure.cls, None)
        original = getattr(getattr(cls, cure.method, None), _ORIGINAL, None)
        if original is not None:
            setattr(cls, cure.method, original)


@dataclass(frozen=True, eq=False)
class _Cure:
    """Called with a module: puts a function around a method, which gets module and original."""

    cls: str
    method: str
    around: Callable[..., None]

    def __call__(self, module: Any) -> None:
        cls = getattr(module, self.cls)
        original = getattr(cls, self.method)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> None:
            self.around(module, original, *args, **options)

        setattr(call, _ORIGINAL, original)
        setattr(cls, self.method, call)


def _accelerator_state(module: Any, original: Any, self: Any, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    plugin = options.get("fsdp_plugin")
    if plugin is not None and self.distributed_type == module.DistributedType.MULTI_CPU:
        _choose_fsdp(module, self, plugin)


def _choose_fsdp(module: Any, state: Any, plugin: Any) -> None:
    """What AcceleratorState does itself for all but CPU ranks."""
    if plugin.fsdp_version == 1 and not _has_fsdp1:
        warnings.warn(
            "accelerate's FSDP plugin of version 1 is not used on CPU ranks, DDP takes its place:"
            " start with `-m fsdp_c --fsdp1`, or set fsdp_version to 2",
            stacklevel=5,
        )
        return
    state.distributed_type = module.DistributedType.FSDP
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin
    module.PartialState._shared_state["distributed_type"] = state.distributed_type


def _plugin(module: Any, original: Any, self: Any) -> None:
    try:
        original(self)
    except RuntimeError as error:
        if not (self.sync_module_states and "no available devices" in str(error)):
            raise
        # The last thing that it does: meta parameters get memory on a device of its list.
        self.param_init_fn = lambda part: part.to_empty(device="cpu", recurse=False)


def _connector(module: Any, original: Any, self: Any) -> None:
    try:
        original(self)
    except ValueError as error:
        # Lightning's FSDPStrategy asks for a GPU by name; it works without.
        if not (_has_fsdp1 and "FSDP" in str(error) and "GPU" in str(error)):
            raise


_LIGHTNING = "trainer.connectors.accelerator_connector"
_CHECK = "_check_strategy_and_fallback"
_CURES = {
    "accelerate.state": _Cure("AcceleratorState", "__init__", _accelerator_state),
    "accelerate.utils.dataclasses": _Cure(
        "FullyShardedDataParallelPlugin", "__post_init__", _plugin
    ),
    f"lightning.pytorch.{_LIGHTNING}": _Cure("_AcceleratorConnector", _CHECK, _connector),
    f"pytorch_lightning.{_LIGHTNING}": _Cure("_AcceleratorConnector", _CHECK, _connector),
    "lightning.fabric.connector": _Cure("_Connector", _CHECK, _connector),
    "lightning_fabric.connector": _Cure("_Connector", _CHECK, _connector),
}
