"""B: what happens around a unit's backward."""

from typing import Any

import pytest
import torch
from models import Branches, data
from parity import on_ranks, total
from torch import Tensor, nn

from behaviour.pairs import (
    agree,
    backward,
    chain,
    counts,
    gradients,
    linear,
    local,
    own,
    raised,
    ranges,
    registered,
    sharded,
    shards,
)


@on_ranks(2)
def test_b1_a_gradient_of_an_output_unshards(rank: int, n_ranks: int) -> None:
    """Once, however many outputs get gradients; at any time only that unit is unsharded."""

    def see(fsdp: Any) -> Any:
        class Unit(nn.Linear):
            def forward(self, x: Tensor) -> Any:
                y = super().forward(x)
                if y.requires_grad:
                    y.register_hook(lambda grad: seen.append(note(self)))
                return y * 1, y * 2

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.units = nn.ModuleList(Unit(4, 4) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                for unit in self.units:
                    a, b = unit(x)
                    x = a + b
                return x.sin()

        def note(unit: nn.Module) -> Any:
            state = unit._get_fsdp_state()._training_state.name
            return [*model.units].index(unit), state, own(unit)

        seen: list[Any] = []
        model = Root()
        for unit in model.units:
            fsdp.fully_shard(unit)
        fsdp.fully_shard(model)
        parameters = shards(model)
        model(torch.ones(2, 4)).sum().backward()
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == [(1, "PRE_BACKWARD", "unsharded"), (0, "PRE_BACKWARD", "unsharded")]


@on_ranks(2)
def test_b1_hooks_of_the_user_on_an_output_run_later(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        seen = []

        def look(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: seen.append(own(module)))

        for unit in model:  # after fully_shard, so they see what FSDP has hooked
            unit.register_forward_hook(look)
        backward(model, torch.ones(2, 4))
        x = model[0](torch.ones(2, 4))
        torch.autograd.grad(x.sum(), x)  # a gradient that goes no further
        return seen, own(model[0])

    seen, after = agree(see)
    assert seen == ["unsharded"] * 3 and after == "sharded"


@on_ranks(2)
def test_b4_a_gather_for_nothing_is_dropped(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[2]])
        seen = []
        for step in range(2):
            backward(model, data(rank, step), use=(0, 1))
            seen.append(registered(model))
        backward(model, data(rank))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == [["sharded"] * 4] * 2


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_b5_without_synchronisation_gradients_accumulate(
    rank: int, n_ranks: int, reshard: bool
) -> None:
    """The unit is resharded, if that is set, and `.grad` stays as it was."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        backward(model, torch.ones(1, 4))
        first = weight.grad, local(weight.grad)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(reshard)
        model(torch.full((1, 4), 2.0)).sum().backward()
        kind, same, held = own(model), weight.grad is first[0], local(weight.grad)
        model.set_requires_gradient_sync(True)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        return kind, same, first[1], held, local(weight.grad)

    kind, same, first, held, last = agree(see)
    assert kind == ("sharded" if reshard else "unsharded") and same
    assert torch.equal(first, held) and (last - first).unique().tolist() == [3.5]


@on_ranks(2)
def test_b6_b14_only_what_was_used_takes_part(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        backward(model, data(rank), use=(0, 1))
        unused = [name for name, grad in gradients(parameters).items() if grad is None]
        other = sharded(fsdp, Branches)
        n = counts(lambda: backward(other, data(rank), use=(0, 1)))
        return unused, n, gradients(parameters)

    unused, n, _ = agree(see)
    # The root once, two blocks twice; the third block neither gathers nor reduces.
    assert {name[:8] for name in unused} == {"blocks.2"} and n == [5, 3, 0]


@on_ranks(2)
def test_b7_units_end_in_reverse_order(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp, 4)
        backward(model, torch.ones(2, 4, requires_grad=True))
        found = ranges(lambda: backward(model, torch.ones(2, 4, requires_grad=True)))
        return [name[-2] for name in found if "post_backward_reduce" in name]

    assert agree(see) == ["3", "2", "1", "0"]  # each once, and no range where nothing is reduced


@on_ranks(2)
def test_b8_the_end_of_backward_reaches_all_units(rank: int, n_ranks: int) -> None:
    """Also those that took no part: they are resharded, and reduce what they hold."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        units = (model, *model.blocks)
        model.set_requires_gradient_sync(False)
        backward(model, data(rank))
        model.set_requires_gradient_sync(True)
        model.blocks[2].unshard()
        backward(model, data(rank, 1), use=(0, 1))
        states = [unit._get_fsdp_state()._training_state.name for unit in units]
        return registered(model), states, gradients(parameters)

    after, states, grads = agree(see)
    assert after == ["sharded"] * 4 and states == ["IDLE"] * 4 and None not in grads.values()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_b10_two_backwards_of_one_graph(rank: int, n_ranks: int, reshard: bool) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, reshard_after_forward=reshard)
        parameters = shards(model)
        loss = total(model(data(rank)))
        loss.backward(retain_graph=True)
        first = gradients(parameters)
        loss.backward()
        return first, gradients(parameters)

    first, second = agree(see)
    assert all(torch.equal(second[name], 2 * first[name]) for name in first)


@on_ranks(2)
def test_b11_two_forwards_and_two_backwards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        losses = [total(model(data(rank, step))) for step in range(2)]
        seen = []
        for loss in losses:
            loss.backward()
            seen.append(gradients(parameters))
        return seen

    first, second = agree(see)
    assert not torch.equal(first["blocks.0.up.weight"], second["blocks.0.up.weight"])


@on_ranks(2)
def test_b12_autograd_grad_does_not_reach_the_shards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        loss = total(model(torch.ones(2, 4)))
        call = lambda: torch.autograd.grad(loss, list(parameters.values()))  # noqa: E731
        kind = raised(call, "not have been used in the graph")
        return kind, gradients(parameters)

    kind, grads = agree(see)
    assert kind == "RuntimeError" and set(grads.values()) == {None}


@on_ranks(2)
def test_b14_unused_outputs(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Any:
                return self.a(x), self.b(x)

        model = fsdp.fully_shard(Two())
        parameters = shards(model)
        seen = []
        for index in (0, 1):
            model(torch.ones(2, 4))[index].sum().backward()
            seen.append(gradients(parameters))
        return seen

    first, second = agree(see)
    assert first["a.weight"] is not None and first["b.weight"] is None
    assert torch.equal(first["a.weight"], second["a.weight"]) and second["b.weight"] is not None


@on_ranks(2)
def test_b15_forward_mode_through_a_unit(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        x = torch.full((2, 4), rank + 1.0)
        return torch.func.jvp(model, (x,), (torch.ones(2, 4),))

    value, tangent = agree(see)
    assert value.shape == tangent.shape == (2, 4) and tangent.any()
