"""M: what the methods of FSDPModule do, when, and how far down the tree."""

import warnings
import weakref
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import Branches, data
from parity import on_ranks, total
from torch import nn

from behaviour.pairs import (
    agree,
    backward,
    chain,
    counts,
    gradients,
    hsdp_mesh,
    linear,
    local,
    own,
    raised,
    registered,
    sharded,
    shards,
    weights,
)


@on_ranks(2)
def test_m1_reshard_registers_the_shards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        model(data(rank))
        before = registered(model)
        model.reshard()
        return before, registered(model)

    before, after = agree(see)
    assert before == ["unsharded", *["sharded"] * 3] and after == ["sharded"] * 4


@on_ranks(2)
def test_m1_reshard_inside_forward_needs_reshard_after_forward(rank: int, n_ranks: int) -> None:
    """With reshard_after_forward=False a call inside the unit's own forward changes nothing."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp, reshard_after_forward=False)
        seen = []

        class Inside(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.reshard()
                seen.append(own(self))
                return super().forward(x)

        unit = fsdp.fully_shard(Inside(4, 4), reshard_after_forward=False)
        model.append(unit)
        model(torch.ones(2, 4))
        return seen

    assert agree(see) == ["unsharded"]


@on_ranks(2)
def test_m1_reshard_keeps_a_pending_unshard(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        handle = model.unshard(async_op=True)
        model.reshard()
        before = own(model)
        handle.wait()
        return before, own(model)

    assert agree(see) == ("sharded", "unsharded")


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_m2_unshard_registers_at_the_wait(rank: int, n_ranks: int, async_op: bool) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        handle = model.unshard(async_op=async_op)
        kind = "none" if handle is None else "handle"
        assert handle is None or isinstance(handle, fsdp.UnshardHandle)
        at_once = own(model)
        if handle is not None:
            handle.wait()
        return kind, at_once, own(model), model.weight

    kind, at_once, after, weight = agree(see)
    expected = ("handle", "sharded") if async_op else ("none", "unsharded")
    assert (kind, at_once) == expected
    assert after == "unsharded" and weight.tolist() == torch.ones(4, 4).tolist()


@on_ranks(2)
def test_m2_unshard_twice_gathers_once(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        model.unshard()
        first = model.weight
        n_gathers = counts(model.unshard)[0]
        model.unshard(async_op=True).wait()
        return n_gathers, model.weight is first

    assert agree(see) == (0, True)


@on_ranks(2)
def test_m2_unshard_is_not_recursive(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        model.unshard()
        inner = registered(model)
        model.reshard()
        return inner

    assert agree(see) == ["unsharded", *["sharded"] * 3]


@on_ranks(2)
def test_m3_reset_iter_state_is_for_the_root(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, reshard_after_forward=False)
        parameters = shards(model)
        model(data(rank))
        refused = raised(model.blocks[0].reset_iter_state, "must be called on the root")
        before = registered(model)
        model.reset_iter_state()
        after = registered(model)
        backward(model, data(rank))
        return refused, before, after, gradients(parameters)

    refused, before, after, grads = agree(see)
    assert refused == "RuntimeError"
    assert before == ["unsharded"] * 4 and after == ["sharded"] * 4
    assert all(grad is not None for grad in grads.values())


@on_ranks(2)
def test_m4_m28_is_last_backward_is_shared_by_the_tree(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model(data(rank))
        seen = [model._get_fsdp_state()._state_ctx.is_last_backward]
        for last in (False, True):
            model.blocks[1].set_is_last_backward(last)
            seen.append(model._get_fsdp_state()._state_ctx.is_last_backward)
            backward(model, data(rank, last))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == [True, False, True]


@on_ranks(2)
def test_m5_requires_gradient_sync_is_no_sync(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model.set_requires_gradient_sync(False)
        backward(model, data(rank, 0))
        held = gradients(parameters)
        model.set_requires_gradient_sync(True)
        backward(model, data(rank, 1))
        both = gradients(parameters)
        for parameter in parameters.values():
            parameter.grad = None
        backward(model, data(rank, 1))
        return held, both, gradients(parameters)

    held, both, second = agree(see)
    assert set(held.values()) == {None}
    assert any(not torch.equal(both[name], second[name]) for name in both)


@on_ranks(2)
def test_m5_takes_effect_at_the_next_post_backward(rank: int, n_ranks: int) -> None:
    """Also if it is set between forward and backward."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        output = model(torch.ones(2, 4))
        model.set_requires_gradient_sync(False)
        output.sum().backward()
        return weight.grad

    assert agree(see) is None


def hsdp_steps(fsdp: Any, *flags: tuple[str, bool]) -> list[Any]:
    """The local gradient of a matrix of ones after one backward for each of the flags."""
    model = linear(fsdp, mesh=hsdp_mesh())
    weight = model.weight
    seen = []
    for name, value in flags:
        getattr(model, name)(value)
        model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        seen.append(local(weight.grad))
    return seen


@on_ranks(4)
def test_m6_requires_all_reduce_keeps_partial_sums(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        return hsdp_steps(
            fsdp, ("set_requires_all_reduce", False), ("set_requires_all_reduce", True)
        )

    partial, whole = agree(see)
    # Two micro-batches, each the mean of 1, 2, 3 and 4.
    assert partial is None and whole.unique().tolist() == [5.0]


@on_ranks(2)
def test_m6_means_nothing_in_one_dimension(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        model.set_requires_all_reduce(False)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        return local(weight.grad)

    assert agree(see).unique().tolist() == [1.5]


@on_ranks(2)
def test_m7_reshard_after_forward_takes_a_bool(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        kinds = [raised(lambda v=v: model.set_reshard_after_forward(v)) for v in (1, 2, None, "x")]
        model.set_reshard_after_forward(False, False)  # recurse by position
        model(data(rank))
        own_only = registered(model)
        model.set_reshard_after_forward(False)
        model(data(rank))
        return kinds, own_only, registered(model)

    kinds, own_only, everywhere = agree(see)
    assert kinds == ["ValueError"] * 4
    assert own_only == ["unsharded", *["sharded"] * 3] and everywhere == ["unsharded"] * 4


@on_ranks(2)
def test_m7_overrides_the_roots_default(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        model.set_reshard_after_forward(True)
        model(data(rank))
        return registered(model)

    assert agree(see) == ["sharded"] * 4


@on_ranks(2)
def test_m8_reshard_after_backward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        seen = []
        for recurse, value in ((False, False), (True, False), (True, True)):
            model.set_reshard_after_backward(value, recurse=recurse)
            backward(model, data(rank))
            seen.append(registered(model))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen == [["unsharded", *["sharded"] * 3], ["unsharded"] * 4, ["sharded"] * 4]


@pytest.mark.parametrize("way", ["forward", "backward"])
@on_ranks(2)
def test_m9_m10_prefetch_lists_hold_units(rank: int, n_ranks: int, way: str) -> None:
    """A list replaces the one before, an empty one restores the default."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp, 3)
        parameters = shards(model)
        name = f"set_modules_to_{way}_prefetch"
        refused = raised(lambda: getattr(model[0], name)([nn.Linear(1, 1)]), "FSDP")
        seen = []
        for targets in ([model[2]], [model[1], model[2]], []):
            getattr(model[0], name)(targets)
            states = getattr(model[0]._get_fsdp_state(), f"_states_to_{way}_prefetch")
            seen.append([[*model].index(state._modules[0]) for state in states])
            backward(model, torch.ones(2, 4))
        return refused, seen, gradients(parameters)

    refused, seen, _ = agree(see)
    assert refused == "ValueError" and seen == [[2], [1, 2], []]


class Recorded:
    """A custom collective that does what torch does and counts."""

    def __init__(self, n_outputs: int = 0) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.calls: list[list[str]] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        self.sizes.append(tuple(size))
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Recorded):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: Any = False):
        self.calls.append(["gather", *(str(t.numel()) for t in (output_tensor, input_tensor))])
        return dist.all_gather_single(
            output_tensor, input_tensor.clone(), group=group, async_op=async_op
        )


class Reduce(Recorded):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: Any = False
    ):
        self.calls.append(["reduce", *(str(t.numel()) for t in (output_tensor, input_tensor))])
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


@on_ranks(2)
def test_m11_m12_custom_collectives_are_called(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        gather, reduce = Gather(), Reduce()
        model[0].set_custom_all_gather(gather)
        model[1].set_custom_reduce_scatter(reduce)
        backward(model, torch.ones(2, 4))
        return gather.calls, gather.sizes, reduce.calls, reduce.sizes, gradients(parameters)

    gathers, gathered, reduces, reduced, grads = agree(see)
    assert gathers == [["gather", "16", "8"]] * 2 and set(gathered) == {(16,)}
    assert reduces == [["reduce", "8", "16"]] and reduced == [(16,), (8,)]
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "hook"])
@on_ranks(2)
def test_m11_m12_m13_refuse_several_meshes(rank: int, n_ranks: int, name: str) -> None:
    def see(fsdp: Any) -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            ShardPlacementResult,
        )
        from torch.distributed.tensor import Shard

        group = other_group()
        mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("other",))
        info = FSDPMeshInfo(mesh, shard_mesh_dim=0)

        def place(parameter: nn.Parameter) -> Any:
            return ShardPlacementResult(Shard(0), info) if parameter.ndim == 1 else None

        model = linear(fsdp, bias=True, shard_placement_fn=place)
        call = {
            "all_gather": lambda: model.set_custom_all_gather(Gather()),
            "reduce_scatter": lambda: model.set_custom_reduce_scatter(Reduce()),
            "hook": lambda: model.set_all_reduce_hook(lambda t: None),
        }[name]
        return raised(call, "multiple param groups")

    assert agree(see) == "ValueError"


_other_groups: list[Any] = []


def other_group() -> Any:
    """A second process group over all ranks, made once."""
    if not _other_groups:
        _other_groups.append(dist.new_group())
    return _other_groups[0]


@on_ranks(2)
def test_m13_all_reduce_hook_gets_the_reduced_shard(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        seen = []

        def double(reduced: torch.Tensor) -> None:
            seen.append(reduced.clone())
            reduced.mul_(2)

        model.set_all_reduce_hook(double)
        model(torch.ones(1, 4)).sum().backward()
        return seen, local(weight.grad)

    seen, grad = agree(see)
    assert [tensor.shape for tensor in seen] == [(8,)] and seen[0].unique().tolist() == [1]
    assert grad.unique().tolist() == [2]


@on_ranks(2)
def test_m13_no_stream_under_hsdp(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp, mesh=hsdp_mesh())
        text = "stream cannot be set when using native HSDP"
        return raised(lambda: model.set_all_reduce_hook(lambda t: None, stream=object()), text)

    assert agree(see) == "ValueError"


@on_ranks(2)
def test_m14_m28_post_optim_event_is_shared_by_the_tree(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model(data(rank))
        event = Event()
        model.blocks[0].set_post_optim_event(event)
        kept = model._get_fsdp_state()._state_ctx.post_optim_event is event
        backward(model, data(rank))
        return kept, gradients(parameters)

    kept, _ = agree(see)
    assert kept


class Event:
    """Stands for an event; here nothing runs in streams."""


@on_ranks(2)
def test_m14_post_optim_event_is_used_once(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        model(data(rank))
        event = Event()
        model.set_post_optim_event(event)
        kept = weakref.ref(event)
        del event
        model(data(rank))
        return kept() is None

    assert agree(see)


@on_ranks(2)
def test_m15_gradient_divide_factor(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        model.set_gradient_divide_factor(2.0)
        model(torch.ones(1, 4)).sum().backward()
        return local(weight.grad)

    assert agree(see).unique().tolist() == [1]


@on_ranks(2)
def test_m16_old_name_of_the_divide_factor_warns(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(2.0)
        texts = [(w.category.__name__, str(w.message)) for w in caught]
        return texts, model._get_fsdp_state()._fsdp_param_groups[0].gradient_divide_factor

    [(category, text)], factor = agree(see)
    assert category == "DeprecationWarning" and "set_gradient_divide_factor" in text and factor == 2


@on_ranks(2)
def test_m17_forced_sum_divides_afterwards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen = []
        for factor in (None, 1.0, 4.0):
            model = linear(fsdp)
            weight = model.weight
            model.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
            seen.append(local(weight.grad).unique().tolist())
        return seen

    assert agree(see) == [[1.5], [3.0], [0.75]]


@on_ranks(2)
def test_m18_unused_parameters_get_zeros(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches, models.shard_root)
        parameters = shards(model)
        total(model(data(rank))).backward()
        seen = []
        for flag in (False, True):
            for parameter in parameters.values():
                parameter.grad = None
            model.set_reduce_scatter_unused_params(flag)
            backward(model, data(rank), use=(0,))
            seen.append(local(parameters["blocks.1.up.weight"].grad))
        return seen

    without, with_zeros = agree(see)
    assert without is None and not with_zeros.any() and with_zeros.shape[1] == models.WIDTH


@on_ranks(2)
def test_m19_input_buffers_are_counted_from_one(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        set_buffers = model.set_reduce_scatter_max_input_buffers
        kinds = [raised(lambda n=n: set_buffers(n)) for n in (True, 1.0, "2", 0, -1, 1, 3)]
        model.blocks[0].set_reduce_scatter_max_input_buffers(5)
        groups = [
            module._get_fsdp_state()._fsdp_param_groups[0] for module in (model, *model.blocks)
        ]
        kept = [group.reduce_scatter_max_input_buffers for group in groups]
        backward(model, data(rank))
        return kinds, kept, gradients(parameters)

    kinds, kept, _ = agree(see)
    assert kinds == ["TypeError"] * 3 + ["ValueError"] * 2 + ["nothing"] * 2
    assert kept == [3, 5, 3, 3]


@on_ranks(2)
def test_m20_separate_reduce_scatter_group(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        units = (model, *model.blocks)
        groups = [unit._get_fsdp_state()._fsdp_param_groups[0] for unit in units]
        model.set_separate_reduce_scatter_group()
        first = [group._reduce_scatter_process_group for group in groups]
        model.set_separate_reduce_scatter_group()
        again = [group._reduce_scatter_process_group for group in groups]
        backward(model, data(rank))
        model.set_separate_reduce_scatter_group(False)
        back = groups[0]._reduce_scatter_process_group is groups[0]._all_gather_process_group
        one = len({id(group) for group in first}) == 1
        same = all(a is b for a, b in zip(first, again, strict=True))
        return one, same, first[0].group_desc, back, gradients(parameters)

    one, same, description, back, _ = agree(see)
    assert one and same and back and description == "fsdp_reduce_scatter"


class Lookup(nn.Module):
    """An embedding, which backward needs no weights for, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(tokens))


@on_ranks(2)
def test_m21_unshard_in_backward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = Lookup()
        fsdp.fully_shard(model.embedding)
        fsdp.fully_shard(model.layer)
        fsdp.fully_shard(model)
        parameters = shards(model)
        seen = []
        for flag in (True, False):
            model.embedding.set_unshard_in_backward(flag)
            seen.append(counts(lambda: backward(model, torch.tensor([[rank, 3, 5]])))[0])
        return seen, gradients(parameters)

    seen, grads = agree(see)
    assert seen == [4, 3] and all(grad is not None for grad in grads.values())


@on_ranks(2)
def test_m22_memory_from_the_process_group(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        weight = model.weight
        group = model._get_fsdp_state()._fsdp_param_groups[0]

        def classes() -> list[str]:
            comms = (group._all_gather_comm, group._reduce_scatter_comm)
            return [type(comm).__name__ for comm in comms]

        seen = []
        for flag in (True, False):
            model.set_allocate_memory_from_process_group_for_comm(flag)
            seen.append(classes())
            model(torch.ones(1, 4)).sum().backward()
        model.set_custom_all_gather(Gather())
        refused = raised(lambda: model.set_allocate_memory_from_process_group_for_comm(True))
        return seen, refused, local(weight.grad)

    seen, refused, grad = agree(see)
    assert seen == [
        ["ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter"],
        ["DefaultAllGather", "DefaultReduceScatter"],
    ]
    assert refused == "AssertionError" and grad.unique().tolist() == [2]


@on_ranks(2)
def test_m23_symmetric_memory_is_missing_here(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        refused = raised(model.set_symm_mem_for_comm)
        model.set_custom_all_gather(Gather())
        return refused, raised(model.set_symm_mem_for_comm)

    # A build of torch with CUDA has the allocation backend and only misses devices later.
    first = "RuntimeError" if torch.version.cuda is None else "nothing"
    assert agree(see) == (first, "AssertionError")


@on_ranks(2)
def test_m24_async_unshard_in_the_hooks(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model._set_unshard_async_op(True)
        flags = [
            module._get_fsdp_state()._fsdp_param_groups[0].unshard_async_op
            for module in (model, *model.blocks)
        ]
        backward(model, data(rank))
        return flags, gradients(parameters)

    flags, _ = agree(see)
    assert flags == [True] * 4


@on_ranks(2)
def test_m25_a_module_without_state(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        assert model._get_fsdp_state() is not None
        stranger = nn.Linear(2, 2)
        stranger.__class__ = type(model)
        return raised(stranger._get_fsdp_state, "No FSDP state found on")

    assert agree(see) == "AssertionError"


@on_ranks(2)
def test_m26_apply_reshards_first(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp, 5)
        weight = model.weight
        model(torch.ones(1, 5))
        before = own(model)
        model.double()
        dtype = str(model.weight.dtype)
        model.float()
        same = model.weight is weight
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        padded = group.fsdp_params[0]._sharded_param_data
        shares = padded.data_ptr() == weight.to_local().data_ptr()
        return before, own(model), dtype, same, padded.numel(), shares or weight.numel() == 0

    assert agree(see) == ("unsharded", "sharded", "torch.float64", True, 15, True)


@on_ranks(4)
def test_m29_gradient_sync_switches_all_reduce_on(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        return hsdp_steps(
            fsdp, ("set_requires_all_reduce", False), ("set_requires_gradient_sync", True)
        )

    partial, whole = agree(see)
    assert partial is None and whole.unique().tolist() == [5.0]


@on_ranks(2)
def test_m30_gradient_sync_of_the_root_alone(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model.set_requires_gradient_sync(False, recurse=False)
        backward(model, data(rank))
        return gradients(parameters)

    grads = agree(see)
    without = [name for name, grad in grads.items() if grad is None]
    assert sorted(without) == ["scale", "stem.bias", "stem.weight"]


@on_ranks(2)
def test_m31_unshard_before_any_forward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        for unit in (model.blocks[1], model):
            unit.unshard()
        unsharded = {name: p.detach().clone() for name, p in model.named_parameters()}
        backward(model, data(rank))
        return registered(model), unsharded, gradients(parameters)

    after, _, grads = agree(see)
    assert after == ["sharded"] * 4 and all(grad is not None for grad in grads.values())


@on_ranks(2)
def test_m32_forward_waits_for_a_pending_unshard(rank: int, n_ranks: int) -> None:
    """And one that is never waited for is given up at the end of the backward."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches, models.shard_blocks)
        parameters = shards(model)
        model(data(rank))
        model.reset_iter_state()
        handles = [unit.unshard(async_op=True) for unit in model.blocks]
        assert all(handles)
        backward(model, data(rank), use=(0, 1))
        return registered(model), gradients(parameters)

    after, grads = agree(see)
    assert after == ["sharded"] * 4
    assert grads["blocks.0.up.weight"] is not None and grads["blocks.2.up.weight"] is None


@on_ranks(2)
def test_m33_unshard_without_parameters(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        sync = model.unshard()
        handle = model.unshard(async_op=True)
        handle.wait()
        return sync, isinstance(handle, fsdp.UnshardHandle), registered(model)

    assert agree(see) == (None, True, ["nothing", "sharded", "sharded"])


@on_ranks(2)
def test_m34_edits_of_unsharded_parameters_are_lost(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        parameters = shards(model)
        model.unshard()
        with torch.no_grad():
            model.weight.fill_(9)
        seen = model.weight.detach().clone()
        model.reshard()
        after = weights(parameters)
        model.unshard()
        again = model.weight.detach().clone()
        model.reshard()
        names = [name for name in ("no_sync", "full_params", "summon") if hasattr(model, name)]
        return seen, after, again, names

    seen, after, again, names = agree(see)
    assert seen.unique().tolist() == [9] and after["weight"].unique().tolist() == [1]
    assert again.unique().tolist() == [1] and names == []
