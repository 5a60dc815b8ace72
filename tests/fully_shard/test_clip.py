"""clip_grad_norm_, clip_grad_value_ and the gradient scaler beside torch."""

import math
from typing import Any

import models
import pytest
import torch
from harness import cached_mesh
from models import Net, Tiny, data
from parity import Pair, Plain, Side, Tolerance, compare_values, full, on_ranks, total
from torch import Tensor, nn

# Norms add up squares of all elements; the order in which a rank does that is free.
CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", [2.0, 1.0, 3.0, math.inf])
@on_ranks(1, 2, 3)
def test_clip_grad_norm(rank: int, n_ranks: int, kind: float, foreach: bool | None) -> None:
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)

    def clip(side: Side) -> Tensor:
        parameters = side.model.parameters()
        norm = nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=kind, foreach=foreach)
        return full(norm)

    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward()
        pair.both(clip)
        pair.optimize()


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("kind", [2.0, math.inf])
@on_ranks(1, 2, 3)
def test_norm_of_the_whole_model(rank: int, n_ranks: int, kind: float, max_norm: float) -> None:
    pair = Pair(Net, models.shard_blocks)
    plain = Plain(Net)
    total(pair.ours.model(data(rank))).backward()
    plain.backward([total(plain.model(data(r))) for r in range(n_ranks)], n_ranks)
    norms = [
        full(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=kind))
        for model in (pair.ours.model, plain.model)
    ]
    compare_values(norms[0], norms[1], CLOSE, "norm")
    plain.check(pair.ours, CLOSE)


@on_ranks(2, 4)
def test_two_dimensions(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, n_ranks // 2), ("replicate", "shard"))
    pair = Pair(
        Net, lambda model, fsdp: models.shard_blocks(model, fsdp, mesh=mesh), tolerance=CLOSE
    )
    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward()
        pair.both(lambda side: full(nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)))
        pair.optimize()


@on_ranks(4)
def test_ranks_without_rows(rank: int, n_ranks: int) -> None:
    pair = Pair(Tiny, models.shard_root, tolerance=CLOSE)
    pair.forward(data(rank))
    pair.backward()
    pair.both(lambda side: full(nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)), "clip")
    pair.optimize()


@on_ranks(2)
def test_other_clipping(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.forward(data(rank))
    pair.backward()
    pair.do(lambda side: nn.utils.clip_grad_value_(side.model.parameters(), 0.01), "value")

    def poison(side: Side) -> str:
        if rank == 0:
            next(iter(side.shards.values())).grad.to_local().fill_(math.nan)
        with pytest.raises(RuntimeError, match="non-finite") as caught:
            nn.utils.clip_grad_norm_(side.model.parameters(), 1.0, error_if_nonfinite=True)
        return type(caught.value).__name__

    pair.both(poison)


@on_ranks(1, 2)
def test_gradient_scaler(rank: int, n_ranks: int) -> None:
    """An infinity on one rank makes every rank skip the step."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp)
        model.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    pair = Pair(Net, shard)

    def step(side: Side, x: Tensor) -> tuple[float, Tensor]:
        scaler = side.model.scaler
        loss = total(side.model(x))
        scaler.scale(loss).backward()
        scaler.unscale_(side.optimizer)
        norm = nn.utils.clip_grad_norm_(side.model.parameters(), 10.0)
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
        return scaler.get_scale(), full(norm)

    for index in range(5):
        x = data(rank, index)
        if index == 3 and rank == n_ranks - 1:
            x[0] = math.inf
        pair.both(lambda side: step(side, x), "scaled step")
