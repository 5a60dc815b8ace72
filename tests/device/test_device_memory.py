"""Memory of units on a device: torch's allocators give all of it, and host memory is used again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Net, data
from nccl_stand_in import built, chosen
from parity import Pair, Side, Tolerance, on_ranks
from test_device_schedule import is_on_device
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_c
from fsdp_c._comm import _device

WIDTH = 256
UNIT = WIDTH * WIDTH * 4  # bytes
POLICY = CPUOffloadPolicy(pin_memory=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


# --- on the device --------------------------------------------------------------------------------


def allocations(run: Callable[[], Any]) -> list[int]:
    """Sizes of what torch's allocator gives meanwhile, if they are a unit's or a shard's."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return [size for size in sizes if size >= UNIT // 4]


def two_units(n_ranks: int, **options: Any) -> nn.Module:
    """Of UNIT bytes each, gathered in place; the root has no parameters."""
    mesh = cached_mesh((n_ranks,))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    for unit in (*model, model):
        fsdp_c.fully_shard(unit, mesh=mesh, **options)
    return model


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(3, WIDTH)).sum().backward()


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2, apart=True)
def test_torch_sees_all_device_memory(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Over a stand-in of NCCL, whose ranks take nothing of torch's themselves. Counts all that a
    process holds, other models' memory too."""
    with chosen(built()), _device.on_cpu(by_torch, by_nccl=True):
        model = two_units(n_ranks)
        step(model)
        with torch.no_grad():
            assert allocations(lambda: model(torch.ones(3, WIDTH))) == [UNIT] * 2
        seen = allocations(lambda: step(model))
    # Three slots of gathers, two gradients of autograd's, staged ones; where they are reduced to.
    assert seen.count(UNIT) == 6
    # torch's operators divide into memory of their own. Two are the shards' gradients.
    assert seen.count(UNIT // 2) == 3 + 2 * by_torch and len(seen) == 9 + 2 * by_torch
    own = fsdp_c.stats(model).process
    own.pop("shared")  # clocks of the ranks of this host
    assert own.pop("objects") < UNIT // 4 and not any(own.values())


# --- offloaded to the host ------------------------------------------------------------------------


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2)
def test_gradients_on_the_host_have_one_place(rank: int, n_ranks: int, by_torch: bool) -> None:
    """Each step fills the same buffers; a gradient that somebody keeps is not written again."""
    with chosen(built()), _device.on_cpu(by_torch, by_nccl=True):
        model = two_units(n_ranks, offload_policy=POLICY)
        step(model)
        seen = allocations(lambda: step(model))
        kept = model[0].weight.grad
        values = kept.to_local().clone()
        more = allocations(lambda: step(model))
        model(torch.ones(3, WIDTH)).sum().backward()
    # On the device: shards of four gatherings, two gradients on their way, where they are reduced.
    assert seen.count(UNIT // 2) == 4 + 2 + 1 + 2 * by_torch
    assert more.count(UNIT // 2) == seen.count(UNIT // 2) + 1
    assert model[0].weight.grad is not kept and torch.equal(kept.to_local(), values)
    assert torch.equal(model[0].weight.grad.to_local(), 2 * values)


def shard_in_part(policy: MixedPrecisionPolicy) -> Callable[..., None]:
    """The first block stays on the device."""

    def shard(model: Any, fsdp: Any) -> None:
        fsdp.fully_shard(model.blocks[0], mp_policy=policy)
        for unit in (*model.blocks[1:], model):
            fsdp.fully_shard(unit, mp_policy=policy, offload_policy=POLICY)

    return shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1, 2)
def test_offloaded_training_with_checkpoints(rank: int, n_ranks: int, dtype: torch.dtype) -> None:
    """The host reads what goes to it late, so that whoever reads it too early fails here: the
    optimizer, clipping, a checkpoint, a hook."""
    saved: dict[str, Any] = {}
    norms: dict[str, list[torch.Tensor]] = {"torch": [], "tested": []}

    def clip(side: Side) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(side.model.parameters(), 0.1).full_tensor()

    def save(side: Side) -> None:
        shards = {name: value.clone() for name, value in side.model.state_dict().items()}
        saved[side.name] = shards, copy.deepcopy(side.optimizer.state_dict())

    def load(side: Side) -> None:
        shards, state = saved[side.name]
        side.model.load_state_dict(shards)
        side.optimizer.load_state_dict(state)

    def watch(side: Side) -> None:
        for p in side.model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: norms[side.name].append(p.grad.to_local().norm())
            )

    policy = MixedPrecisionPolicy(None if dtype is torch.float32 else dtype, torch.float32)
    with _device.on_cpu():
        pair = Pair(
            Net,
            shard_in_part(policy),
            optimizer=adamw,
            tolerance=Tolerance.of(n_ranks, dtype),
        )
        pair.do(watch, "hooks")
        pair.step(data(rank))
        pair.do(save, "checkpoint")
        for number in (1, 2):
            pair.forward(data(rank, number))
            pair.backward()
        pair.both(clip, "clipping")
        pair.do(load, "checkpoint read")
        pair.step(data(rank, 3))
        pair.eval_forward(data(rank, 4))
        assert is_on_device(pair)
        assert len(norms["torch"]) == len(norms["tested"]) > 0
        for ours, theirs in zip(norms["tested"], norms["torch"], strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=3e-2 if policy.param_dtype else 1e-5, atol=1e-6
            )
