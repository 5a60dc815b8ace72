"""F: what happens around a unit's forward."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
from models import Branches, data
from parity import on_ranks, total
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from behaviour.pairs import (
    agree,
    backward,
    chain,
    counts,
    gradients,
    linear,
    own,
    raised,
    registered,
    sharded,
    shards,
)


class Probe(nn.Linear):
    """A layer that notes what it sees whenever it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def note(self, x: Tensor) -> Any:
        state = self._get_fsdp_state()
        return state._training_state.name, own(self), str(x.dtype), str(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.note(x))
        return super().forward(x)


@on_ranks(2)
def test_f1_inputs_are_cast_and_parameters_there(rank: int, n_ranks: int) -> None:
    """In forward, and once more when activation checkpointing runs it again."""

    def see(fsdp: Any) -> Any:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        probe = fsdp.fully_shard(Probe(4, 4), mp_policy=policy)

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.probe = probe

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.probe, x, use_reentrant=False)

        model = fsdp.fully_shard(Root())
        model(torch.ones(2, 4)).float().sum().backward()
        return probe.seen

    kinds = ("unsharded", "torch.bfloat16", "torch.bfloat16")
    assert agree(see) == [("FORWARD", *kinds), ("PRE_BACKWARD", *kinds)]


@on_ranks(2)
def test_f2_whoever_runs_first_does_the_roots_work(rank: int, n_ranks: int) -> None:
    """After a first forward of the whole tree a part of it can be run alone."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        backward(model, torch.ones(2, 4))
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        output = model[1](torch.ones(2, 4))
        output.sum().backward()
        return output.detach(), gradients(parameters)

    agree(see)


@on_ranks(2)
def test_f2_inputs_on_the_cpu_are_not_copied(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        class Same(nn.Linear):
            def forward(self, x: Any) -> Any:
                self.got = x
                return super().forward(x["x"][0])

        model = fsdp.fully_shard(Same(4, 4))
        x = {"x": [torch.ones(2, 4)]}
        model(x)
        return model.got["x"][0] is x["x"][0]

    assert agree(see)


@pytest.mark.parametrize("grad", ["needed", "not needed", "no_grad"])
@on_ranks(2)
def test_f3_inputs_that_need_gradients_pass_a_node(rank: int, n_ranks: int, grad: str) -> None:
    def see(fsdp: Any) -> Any:
        class Same(nn.Linear):
            def forward(self, x: Tensor, also: Tensor) -> Tensor:
                self.got = x, also
                return super().forward(x)

        model = fsdp.fully_shard(Same(4, 4))
        x = torch.ones(2, 4, requires_grad=grad != "not needed")
        also = torch.ones(1)
        with torch.set_grad_enabled(grad != "no_grad"):
            model(x, also=also)
        got_x, got_also = model.got
        return got_x is x, got_x.grad_fn is not None, got_also is also

    same, has_node, also_same = agree(see)
    assert (same, has_node) == ((False, True) if grad == "needed" else (True, False))
    assert also_same


@dataclasses.dataclass
class Record:
    x: Any
    note: str = "note"


Named = collections.namedtuple("Named", "x rest")


class Opaque:
    def __init__(self, x: Any) -> None:
        self.x = x


CONTAINERS = {
    "list": lambda x: [x],
    "tuple": lambda x: (1, x),
    "dict": lambda x: {"a": {"b": x}},
    "named": lambda x: Named(x, [x]),
    "dataclass": lambda x: Record([x]),
    "set": lambda x: {x},
    "object": Opaque,
}


def first_tensor(tree: Any) -> Tensor:
    while not isinstance(tree, Tensor):
        if isinstance(tree, Record | Opaque):
            tree = tree.x
        elif isinstance(tree, dict):
            tree = next(iter(tree.values()))
        else:
            tree = next(item for item in tree if not isinstance(item, int))
    return tree


@pytest.mark.parametrize("kind", list(CONTAINERS))
@on_ranks(2)
def test_f4_containers_that_are_searched(rank: int, n_ranks: int, kind: str) -> None:
    def see(fsdp: Any) -> Any:
        class Takes(nn.Linear):
            def forward(self, tree: Any) -> Any:
                self.got = type(tree).__name__, first_tensor(tree)
                return CONTAINERS[kind](super().forward(self.got[1]))

        model = fsdp.fully_shard(Takes(4, 4))
        x = torch.ones(2, 4, requires_grad=True)
        output = model(CONTAINERS[kind](x))
        name, got = model.got
        result = first_tensor(output)
        result.sum().backward()
        return name, got is x, type(output).__name__, x.grad

    name, same, output, x_grad = agree(see)
    assert name == output and x_grad is not None
    assert same == (kind in ("set", "object")), "only searched inputs pass a node"


@on_ranks(2)
def test_f4_depth_is_limited(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        class Takes(nn.Linear):
            def forward(self, tree: Any) -> Tensor:
                while not isinstance(tree, Tensor):
                    tree = tree[0]
                return super().forward(tree)

        seen = []
        for depth in (100, 200):
            model = fsdp.fully_shard(Takes(4, 4))
            tree: Any = torch.ones(2, 4, requires_grad=True)
            for _ in range(depth):
                tree = [tree]
            seen.append(raised(lambda: model(tree)))
        return seen

    assert agree(see) == ["nothing", "RuntimeError"]


@on_ranks(2)
def test_f6_states_after_forward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        units = (model, *model.blocks)
        inside: list[str] = []
        model.blocks[1].up.register_forward_pre_hook(
            lambda module, args: inside.extend(
                unit._get_fsdp_state()._training_state.name for unit in units
            )
        )
        model(data(rank))
        return inside, [unit._get_fsdp_state()._training_state.name for unit in units]

    inside, after = agree(see)
    assert inside == ["FORWARD", "IDLE", "FORWARD", "IDLE"] and after == ["IDLE"] * 4


@pytest.mark.parametrize("end", ["backward", "reshard", "to", "state_dict"])
@on_ranks(2)
def test_f7_kept_parameters_stay_until(rank: int, n_ranks: int, end: str) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp, reshard_after_forward=False)
        output = model(torch.ones(2, 4))
        before = own(model)
        if end == "backward":
            output.sum().backward()
        elif end == "reshard":
            model.reshard()
        elif end == "state_dict":
            model.state_dict()
        else:
            model.to(torch.float32)
        return before, own(model)

    assert agree(see) == ("unsharded", "sharded")


@on_ranks(2)
def test_f8_backward_begins_at_uncast_outputs(rank: int, n_ranks: int) -> None:
    """Every output that needs a gradient leads to the unit's backward, also one that was cast."""

    def see(fsdp: Any) -> Any:
        class Two(nn.Linear):
            def forward(self, x: Tensor) -> Any:
                y = super().forward(x)
                return y, y.sum(), x

        policy = fsdp.MixedPrecisionPolicy(output_dtype=torch.float64)
        model = fsdp.fully_shard(Two(4, 4), mp_policy=policy, reshard_after_forward=True)
        weight = model.weight
        seen = []
        for index in (0, 1):
            outputs = model(torch.ones(2, 4))
            dtypes = [str(output.dtype) for output in outputs]
            outputs[index].sum().backward()
            seen.append((dtypes, outputs[2].requires_grad, weight.grad.to_local().clone()))
        with torch.no_grad():
            seen.append([output.grad_fn is None for output in model(torch.ones(2, 4))])
        return seen

    first, _, without = agree(see)
    assert first[0] == ["torch.float64"] * 3 and not first[1] and without == [True] * 3


def grouped(fsdp: Any) -> Any:
    """Two layers that are one unit, under a root that takes which of them to run."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.states: list[str] = []

        def forward(self, x: Tensor, use: str = "both") -> Tensor:
            self.states.append(own(self.second))
            x = self.first(x)
            self.states.append(own(self.first) + own(self.second))
            if use == "both":
                x = self.second(x)
                self.states.append(own(self.first) + own(self.second))
            return x

    torch.manual_seed(3)
    model = Root()
    fsdp.fully_shard([model.first, model.second])
    return fsdp.fully_shard(model)


@on_ranks(2)
def test_f10_the_last_member_ends_the_pass(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = grouped(fsdp)
        parameters = shards(model)
        backward(model, torch.ones(2, 4))
        return model.states, gradients(parameters)

    states, _ = agree(see)
    assert states == ["sharded", "unsharded" * 2, "sharded" * 2]


@on_ranks(2)
def test_f11_the_root_completes_a_partial_group(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = grouped(fsdp)
        parameters = shards(model)
        seen = []
        for use in ("one", "both", "one"):
            output = model(torch.ones(2, 4), use)
            after = own(model.first) + own(model.second)
            total(output).backward()
            seen.append((after, gradients(parameters)))
        return model.states, seen

    states, seen = agree(see)
    assert {after for after, _ in seen} == {"sharded" * 2}
    assert seen[0][1]["second.weight"] is None and seen[1][1]["second.weight"] is not None


@on_ranks(2)
def test_f11_a_later_member_opens_a_new_pass(rank: int, n_ranks: int) -> None:
    """The head of a grouped unit is called on chunks of the root's output, each with a loss."""

    def see(fsdp: Any) -> Any:
        model = grouped(fsdp)
        parameters = shards(model)
        hidden = model(torch.full((4, 4), rank + 1.0), "one")
        leaf = hidden.detach().requires_grad_()
        seen = []
        for chunk in leaf.chunk(2):
            model.second(chunk).sum().backward()
            seen.append(gradients(parameters))
        hidden.backward(leaf.grad)
        return seen, gradients(parameters)

    seen, after = agree(see)
    assert seen[0]["second.weight"] is not None and after["first.weight"] is not None


@on_ranks(2)
def test_f12_a_unit_that_runs_twice(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        seen = []
        for use in ((0, 0), (0, 1, 0)):
            backward(model, data(rank), use=use)
            seen.append(gradients(parameters))
        model = sharded(fsdp, Branches)
        n = counts(lambda: model(data(rank), use=(0, 0)))
        return seen, n

    seen, n = agree(see)
    # The root's own parameters and the block's, twice.
    assert n == [3, 0, 0] and seen[0]["blocks.0.up.weight"] is not None


@on_ranks(2)
def test_f13_no_grad_gathers_and_reshards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        seen = []
        with torch.no_grad():
            for _ in range(2):
                output = model(data(rank))
                seen.append((registered(model), output, output.grad_fn is None))
            model.set_reshard_after_forward(False)
            model(data(rank))
            kept = registered(model)
            model.reset_iter_state()
            other = sharded(fsdp)
            n = counts(lambda: (other(data(rank)), other(data(rank))))
        backward(model, data(rank))
        return seen, n, kept, gradients(parameters)

    seen, n, kept, _ = agree(see)
    assert seen[0][0] == ["unsharded", *["sharded"] * 3] and seen[0][2]
    assert n == [7, 0, 0] and kept == ["unsharded"] * 4
