"""What is changed in accelerate and Lightning, on stand-ins: FSDP counts on CPU ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdp_c._install import _import_hook, _integrations

STATE = """
import enum

class DistributedType(enum.Enum):
    NO, MULTI_CPU, FSDP = range(3)

class PartialState:
    _shared_state = {}

class AcceleratorState:
    def __init__(self, mixed_precision=None, kind=DistributedType.MULTI_CPU, fsdp_plugin=None):
        self.distributed_type = kind
        self._mixed_precision = mixed_precision or "no"
"""

PLUGIN = """
class FullyShardedDataParallelPlugin:
    def __init__(self, message, sync_module_states=True):
        self.message = message
        self.sync_module_states = sync_module_states
        self.__post_init__()

    def __post_init__(self):
        self.param_init_fn = None
        if self.message:
            raise RuntimeError(self.message)
"""

CONNECTOR = """
class _Connector:
    def _check_strategy_and_fallback(self):
        raise ValueError(self.message)
"""


def is_stand_in(name: str) -> bool:
    return name.split(".")[0] in ("accelerate", "lightning_fabric")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the module, freshly."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "utils").mkdir()
    for folder in ("accelerate", "accelerate/utils"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "accelerate" / "utils" / "dataclasses.py").write_text(PLUGIN)
    (tmp_path / "accelerate" / "state.py").write_text(STATE)
    (tmp_path / "lightning_fabric").mkdir()
    (tmp_path / "lightning_fabric" / "connector.py").write_text(CONNECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_stand_in(name)}

    def load() -> Any:
        import accelerate.state  # type: ignore[import-not-found]
        import accelerate.utils.dataclasses  # type: ignore[import-not-found]
        import lightning_fabric.connector  # type: ignore[import-not-found] # noqa: F401

        return accelerate.state

    yield load
    _integrations.stop()
    for name in filter(is_stand_in, list(sys.modules)):
        del sys.modules[name]
    sys.modules.update(before)


def plugin(version: int) -> SimpleNamespace:
    made = SimpleNamespace(fsdp_version=version, precision=None)
    made.set_mixed_precision = lambda value: setattr(made, "precision", value)
    return made


@pytest.mark.parametrize("is_loaded", [False, True])
def test_plugins_count_on_cpu_ranks(state: Any, is_loaded: bool) -> None:
    if is_loaded:
        state()
    _integrations.watch(fsdp1=False)
    _integrations.watch(fsdp1=False)
    module = state()
    kinds = module.DistributedType
    second = plugin(2)
    made = module.AcceleratorState("bf16", fsdp_plugin=second)
    assert made.distributed_type is kinds.FSDP and made.fsdp_plugin is second
    assert second.precision == "bf16"
    assert module.PartialState._shared_state == {"distributed_type": kinds.FSDP}
    assert module.AcceleratorState().distributed_type is kinds.MULTI_CPU
    alone = module.AcceleratorState(kind=kinds.NO, fsdp_plugin=second)
    assert alone.distributed_type is kinds.NO
    with pytest.warns(UserWarning, match="--fsdp1"):
        made = module.AcceleratorState(fsdp_plugin=plugin(1))
    assert made.distributed_type is kinds.MULTI_CPU
    _integrations.watch(fsdp1=True)
    assert module.AcceleratorState(fsdp_plugin=plugin(1)).distributed_type is kinds.FSDP
    _integrations.stop()
    assert module.AcceleratorState(fsdp_plugin=second).distributed_type is kinds.MULTI_CPU


def test_stopped_before_the_import(state: Any) -> None:
    _integrations.watch(fsdp1=True)
    _integrations.stop()
    assert not [f for f in sys.meta_path if isinstance(f, _import_hook._Finder)]
    module = state()
    made = module.AcceleratorState(fsdp_plugin=plugin(2))
    assert made.distributed_type is module.DistributedType.MULTI_CPU


def test_plugins_without_a_device(state: Any) -> None:
    _integrations.watch(fsdp1=True)
    state()
    cls = sys.modules["accelerate.utils.dataclasses"].FullyShardedDataParallelPlugin
    layer = nn.Linear(2, 2, device="meta")
    cls("There are currently no available devices found").param_init_fn(layer)
    assert layer.weight.device.type == "cpu"
    assert cls("").param_init_fn is None
    for message, syncs in (("something else", True), ("no available devices", False)):
        with pytest.raises(RuntimeError, match=message):
            cls(message, syncs)
    _integrations.stop()
    with pytest.raises(RuntimeError, match="devices"):
        cls("no available devices")


def test_lightnings_check(state: Any) -> None:
    message = "You selected the FSDP strategy but FSDP is only available on GPU."
    for fsdp1 in (True, False):
        _integrations.watch(fsdp1)
        state()
        connector = sys.modules["lightning_fabric.connector"]._Connector()
        connector.message = message
        if fsdp1:
            connector._check_strategy_and_fallback()
        else:
            with pytest.raises(ValueError, match="FSDP"):
                connector._check_strategy_and_fallback()
    connector.message = "another"
    with pytest.raises(ValueError, match="another"):
        connector._check_strategy_and_fallback()
