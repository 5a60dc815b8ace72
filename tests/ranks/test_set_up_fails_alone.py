"""Set-up that fails on one rank alone, when all have met: all raise, and the next forward works."""

from typing import Any
from unittest import mock

import pytest
from callback_net import CallbackNet, sharded
from harness import run_ranks
from snapshots import Net, batch, check_trains

import fsdp_c
from fsdp_c._fully_shard import _engine_bind


def fails_once(rank: int, n_ranks: int, where: str) -> None:
    net = sharded(CallbackNet(lambda here: None))
    owner, name = (
        (_engine_bind, "bind_unit") if where == "unit" else (type(net._get_fsdp_state()), "_join")
    )
    original = getattr(owner, name)
    armed = [rank == n_ranks - 1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        if armed[0]:
            armed[0] = False
            raise MemoryError("no memory for this")

    with mock.patch.object(owner, name, failing):
        error = MemoryError if rank == n_ranks - 1 else RuntimeError
        with pytest.raises(error, match="no memory for this") as raised:
            net(batch(rank))
    if rank != n_ranks - 1:
        assert f"rank {n_ranks - 1}: " in str(raised.value)
    check_trains(net, Net())
    assert fsdp_c.explain(net).units[0].road.startswith("core")


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("where", ["unit", "root"])
def test_set_up_fails_alone(where: str, n_ranks: int) -> None:
    run_ranks(fails_once, n_ranks, where, apart=True)
