"""Evaluates settings: traces, memory, traffic and time put together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_c._estimate import _memory, _time, _trace, _volume
from fsdp_c._estimate._result import Estimate
from fsdp_c._estimate._setting import Setting
from fsdp_c.strategy import find_units


class Estimator:
    """Evaluates settings of one model, and traces each kind of step once."""

    def __init__(self) -> None:
        self._traces: dict[Any, _trace.Trace] = {}

    def evaluate(self, setting: Setting) -> Estimate:
        modules = list(find_units(setting.model, setting.units))
        n_shards, n_replicas = setting.n_shards, setting.n_replicas
        checkpointed = setting.checkpointed(modules)
        again = () if setting.hardware.engine == "core" else checkpointed
        trace = self._traced(setting, modules, checkpointed)
        units = _volume.units_of(
            setting.model, modules, setting.policy, n_shards, setting.stored, again, trace
        )
        hardware = setting.hardware
        memory = _memory.memory_of(
            hardware.engine,
            setting.model,
            units,
            setting.strategy,
            n_shards,
            n_replicas,
            setting.per_host,
            setting.optimizer,
            trace,
            setting.offload,
        )
        compute = setting.compute or _main_dtype(setting.model)
        traffic = _volume.traffic_of(
            units,
            hardware.engine,
            setting.strategy,
            n_shards,
            n_replicas,
            setting.micro_batches,
            per_host=setting.per_host,
        )
        times = _time.times_of(
            trace.segments,
            units,
            setting.strategy,
            _time.World(hardware, n_shards, n_replicas, setting.per_host),
            _volume.dtype_name(compute),
            memory.state,
            setting.micro_batches,
            setting.offload,
            sum(one.sent for one in traffic),
        )
        per_rank = hardware.memory / (setting.per_host if hardware.engine == "core" else 1)
        return Estimate(
            setting,
            sum(param.numel() for param in setting.model.parameters()),
            len(units),
            memory.device,
            memory.host,
            int(per_rank),
            traffic,
            times,
            self._traced(setting, modules, []).flops * setting.micro_batches,
            memory.notes,
        )

    def _traced(
        self, setting: Setting, units: list[nn.Module], checkpointed: list[nn.Module]
    ) -> _trace.Trace:
        rules = _memory.rules_of(
            setting.hardware.engine,
            setting.strategy,
            setting.n_shards,
            setting.compute,
            setting.micro_batches > 1,
        )
        key = rules, setting.batch, tuple(map(id, units)), tuple(map(id, checkpointed))
        if key not in self._traces:
            self._traces[key] = _trace.trace_step(
                setting.model, setting.inputs, setting.loss, units, rules, checkpointed
            )
        return self._traces[key]


def _main_dtype(model: nn.Module) -> torch.dtype:
    largest = max(model.parameters(), key=torch.Tensor.numel, default=None)
    return torch.float32 if largest is None else largest.dtype
