"""PS: private names of FSDP2 that torch's other parts and users' tools touch."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import data
from parity import on_ranks
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state_if_fully_sharded_module
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_c
from behaviour.pairs import (
    agree,
    backward,
    features,
    gradients,
    hsdp_mesh,
    linear,
    local,
    own,
    raised,
    sharded,
    shards,
)

TORCHS_GROUP = _fsdp_param_group.FSDPParamGroup
METHODS = ("unshard", "reshard", "pre_backward", "post_backward")
FUNCTIONS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def group_of(module: nn.Module) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def is_ours(fsdp: Any) -> bool:
    return fsdp is not torch_fsdp


def runs_on_core(module: nn.Module) -> bool:
    return getattr(module._get_fsdp_state(), "_root", None) is not None


@contextlib.contextmanager
def replaced(*places: tuple[Any, str]) -> Iterator[list[str]]:
    """Notes the calls of functions of classes, modules or objects; puts them back at the end."""
    calls: list[str] = []
    originals = [getattr(owner, name) for owner, name in places]

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, noting(name, original))
    try:
        yield calls
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


@on_ranks(2)
def test_ps1_ps4_ps5_ps11_ps12_ps46_torch_recognizes_modules(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        state = model._get_fsdp_state()
        assert isinstance(model, torch_fsdp.FSDPModule)
        assert isinstance(state, _fsdp_state.FSDPState)
        assert all(isinstance(g, TORCHS_GROUP) for g in state._fsdp_param_groups)
        assert all(isinstance(p, _fsdp_param.FSDPParam) for p in group_of(model).fsdp_params)
        assert isinstance(model.unshard(async_op=True), torch_fsdp.UnshardHandle)
        assert torch_fsdp.fully_shard.state(model) is fsdp.fully_shard.state(model) is state
        assert _fsdp_state._get_module_fsdp_state(model) is _get_module_state(model) is state
        assert torch_fsdp.fully_shard.state(model.blocks) is None
        assert _get_module_fsdp_state_if_fully_sharded_module(model) is None
        keys = [key for key in vars(model) if key.startswith("__composable_api_")]
        return sorted(keys), list(_get_registry(model)), _get_registry(model.stem)

    assert agree(see)[1] == ["fully_shard"]


@on_ranks(1)
def test_ps6_ps7_ps9_ps10_dynamo_finds_the_users_class(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        index = torch_fsdp.FSDPModule._orig_cls_mro_index
        assert type(model).__mro__[index] is models.Net
        assert _fully_shard.get_cls_to_fsdp_cls()[models.Net] is type(model)
        with _fully_shard.disable_fsdp_module_new_init():
            bare = type(model).__new__(type(model))
        flags = [
            [
                vars(module).get(name)
                for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
            ]
            for module in model.modules()
        ]
        return index, type(bare).__name__, "_parameters" in vars(bare), flags

    index, name, is_initialized, flags = agree(see)
    assert (index, name, is_initialized) == (2, "Net", False) and flags == [[True, True]] * len(
        flags
    )


@on_ranks(2)
def test_ps13_ps14_ps51_groups_of_a_state(rank: int, n_ranks: int) -> None:
    """What optimizers and analysers walk through."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, shard=models.shard_children)
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
        backward(model, data(rank))
        return [
            (
                len(state._fsdp_param_groups),
                [
                    (p.sharded_param.dtype, tuple(p.sharded_size), tuple(p._orig_size))
                    for p in getattr(state._fsdp_param_group, "fsdp_params", ())
                ],
            )
            for state in states
        ]

    assert agree(see)[0] == (0, []) or len(agree(see)[0][1]) == 1


@on_ranks(2)
def test_ps15_ps20_contexts_say_what_goes_on(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        state, block = model._get_fsdp_state(), model.blocks[1]._get_fsdp_state()
        seen: list[Any] = [len(state._state_ctx.all_states), state._is_root]

        def note(*_: Any) -> None:
            context = state._state_ctx
            root = context.iter_forward_root
            seen.append("root" if root is state else "block" if root is block else "none")
            seen.append(context.post_backward_final_callback_queued)
            seen.append(state._training_state.name)

        model.blocks[1].register_forward_hook(note)
        model.blocks[1].register_forward_hook(
            lambda m, a, out: out.register_hook(note) and None if out.requires_grad else None
        )
        backward(model, data(rank))
        note()
        with torch.no_grad():
            model.blocks[1](data(rank))  # a forward that begins at a unit below the root
        context = state._state_ctx
        assert all(s._state_ctx is context for s in context.all_states)
        seen += [
            len(context.all_states),
            context.is_last_backward,
            context.post_optim_event is None,
        ]
        seen += [state._is_root, block._is_root, len(state._modules), str(state._device)]
        seen += [state._mp_policy == MixedPrecisionPolicy(), state._auto_reshard_after_forward]
        seen += [len(s._modules_to_run_forward) for s in (state, block)]
        seen += [s._states_to_forward_prefetch for s in (state, block)]
        state._lazy_init()
        state._reset_iter_state()
        return seen, raised(block._reset_iter_state)

    seen, _ = agree(see)
    assert seen[2:5] == ["root", False, "FORWARD"] and seen[6] and not seen[9]


@on_ranks(2)
def test_ps16_ps17_communication_contexts_and_final_callback(rank: int, n_ranks: int) -> None:
    names = (
        "all_gather_copy_in_stream all_gather_stream reduce_scatter_stream all_reduce_stream"
        " all_gather_state reduce_scatter_states post_forward_order _last_post_reduce_events"
        " reduce_scatter_max_input_buffers device_handle"
    ).split()

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        backward(model, data(rank))
        state = model._get_fsdp_state()
        context = state._comm_ctx
        assert all(s._comm_ctx is context for s in state._state_ctx.all_states)
        assert all(
            g.comm_ctx is context for s in state._state_ctx.all_states for g in s._fsdp_param_groups
        )
        streams = context.get_all_gather_streams(False, TrainingState.FORWARD)
        seen = [type(getattr(context, name)).__name__ for name in names]
        seen += [len(streams), len(context.post_forward_order), context.all_gather_state is None]
        if not hasattr(state, "finalize_backward"):  # else it is refused outside of a backward
            state._root_post_backward_final_callback()
            state._root_post_backward_final_callback()
        backward(model, data(rank, 1))
        return seen, gradients(parameters)

    agree(see)


@on_ranks(2)
def test_ps19_ps21_hooks_that_a_tool_registers_anew(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen = []
        for shard in (models.shard_blocks, models.shard_grouped):
            model = sharded(fsdp, shard=shard)
            block, parameters = model.blocks[-1], shards(model)
            for step in range(2):
                state = block._get_fsdp_state()
                pre, post = state._pre_forward_hook_handle, state._post_forward_hook_handle
                seen += [type(pre).__name__, pre is post]
                pre.remove()
                post.remove()
                seen += [len(block._forward_pre_hooks), len(block._forward_hooks)]
                state._pre_forward_hook_handle = block.register_forward_pre_hook(
                    state._pre_forward, prepend=True, with_kwargs=True
                )
                state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)
                backward(model, data(rank, step))
                seen.append(gradients(parameters))
            grouped = model.blocks[0]._get_fsdp_state()
            seen.append(grouped._pre_forward_hook_handle is grouped._post_forward_hook_handle)
        return seen

    agree(see)


@on_ranks(2)
def test_ps2_ps22_ps23_methods_replaced_on_one_unit(rank: int, n_ranks: int) -> None:
    """Before the first forward and between two steps: every call goes through the replacement."""

    def see(fsdp: Any) -> Any:
        seen = []
        for n_before in (0, 1):
            model = sharded(fsdp)
            parameters = shards(model)
            for step in range(n_before):
                backward(model, data(rank, step))
                model.reshard()
            assert not n_before or not is_ours(fsdp) or runs_on_core(model)
            group = group_of(model.blocks[1])
            with replaced(*((group, name) for name in METHODS)) as calls:
                backward(model, data(rank, 2))
                seen.append(list(calls))
            backward(model, data(rank, 3))
            seen.append(gradients(parameters))
            assert not is_ours(fsdp) or runs_on_core(model)
        return seen

    seen = agree(see)
    assert set(seen[0]) == set(seen[2]) == set(METHODS)


@on_ranks(2)
def test_ps2_ps17_ps18_methods_replaced_on_one_state(rank: int, n_ranks: int) -> None:
    """Torch calls what stands there. The core would not, and says so at once."""
    fsdp = harness.implementation()
    model = sharded(fsdp)
    backward(model, data(rank))
    model.reshard()
    root, below = (unit._get_fsdp_state() for unit in (model, model.blocks[1]))
    places = [(root, "_pre_backward"), (below, "_pre_backward")]
    if not is_ours(fsdp):
        with replaced(*places) as calls:
            backward(model, data(rank, 1))
        assert len(calls) == 2
        return
    for owner, name in [*places, (root, "_root_post_backward_final_callback")]:
        set_method = lambda owner=owner, name=name: setattr(owner, name, print)  # noqa: E731
        told = raised(set_method, name, "Replace it on torch's class", "post_backward")
        assert told == "NotImplementedError"
    backward(model, data(rank, 1))
    assert runs_on_core(model)


@on_ranks(1)
def test_ps2_methods_replaced_on_the_classes_of_objects(rank: int, n_ranks: int) -> None:
    """Not on torch's classes, which tools may not know of; noticed again after being put back."""

    def see(fsdp: Any) -> Any:
        model, seen = sharded(fsdp), []
        for step in range(3):
            backward(model, data(rank))
            model.reshard()
            with replaced((type(group_of(model)), "post_backward")) as calls:
                backward(model, data(rank, 1 + step))
                seen.append(list(calls))
            assert not is_ours(fsdp) or runs_on_core(model)
        return seen

    assert [len(calls) for calls in agree(see)] == [4, 4, 4]
    fsdp = harness.implementation()
    if is_ours(fsdp):
        model = sharded(fsdp)
        backward(model, data(rank))
        model.reshard()
        for of in (torch_fsdp.FSDPModule._get_fsdp_state, group_of):
            with replaced((type(of(model)), "finalize_backward")):
                told = raised(lambda: model(data(rank)), "finalize_backward", "class FSDP")
                assert told == "NotImplementedError"
        backward(model, data(rank, 1))
        assert runs_on_core(model)


@on_ranks(2)
def test_ps2_ps18_ps22_ps32_ps40_functions_replaced_for_all(rank: int, n_ranks: int) -> None:
    places = [
        *((TORCHS_GROUP, name) for name in METHODS),
        *((_fsdp_param_group, name) for name in FUNCTIONS),
    ]

    def see(fsdp: Any) -> Any:
        seen = []
        for owner, name in ((TORCHS_GROUP, "post_backward"), (_fsdp_param_group, "foreach_reduce")):
            model = sharded(fsdp)
            backward(model, data(rank))
            model.reshard()
            with replaced((owner, name)) as calls:
                backward(model, data(rank, 1))
                seen.append(list(calls))
            assert not runs_on_core(model)
        with replaced((_fsdp_state.FSDPState, "_pre_forward"), *places) as calls:
            model = sharded(fsdp)
            parameters = shards(model)
            backward(model, data(rank))
            seen.append(list(calls))
        node = _fsdp_param_group.RegisterPostBackwardFunction
        original = node.backward
        model = sharded(fsdp)
        try:
            node.backward = staticmethod(lambda *args: seen.append("node") or original(*args))
            backward(model, data(rank).requires_grad_())
        finally:
            node.backward = original
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert {*METHODS, *FUNCTIONS, "_pre_forward"} == set(seen[2]) and "node" in seen


@on_ranks(2)
def test_ps2_replaced_while_gradients_accumulate(rank: int, n_ranks: int) -> None:
    """A function that is replaced in the middle of an accumulation counts from the next step on."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        model.set_requires_gradient_sync(False)
        backward(model, data(rank))
        model.set_requires_gradient_sync(True)
        with replaced((TORCHS_GROUP, "post_backward")) as calls:
            backward(model, data(rank, 1))
            model.reshard()
            calls.clear()
            backward(model, data(rank, 2))
        return len(calls), gradients(parameters)

    assert agree(see)[0] == 4
    ours = harness.implementation()
    if is_ours(ours):
        model = sharded(ours)
        model.set_requires_gradient_sync(False)
        backward(model, data(rank))
        set_hook = lambda: setattr(group_of(model), "_all_reduce_hook", print)  # noqa: E731
        assert raised(set_hook, "_all_reduce_hook", "(root)", "synchroni") == "RuntimeError"
        set_method = lambda: setattr(group_of(model), "_to_sharded", print)  # noqa: E731
        assert raised(set_method, "_to_sharded", "(root)", "calls") == "NotImplementedError"


@on_ranks(2)
def test_ps3_modes_see_collectives(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, mesh=hsdp_mesh())
        with CommDebugMode() as mode:
            backward(model, data(rank))
        return {str(name): count for name, count in mode.get_comm_counts().items()}

    assert sum(agree(see).values()) > 0


@on_ranks(2)
def test_ps1_ps2_ps19_ps23_memory_tracker(rank: int, n_ranks: int) -> None:
    """torch's own tracker, in the first step and after one; what it counts: see test_tools.py."""

    def see(fsdp: Any) -> Any:
        seen = []
        for n_before in (0, 1):
            model = sharded(fsdp)
            optimizer = torch.optim.Adam(model.parameters())
            parameters = shards(model)
            for _ in range(n_before):
                backward(model, data(rank))
                optimizer.step()
                optimizer.zero_grad()
                model.reshard()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((data(rank),))
            with tracker:
                backward(model, data(rank))
                optimizer.step()
            peak = tracker.get_tracker_snapshot("peak")
            assert all(kinds["Total"] > 0 for kinds in peak.values())
            backward(model, data(rank, 1))
            seen.append(gradients(parameters))
        return seen

    agree(see)


@on_ranks(2)
def test_ps24_ps25_ps28_ps31_what_a_group_says(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        group = group_of(model)

        def states() -> Any:
            return (
                group._sharded_state.name,
                (group.is_sharded, group.is_unsharded, group.is_sharded_post_forward),
                group._all_gather_result is not None,
                own(model.stem),
            )

        seen: list[Any] = [states(), [p._module_info.param_name for p in group.fsdp_params]]
        for _ in range(2):  # before the first forward, and after it
            model.unshard(async_op=True)
            seen.append(states())
            group.wait_for_unshard()
            seen.append(states())
            model.reshard()
            seen.append(states())
            model(data(rank))
            seen.append(states())
            model.reshard()
        with group.use_training_state(TrainingState.PRE_BACKWARD):
            seen.append(group._training_state.name)
        seen += [group._training_state.name, group._reshard_after_forward]
        seen += [[p._param_fqn for p in group.fsdp_params], group._module_fqn]
        seen += [group._with_fqn("label"), len(group.modules), group.modules[0] is model]
        seen += [group._param_group_index, group._num_param_groups, group._partial_reduce_output]
        seen += [group._all_reduce_state, group._reduce_dtype]
        return seen

    assert agree(see)[2][2]


@on_ranks(2)
def test_ps27_a_backward_that_is_ended_by_hand(rank: int, n_ranks: int) -> None:
    """Micro-batches without synchronization, then each unit's end, as schedules of old did."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        groups = [group_of(unit) for unit in (model, *model.blocks)]
        seen = []
        for step in range(2):
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            backward(model, data(rank, step))
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
            for group in groups:
                group.post_backward()
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
            seen += [gradients(parameters), own(model.stem)]
        return seen

    seen = agree(see)
    assert None not in seen[0].values() and seen[1] == "sharded"


@on_ranks(2)
def test_ps26_ps27_ps35_bare_group(rank: int, n_ranks: int) -> None:
    """A group made by its constructor, and the steps of a forward by hand."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        group, policy = group_of(model), MixedPrecisionPolicy()
        empty = type(group)([], (model,), *[None] * 2, group.device, None, policy, None)
        seen: list[Any] = [len(empty.fsdp_params), empty.is_sharded]
        model._get_fsdp_state()._lazy_init()
        for leave in (group._to_sharded, group.reshard):
            group.unshard()
            group.wait_for_unshard()
            seen.append(own(model))
            leave()
            seen.append(own(model))
        group._to_unsharded()
        seen.append(own(model))
        group.reshard()
        args, kwargs = group.pre_forward(model, (torch.ones(1, 4),), {})
        seen += [own(model), group._training_state.name, len(args), kwargs]
        group.post_forward(model, args, model.weight.sum())
        seen += [own(model), group._training_state.name]
        group.reshard()
        group.finalize_backward()
        shard = group.fsdp_params[0]
        again = shard.to_sharded_dtensor(torch.ones_like(shard.sharded_param.to_local()))
        return seen, own(model), local(again), again.placements == shard.sharded_param.placements

    agree(see)


@on_ranks(4)
def test_ps29_process_groups_of_a_unit(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, mesh=hsdp_mesh())
        backward(model, data(rank))
        seen = []
        for group in (group_of(model), group_of(model.blocks[0])):
            seen += [type(group.mesh_info).__name__, group.post_forward_mesh_info is None]
            seen.append(dist.get_process_group_ranks(group._all_gather_process_group))
            seen.append(dist.get_process_group_ranks(group._reduce_scatter_process_group))
            seen.append(dist.get_process_group_ranks(group._all_reduce_process_group))
        return seen

    assert len(agree(see)[2]) == 2


@on_ranks(2)
def test_ps30_flags_written_directly(rank: int, n_ranks: int) -> None:
    names = (
        "reduce_grads all_reduce_grads reshard_after_backward gradient_divide_factor"
        " reduce_scatter_unused_params force_sum_reduction_for_comms unshard_async_op"
        " unshard_in_backward reduce_scatter_max_input_buffers _all_reduce_hook"
        " _all_reduce_hook_stream"
    ).split()

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters, group = shards(model), group_of(model.blocks[0])
        seen: list[Any] = [[getattr(group, name, "none") for name in names]]
        for name, value in (
            ("reduce_grads", False),
            ("reduce_grads", True),
            ("reshard_after_backward", False),
            ("unshard_in_backward", True),
        ):
            setattr(group, name, value)
            backward(model, data(rank))
            seen += [gradients(parameters), own(model.blocks[0].up)]
        return seen

    seen = agree(see)
    assert seen[1]["blocks.0.up.weight"] is None and seen[3]["blocks.0.up.weight"] is not None
    assert seen[6] == "unsharded"


@on_ranks(2)
def test_ps33_ps34_ps37_ps38_what_a_parameter_says(rank: int, n_ranks: int) -> None:
    names = (
        "orig_dtype param_dtype reduce_dtype is_dtensor offload_to_cpu grad_offload_event"
        " _param_fqn _orig_param_uid"
    ).split()

    def see(fsdp: Any) -> Any:
        original = nn.Linear(5, 3)
        weight = original.weight
        model = fsdp.fully_shard(original)
        param = group_of(model).fsdp_params[0]
        seen: list[Any] = [hasattr(param, "_unsharded_param"), hasattr(weight, "_fsdp_orig_uid")]
        assert param.sharded_param is model.weight and not hasattr(model.weight, "_fsdp_orig_uid")
        model.unshard()
        assert param.unsharded_param is param._unsharded_param is model.weight
        seen += [hasattr(model.weight, "_fsdp_orig_uid"), param.sharded_state.name]
        model.reshard()
        backward(model, torch.ones(2, 5))
        seen += [type(getattr(param, name, None)).__name__ for name in names]
        seen += [param.sharded_state.name, param.mesh_info.mesh.size(), param._param_fqn]
        seen += [tuple(param.padded_sharded_param_size), tuple(param.sharded_size)]
        seen += [tuple(param._orig_size), str(param.fsdp_placement), param.orig_dtype]
        seen += [tuple(param.contiguous_sharded_stride), param._sharding_spec.shape]
        padded, shard = param._sharded_param_data, param.sharded_param.to_local()
        seen += [padded, padded.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()]
        return seen, raised(lambda: param.init_dtype_attrs(MixedPrecisionPolicy()))

    seen, _ = agree(see)
    assert seen[:3] == [False, True, False] and seen[-1]


@on_ranks(2)
def test_ps36_gradients_between_micro_batches(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        param = group_of(model.blocks[0]).fsdp_params[0]
        model.set_requires_gradient_sync(False)
        seen = []
        for step in range(2):
            backward(model, data(rank, step))
            seen.append(local(param._unsharded_param.grad))
        model.set_requires_gradient_sync(True)
        backward(model, data(rank, 2))
        return seen, local(param._unsharded_param.grad), gradients(parameters)

    assert agree(see)[0][1] is not None


@pytest.mark.skipif(features.grad_dtype, reason="nothing is kept beside the parameter any more")
@on_ranks(2)
def test_ps36_gradients_kept_beside_the_parameter(rank: int, n_ranks: int) -> None:
    """With a wider `reduce_dtype`; tools read, add to and clear them between micro-batches."""

    def see(fsdp: Any) -> Any:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = linear(fsdp, mp_policy=policy)
        parameters = shards(model)
        (param,) = group_of(model).fsdp_params
        seen = [param.unsharded_accumulated_grad]
        model.set_requires_gradient_sync(False)
        for step in range(3):
            backward(model, data(rank, step, 2, 4))
            seen.append(param.unsharded_accumulated_grad.clone())
            if step == 1:
                param.unsharded_accumulated_grad = None
        param.unsharded_accumulated_grad += 1
        param._unsharded_param.grad = torch.full((4, 4), 0.5, dtype=torch.bfloat16)
        model.unshard()
        param.accumulate_unsharded_grad_if_needed()
        seen.append(param._unsharded_param.grad)
        model.set_requires_gradient_sync(True)
        backward(model, data(rank, 3, 2, 4))
        return seen, param.unsharded_accumulated_grad, gradients(parameters)

    held, after, _ = agree(see)
    assert held[0] is None and held[1].dtype is torch.float32 and held[-1] is after is None


@on_ranks(2)
def test_ps39_hooks_after_gradients(rank: int, n_ranks: int) -> None:
    """In the order of the unit's parameters, each when all of its gradient is there."""

    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        seen: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            unit = ".".join(name.split(".")[:2]) if name.startswith("blocks") else "root"
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name, u=unit: seen.setdefault(u, []).append((n, local(p.grad)))
            )
        backward(model, data(rank))
        return dict(sorted(seen.items()))

    assert len(agree(see)) == 4


@on_ranks(1)
def test_ps41_ps42_ps43_ps44_ps45_ps47_ps52_ps53_modules_stay_torchs(
    rank: int, n_ranks: int
) -> None:
    """All that torch's modules define stays importable from there, the very objects."""
    prefix = "torch.distributed.fsdp"
    before = {
        name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith(prefix)
    }
    operators = set(dir(torch.ops.fsdp))
    fsdp_c.install()
    try:
        assert torch_fsdp.fully_shard is fsdp_c.fully_shard
        model = sharded(torch_fsdp)
        assert runs_on_core(model) or model(data(rank)) is not None and runs_on_core(model)
        for name, names in before.items():
            now = vars(sys.modules[name])
            changed = {key for key, value in names.items() if now.get(key) is not value}
            assert changed <= {"fully_shard"}, name
    finally:
        fsdp_c.uninstall()
    assert all(
        vars(sys.modules[name]).get(key) is value
        for name, names in before.items()
        for key, value in names.items()
    )
    assert operators <= set(dir(torch.ops.fsdp))


@on_ranks(2)
def test_ps54_storages_of_shards_that_are_emptied(rank: int, n_ranks: int) -> None:
    """Never a crash: shared memory does as torch's storages do, or refuses."""
    for fsdp in (torch_fsdp, harness.implementation()):
        model = linear(fsdp)
        backward(model, torch.ones(2, 4))
        model.reshard()
        param = group_of(model).fsdp_params[0]
        storage = param._sharded_param_data.untyped_storage()
        outcome = raised(lambda storage=storage: storage.resize_(0))
        assert outcome in ("nothing", "RuntimeError")
        assert (storage.size() == 0) == (outcome == "nothing")
