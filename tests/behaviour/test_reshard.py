"""R: what stays of a unit between its forward and its backward."""

import logging
from typing import Any

import torch
from harness import cached_mesh
from parity import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from behaviour.pairs import agree, gradients, linear, own, shards


def shown(parameter: nn.Parameter) -> Any:
    """What is registered: how it is spread, its dtypes, and all of its values."""
    if not isinstance(parameter, DTensor):
        return "plain", str(parameter.dtype), parameter.detach().clone()
    part = parameter._local_tensor
    mesh = parameter.device_mesh
    spread = tuple(mesh.shape), mesh.mesh_dim_names, str(parameter.placements), tuple(part.shape)
    noted = parameter._spec.tensor_meta.dtype
    return spread, str(noted), str(part.dtype), parameter.detach().full_tensor()


@on_ranks(4)
def test_r1_r7_an_int_keeps_a_part_on_a_mesh_of_its_own(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        replicas = cached_mesh((2, 2), ("replicate", "shard"))
        found = []
        for mesh, k in ((cached_mesh((4,)), 2), (replicas, 1)):
            # On two dims the whole mesh is laid out anew, so that it takes in the replicas.
            model = linear(fsdp, 8, mesh=mesh, reshard_after_forward=k, mp_policy=policy)
            kept = shards(model)
            output = model(torch.ones(2, 8))
            found.append(shown(model.weight))
            output.float().sum().backward()
            found.append((shown(model.weight), gradients(kept)))
        return found

    (spread, dtype, part_dtype, full), _, (kind, *_), _ = agree(see)
    assert spread[0] == (2, 2) and spread[3] == (4, 8) and kind == "plain"
    assert dtype == "torch.float32" and part_dtype == "torch.bfloat16" and full.eq(1).all()


@on_ranks(2)
def test_r2_roots_and_the_ints_that_are_bools(rank: int, n_ranks: int) -> None:
    notes: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    def see(fsdp: Any) -> Any:
        found = []
        for value in (None, True, False, 2, 1):  # 2 is the number of ranks
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            fsdp.fully_shard(model[0], reshard_after_forward=value)
            fsdp.fully_shard(model, reshard_after_forward=value)
            model(torch.ones(2, 4))
            found.append((own(model[0]), own(model[1])))
        return found

    log = logging.getLogger("torch.distributed.fsdp.fully_shard")
    handler = Notes()
    log.addHandler(handler)
    try:
        found = agree(see)
    finally:
        log.removeHandler(handler)
    gone, kept = ("sharded", "sharded"), ("unsharded", "unsharded")
    assert found == [("sharded", "unsharded"), gone, kept, gone, kept]
    # Torch warns of 1 once per process.
    assert len([note for note in notes if "reshard_after_forward=1" in note]) <= 1
