"""Process groups whose ranks exist in name only: units run on the core, and move nothing."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import implementation, run_ranks, seed_everything
from models import Net
from parity import EXACT, compare
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_c

WORLD = 4


def on_fake_ranks(body: Callable[[Any], Any]) -> Any:
    """What `body` gives under torch's and ours on one rank of a world that is not there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    results = []
    for fsdp in (torch_fsdp, implementation()):
        seed_everything(1)
        results.append(body(fsdp))
    compare(results[1], results[0], EXACT, "a fake process group")
    return results[1]


def check_outcome(body: Callable[..., None], n_ranks: int, *args: Any) -> None:
    (outcome,) = run_ranks(body, n_ranks, *args, fresh=True)
    assert outcome.ok, outcome.error or outcome.output


def options_of(kind: str) -> dict[str, Any]:
    if kind == "hsdp":
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))}
    return {"reshard_after_forward": kind == "fsdp", "mesh": init_device_mesh("cpu", (WORLD,))}


def counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(name): count for name, count in mode.get_comm_counts().items()}


def check_on_core(fsdp: Any, model: Any) -> None:
    if fsdp is not torch_fsdp:
        roads = {row.road for row in fsdp_c.explain(model).units}
        assert all(road.startswith("core over collectives in sight") for road in roads), roads


def train(fsdp: Any, kind: str) -> Any:
    model = Net()
    models.shard_blocks(model, fsdp, **options_of(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        mode = CommDebugMode()
        if step == 1:
            loss = model(models.data(1, step)).square().mean()
            loss.backward()
        else:
            with mode:
                loss = model(models.data(1, step)).square().mean()
                loss.backward()
        grads = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        seen.append((loss.detach(), grads, counts(mode)))
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[0].unshard()
    seen.append({name: p.detach().clone() for name, p in model.blocks[0].named_parameters()})
    check_on_core(fsdp, model)
    return seen


def check_training(rank: int, n_ranks: int, kind: str) -> None:
    seen = on_fake_ranks(lambda fsdp: train(fsdp, kind))
    assert sum(seen[0][2].values()) > 0 and seen[1][2] == {}


@pytest.mark.parametrize("kind", ["fsdp", "kept", "hsdp"])
def test_training(kind: str) -> None:
    check_outcome(check_training, 1, kind)


def trace(fsdp: Any, built_inside: bool, first: bool) -> Any:
    options = options_of("fsdp")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if built_inside:
        with mode:
            model = Net()
            models.shard_blocks(model, fsdp, **options)
    else:
        model = Net()
        models.shard_blocks(model, fsdp, **options)
    if not first:
        model(models.data(1)).sum().backward()
        model.zero_grad()
    seen = []
    for _ in range(2):
        with mode, CommDebugMode() as calls:
            out = model(torch.randn(3, models.WIDTH))
            out.square().mean().backward()
        has_grads = [p.grad is not None for p in model.parameters()]
        seen.append((type(out).__name__, tuple(out.shape), has_grads, counts(calls)))
    if not built_inside:
        check_on_core(fsdp, model)
    return seen


def check_fake_tensors(rank: int, n_ranks: int, built_inside: bool, first: bool) -> None:
    on_fake_ranks(lambda fsdp: trace(fsdp, built_inside, first))


@pytest.mark.parametrize("built_inside, first", [(False, True), (False, False), (True, True)])
def test_fake_tensors(built_inside: bool, first: bool) -> None:
    """What is built inside of the mode has no memory, and is left to torch's implementation."""
    check_outcome(check_fake_tensors, 1, built_inside, first)


def check_real_after_fake(rank: int, n_ranks: int) -> None:
    """The values are those of a model that no FakeTensorMode has seen."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    outputs = []
    for with_mode in (False, True):
        seed_everything(1)
        model: Any = Net()
        models.shard_blocks(model, fsdp_c, **options_of("fsdp"))
        if with_mode:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model(torch.randn(3, models.WIDTH)).sum().backward()
            model.zero_grad()
        outputs.append(model(models.data(1)).detach())
    assert torch.equal(*outputs)


def test_real_after_fake() -> None:
    check_outcome(check_real_after_fake, 1)
