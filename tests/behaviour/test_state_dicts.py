"""Y: reading whole parameters, the memory of shards, and what is easily done wrong around both."""

import copy
from typing import Any

import torch
from models import data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.optim.swa_utils import AveragedModel

from behaviour.pairs import agree, backward, chain, linear, raised, sharded, shards


@on_ranks(2)
def test_y6_averages_need_sharded_parameters(rank: int, n_ranks: int) -> None:
    """Reading parameters by name reshards nothing, so plain tensors meet DTensors."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}

        def update() -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    averages[name].lerp_(parameter, 0.5)

        with torch.no_grad():
            model(data(rank))
        kinds = [raised(update, "mixed torch.Tensor and DTensor")]
        model.reshard()
        kinds.append(raised(update))
        return kinds, {name: average.full_tensor() for name, average in averages.items()}

    assert agree(see)[0] == ["RuntimeError", "nothing"]


@on_ranks(2)
def test_y8_copies_of_dicts_and_of_models(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        copied = copy.deepcopy(model.state_dict())
        parameter = copy.deepcopy(model[0].weight)
        backward(model, torch.ones(2, 4))
        with torch.no_grad():
            model[0].weight.zero_()
        kept = copied["0.weight"].full_tensor(), parameter.full_tensor()
        return kept, raised(lambda: AveragedModel(model), "does not support deepcopy")

    (in_dict, alone), refused = agree(see)
    assert in_dict.any() and torch.equal(in_dict, alone) and refused == "AssertionError"


@on_ranks(2)
def test_y9_whole_parameters_have_gradients(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        for _ in range(2):  # before and after the first forward
            full = model.weight.full_tensor()
            (full * torch.arange(16.0).view(4, 4)).sum().backward()
            model(torch.ones(1, 4))
            model.reshard()
        return full.requires_grad, model.weight.grad

    requires_grad, grad = agree(see)
    assert requires_grad and grad.full_tensor()[3, 3].item() == 15.0 * 2  # of two rounds


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@on_ranks(2)
def test_y15_the_padded_shard(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = fsdp.fully_shard(Uneven())
        param = model._get_fsdp_state()._fsdp_param_group.fsdp_params[0]
        seen = []
        for _ in range(2):
            backward(model, torch.ones(2, 5))
            model.reshard()
            before = model.weight.to_local().data_ptr()
            param.reset_sharded_param()
            flat = param._sharded_param_data
            own = model.weight.to_local()
            is_same = own.data_ptr() == before == flat.data_ptr()
            seen.append((is_same, flat.clone(), own.clone()))
        with torch.no_grad():
            param._sharded_param_data.view(3, 3)[0] = 100.0
        model.unshard()
        return seen, model.weight.detach().clone()

    seen, full = agree(see)
    for is_same, flat, own in seen:
        assert is_same and flat.numel() == 9 and own.shape == (3 - rank, 3)
        assert flat[own.numel() :].eq(0).all()
    assert full[0, 0] == full[3, 0] == 100


@on_ranks(2)
def test_y19_optimizers_with_gradients_are_not_initialized(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        optimizer = torch.optim.Adam(parameters.values(), lr=0.1)
        before = {name: p.full_tensor() for name, p in parameters.items()}
        fresh = get_optimizer_state_dict(model, optimizer)
        gone = [p.grad is None for p in parameters.values()]
        after = {name: p.full_tensor() for name, p in parameters.items()}
        second = torch.optim.Adam(parameters.values(), lr=0.1)
        backward(model, torch.ones(2, 4))
        empty = get_optimizer_state_dict(model, second)["state"]
        return sorted(fresh["state"]["0.weight"]), gone, before, after, list(empty)

    names, gone, before, after, empty = agree(see)
    assert "exp_avg" in names and all(gone) and empty == []
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_y20_optimizer_states_of_unsharded_parameters(rank: int, n_ranks: int) -> None:
    """Torch looks parameters up by what is registered; reading the model first reshards it."""

    def see(fsdp: Any) -> Any:
        kinds = []
        for read in (
            lambda model, optimizer: get_optimizer_state_dict(model, optimizer),
            lambda model, optimizer: get_state_dict(model, optimizer),
            lambda model, optimizer: (model.reshard(), get_optimizer_state_dict(model, optimizer)),
        ):
            model = linear(fsdp)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            backward(model, torch.ones(1, 4))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 4))
            kinds.append(raised(lambda call=read, m=model, o=optimizer: call(m, o)))
        return kinds

    assert agree(see) == ["KeyError", "nothing", "nothing"]


@on_ranks(2)
def test_y25_equal_seeds_give_equal_blocks(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        found = []
        for seed in (3, 3 + rank):  # the same on all ranks, and one for each
            with torch.device("meta"):
                model = nn.Linear(4, 4)
            fsdp.fully_shard(model)
            model.to_empty(device="cpu")
            torch.manual_seed(seed)
            model.reset_parameters()
            full = model.weight.full_tensor()
            found.append(torch.equal(full[:2], full[2:]))
        return found

    assert agree(see) == [True, False]
