"""O: shards, gradients and optimizer states that are kept on the CPU, on a CPU mesh."""

from typing import Any

import harness
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import data
from parity import on_ranks, total
from torch import nn

from behaviour.pairs import (
    CLOSE,
    agree,
    backward,
    counts,
    full,
    gradients,
    linear,
    raised,
    shards,
    weights,
)

UNITS = 3


def build(fsdp: Any, offloaded: tuple[int, ...], pin_memory: bool = False, **device: Any) -> Any:
    """A chain of units; those that are named, the root as the last, are offloaded."""
    harness.seed_everything(7)
    model = nn.Sequential(*(nn.Linear(6, 6, **device) for _ in range(UNITS - 1)))
    policies = [fsdp.OffloadPolicy()] * UNITS
    for index in offloaded:
        policies[index] = fsdp.CPUOffloadPolicy(pin_memory=pin_memory)
    for unit, policy in zip(model, policies, strict=False):
        fsdp.fully_shard(unit, offload_policy=policy)
    return fsdp.fully_shard(model, offload_policy=policies[-1])


def train(model: nn.Module, rank: int) -> Any:
    kept = shards(model)
    optimizer = torch.optim.AdamW(kept.values(), lr=0.1)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, data(rank, step))
        found.append(gradients(kept))
        optimizer.step()
    return found, weights(kept)


@on_ranks(2)
def test_o1_o2_offloaded_units_train_as_others_do(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        choices = [(), (0,), (0, 1, 2)]
        calls = [counts(lambda: backward(build(fsdp, c), data(rank))) for c in choices]
        return calls, [train(build(fsdp, choice), rank) for choice in choices]

    calls, found = agree(see)
    assert calls == [calls[0]] * 3 and calls[0][:2] == [2 * (UNITS - 1), UNITS - 1]
    for grads, after in found[1:]:
        assert str(grads) == str(found[0][0]) and str(after) == str(found[0][1])


@on_ranks(2)
def test_o3_pinning_without_an_accelerator(rank: int, n_ranks: int) -> None:
    """Torch cannot pin without an accelerator; on a CPU mesh there is no use in it."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    pinned = torch_fsdp.CPUOffloadPolicy()
    assert raised(lambda: linear(torch_fsdp, offload_policy=pinned)) == "RuntimeError"
    ours = harness.implementation()
    if ours is not torch_fsdp:
        found = [train(build(ours, (0, 1, 2), pin), rank) for pin in (False, True)]
        assert str(found[0]) == str(found[1])


@on_ranks(2)
def test_o14_from_the_meta_device(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        early, model = (build(fsdp, (0, 1, 2), device="meta") for _ in range(2))
        refused = raised(lambda: early(data(rank)), "materialized from meta device")
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        return refused, train(model, rank)

    assert agree(see)[0] == "RuntimeError"


@on_ranks(2)
def test_o17_clipping_and_full_tensors(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        found = []
        for offloaded in ((), (0, 1, 2)):
            model = build(fsdp, offloaded)
            kept = shards(model)
            total(model(data(rank))).backward()
            norm = nn.utils.clip_grad_norm_(kept.values(), 0.1).full_tensor()
            found.append(
                [norm, [full(p.grad) for p in kept.values()], list(map(full, kept.values()))]
            )
        return found

    plain, offloaded = agree(see, CLOSE)
    assert plain[0].item() > 0.1 and str(plain) == str(offloaded)
