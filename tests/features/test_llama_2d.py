"""Tensor, sequence and data parallelism together, as torchtitan puts them on a Llama."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from llama import Llama, apply_fsdp, apply_tp, batch
from parity import Pair, Side, Tolerance, full, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

CLOSE = Tolerance(relative=1e-4, scaled=1e-4, realign=True)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MESHES = {
    "1 x 2": ((1, 2), ("dp", "tp")),
    "2 x 2": ((2, 2), ("dp", "tp")),
    "2 x 2 x 1": ((2, 2, 1), ("replicate", "dp", "tp")),
    "2 x 1 x 2": ((2, 1, 2), ("replicate", "dp", "tp")),
}


def mesh_of(kind: str) -> tuple[DeviceMesh, DeviceMesh, int]:
    """All of it, the data-parallel part, and this rank's place in that."""
    mesh = cached_mesh(*MESHES[kind])
    names = mesh.mesh_dim_names[:-1]
    place = 0
    for name in names:
        place = place * mesh[name].size() + mesh[name].get_local_rank()
    return mesh, mesh[names if len(names) > 1 else names[0]], place


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def parallel_pair(kind: str, compiled: bool = False, logits: bool = False, **options: Any) -> Pair:
    mesh, dp, _ = mesh_of(kind)

    def shard(model: nn.Module, fsdp: Any) -> None:
        apply_tp(model, mesh["tp"], loss_parallel=logits)
        if compiled:  # torchtitan does it before fully_shard
            for layer in model.layers:
                layer.compile(backend="eager")
        apply_fsdp(model, fsdp, dp, **options)

    tolerance = Tolerance.of(8, torch.bfloat16) if options.get("mp_policy") else CLOSE
    return Pair(Llama, shard, tolerance=tolerance, optimizer=adamw)


def cross_entropy(side: Side, tokens: torch.Tensor) -> Any:
    logits = side.model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits.float(), tokens.flatten())
    loss.backward()
    return full(loss)


def train(pair: Pair, place: int, n_steps: int = 2) -> None:
    """As torchtitan: loss, clipping, step."""
    for step in range(n_steps):
        pair.both(lambda side: cross_entropy(side, batch(place, step)), "loss")
        pair.both(lambda side: full(nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)))
        pair.optimize()


@pytest.mark.parametrize("kind", [kind for kind in MESHES if kind.startswith("2")])
@on_ranks(4)
def test_llama_on_four_ranks(rank: int, n_ranks: int, kind: str) -> None:
    train(parallel_pair(kind), mesh_of(kind)[2])


@on_ranks(2)
def test_llama_on_two_ranks(rank: int, n_ranks: int) -> None:
    train(parallel_pair("1 x 2"), 0)


@on_ranks(4)
def test_llama_in_bf16(rank: int, n_ranks: int) -> None:
    """Micro-batches without reduction in between, then a state dict."""
    pair = parallel_pair("2 x 2", mp_policy=BF16)
    place = mesh_of("2 x 2")[2]
    for is_last in (False, True):
        for side in (pair.theirs, pair.ours):
            side.model.set_requires_gradient_sync(is_last)
        pair.both(lambda side: cross_entropy(side, batch(place, int(is_last))), "loss")
    pair.optimize()
    pair.do(lambda side: [unit.reshard() for unit in units(side)])
    pair.check_state_dict()


def units(side: Side) -> list[Any]:
    return [m for m in side.model.modules() if isinstance(m, side.fsdp.FSDPModule)]


@on_ranks(4)
def test_llama_with_loss_parallel(rank: int, n_ranks: int) -> None:
    pair = parallel_pair("2 x 2", logits=True)
    place = mesh_of("2 x 2")[2]
    with loss_parallel():
        train(pair, place, n_steps=1)


@on_ranks(2)
def test_llama_with_compiled_blocks(rank: int, n_ranks: int) -> None:
    train(parallel_pair("1 x 2", compiled=True), 0, n_steps=1)


@on_ranks(4)
def test_llama_collectives_seen_by_debug_mode(rank: int, n_ranks: int) -> None:
    """In the first step and in a later one, with the modules that they belong to."""
    pair = parallel_pair("2 x 2")
    place = mesh_of("2 x 2")[2]

    def counted(side: Side) -> dict[str, int]:
        mode = CommDebugMode()
        with mode:
            cross_entropy(side, batch(place))
        side.optimizer.zero_grad()
        return {str(name): count for name, count in mode.get_comm_counts().items()}

    first = pair.both(counted)
    assert any("c10d.allgather" in name or "_allgather_base" in name for name in first), first
    pair.both(counted)
    train(pair, place, n_steps=1)
