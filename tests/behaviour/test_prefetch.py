"""L: lists of units to gather ahead of time."""

from typing import Any

import pytest
import torch
from models import Branches, data
from parity import on_ranks

from behaviour.pairs import agree, backward, chain, counts, gradients, sharded, shards


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("depth", [1, 2])
@on_ranks(2)
def test_l1_lists_change_no_result(rank: int, n_ranks: int, depth: int, way: str) -> None:
    def lists(fsdp: Any) -> Any:
        model = chain(fsdp, 4)
        order = [*model] if way == "forward" else [*model][::-1]
        for index, unit in enumerate(order):
            getattr(unit, f"set_modules_to_{way}_prefetch")(order[index + 1 : index + 1 + depth])
        return model

    def see(fsdp: Any) -> Any:
        model = lists(fsdp)
        parameters = shards(model)
        seen = []
        for step in range(2):
            backward(model, torch.full((2, 4), rank + step + 1.0))
            seen.append(gradients(parameters))
        other = lists(fsdp)
        return seen, counts(lambda: backward(other, torch.ones(2, 4)))

    seen, n = agree(see)
    assert n == [8, 4, 0] and None not in seen[1].values()


@on_ranks(2)
def test_l3_a_wrong_target_costs_a_gather(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[2]])
        seen = []
        for step in range(2):
            backward(model, data(rank, step), use=(0, 1))
            seen.append(gradients(parameters))
        return seen

    first, second = agree(see)
    assert second["blocks.2.up.weight"] is None and second["blocks.0.up.weight"] is not None
    assert not torch.equal(first["blocks.0.up.weight"], second["blocks.0.up.weight"])
