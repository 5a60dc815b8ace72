"""Z: which objects and memory of unsharded parameters live how long."""

from typing import Any

import torch
from models import Branches, data
from parity import on_ranks, total

from behaviour.pairs import agree, backward, chain, linear, own, raised, sharded


@on_ranks(2)
def test_z1_gathers_do_not_count_as_writes(rank: int, n_ranks: int) -> None:
    """Tensors that autograd saved before a reshard are valid after the next unshard."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        shard = model.weight
        model.unshard()
        unsharded = model.weight
        alias, version = unsharded.detach(), unsharded._version
        seen = []
        for value in (2.0, 3.0):
            model.reshard()
            with torch.no_grad():
                shard.fill_(value)
            model.unshard()
            seen.append((alias.unique().tolist(), alias.data_ptr() == unsharded.data_ptr()))
        same = unsharded._version == version
        model.reshard()
        return seen, same

    seen, same = agree(see)
    assert seen == [([2.0], True), ([3.0], True)] and same


@on_ranks(2)
def test_z2_unsharded_parameters_are_made_once(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        found: list[list[int]] = []
        model[0].register_forward_pre_hook(lambda module, args: found[-1].append(id(module.weight)))
        kept = []
        for _ in range(3):
            found.append([])
            backward(model, torch.ones(2, 4))
            model[0].unshard()
            kept.append(model[0].weight)
            found[-1].append(id(model[0].weight))
            model[0].reshard()
        return len({id for ids in found for id in ids}), len({id(p) for p in kept})

    assert agree(see) == (1, 1)


@on_ranks(2)
def test_z3_unsharded_gradients_are_dropped(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        model.unshard()
        unsharded = model.weight
        model.reshard()
        seen = []
        for sync in (True, False, True):
            model.set_requires_gradient_sync(sync)
            backward(model, torch.ones(2, 4))
            seen.append(unsharded.grad is None)
        return seen[0], seen[2], model.weight.grad

    first, last, _ = agree(see)
    assert first and last


@on_ranks(2)
def test_z4_sharded_weights_do_not_mix_with_tensors(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        total(model(data(rank))).backward()
        x = data(rank)
        seen = [
            raised(lambda: torch.mm(x, model.stem.weight), "mixed torch.Tensor and DTensor"),
            raised(lambda: model.stem(x), "mixed torch.Tensor and DTensor"),
        ]
        return seen, own(model.stem)

    assert agree(see) == (["RuntimeError"] * 2, "sharded")
