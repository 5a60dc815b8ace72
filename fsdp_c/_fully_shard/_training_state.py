"""Where a unit and its state are in a step, in torch's words."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

# In the order of the core's enum fc_training.
_STATES = (
    TrainingState.FORWARD,
    TrainingState.PRE_BACKWARD,
    TrainingState.POST_BACKWARD,
    TrainingState.IDLE,
)


def _get(owner: Any) -> TrainingState:
    return _STATES[owner._training]


def _set(owner: Any, state: TrainingState) -> None:
    owner._training = _STATES.index(state)


training_state = property(_get, _set)  # of an object of the core's that has `_training`
