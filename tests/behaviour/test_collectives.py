"""W: collectives and their memory; what profilers and logs are shown."""

import logging
import os
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, implementation
from models import data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from behaviour.pairs import (
    Collectives,
    agree,
    backward,
    chain,
    gradients,
    hsdp_mesh,
    linear,
    raised,
    ranges,
    shards,
)
from behaviour.records import collectives, names

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(2)
def test_w1_w2_w3_w5_buffers_of_collectives(rank: int, n_ranks: int) -> None:
    """Seen by whoever replaces torch's functions: sizes, and rank after rank all parameters."""
    seen: list[Any] = []

    def note(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            tensors = [*args, *kwargs.values()]
            found = [t.clone() for t in tensors if isinstance(t, Tensor)]
            seen.append((name, [t.numel() for t in found], found[0]))
            return result

        return call

    def see(fsdp: Any) -> Any:
        seen.clear()
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).view(4, 4))
            model.bias.copy_(torch.arange(100.0, 104.0))
        fsdp.fully_shard(model)
        backward(model, torch.ones(2, 4))
        replicas = linear(fsdp, mesh=hsdp_mesh())
        backward(replicas, torch.ones(2, 4))
        return [*seen]

    functions = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    notes = {name: note(name, getattr(dist, name)) for name in functions}
    with mock.patch.multiple(dist, **notes):
        found = agree(see)
    assert [name for name, _, _ in found] == [
        "all_gather_single",
        "reduce_scatter_single",
        "all_reduce",  # of a unit with one shard and two replicas
    ]
    assert [sizes for _, sizes, _ in found] == [[20, 10], [10, 20], [16]]
    blocks = found[0][2].view(2, 10)
    assert blocks[:, 0].tolist() == [0, 8] and blocks[:, 8].tolist() == [100, 102]


@on_ranks(2)
def test_w4_w6_w7_order_of_collectives(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        found = []
        for wrapped in (True, False):  # by who replaces the functions, and by a mode
            model = chain(fsdp)
            if wrapped:
                with collectives() as seen:
                    backward(model, torch.ones(2, 4))
                found.append(names(seen))
            else:
                with Collectives() as mode:
                    backward(model, torch.ones(2, 4))
                found.append([name.strip("_") for name in mode.names])
        return found

    wrapped, dispatched = agree(see)
    assert wrapped == ["AG"] * 4 + ["RS"] * 2
    assert dispatched == ["allgather_base"] * 4 + ["reduce_scatter_base"] * 2


def without(labels: list[str], *others: str) -> list[str]:
    return [label for label in labels if not any(other in label for other in others)]


class Partial(nn.Module):
    """A root with parameters, a unit of two members of which one never runs, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.used, self.unused, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.used(self.stem(x)))


def partial(fsdp: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    model = Partial()
    fsdp.fully_shard([model.used, model.unused], **options)
    fsdp.fully_shard(model.last, **options)
    return fsdp.fully_shard(model, **options)


@on_ranks(1, 2)
def test_w11_w13_w14_w15_w16_w17_w18_w20_w22_profiler_ranges(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        mesh = cached_mesh((n_ranks,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = partial(fsdp, mesh=mesh, mp_policy=policy)
        found = []
        for step in range(3):
            model.set_requires_gradient_sync(step != 1)
            labels = ranges(lambda: backward(model, data(rank).requires_grad_()))
            # Nothing is gathered ahead on the core, and what is added up is added up where there is
            # something. Torch also waits for buffers that the core does not reuse.
            found.append(sorted(without(labels, "prefetch", "accumulate", "rs_wait")))
        return found

    first, held, last = agree(see)
    assert last == first and len(held) < len(first)
    assert first.count("FSDP::root_pre_forward") == 1
    assert first.count("FSDP::cast_forward_inputs") == 3  # and one more for the root's output
    assert first.count("FSDP::cast_forward_outputs") == 4
    gathered = [label for label in first if "all_gather" in label]
    assert ("FSDP::all_gather (last)" in gathered) == (n_ranks > 1)
    assert "FSDP::post_backward_reduce (used, unused)" in first
    assert "FSDP::post_forward" in first  # the root has no name
    assert not any("reduce" in label for label in held)


class Recomputed(nn.Module):
    """A unit under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@on_ranks(2)
def test_w13_w15_ranges_of_recomputation_and_unshard(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        model = Recomputed()
        fsdp.fully_shard(model.inner, mp_policy=policy)
        fsdp.fully_shard(model, mp_policy=policy)
        step = ranges(lambda: backward(model, data(rank).requires_grad_()))
        by_hand = ranges(lambda: model.inner.unshard(async_op=True).wait())
        return sorted(without(step, "prefetch", "accumulate", "rs_wait")), by_hand

    step, by_hand = agree(see)
    # A recomputation ends as soon as it has what backward needs: before the cast of its output.
    assert step.count("FSDP::cast_forward_inputs") == 3
    assert step.count("FSDP::cast_forward_outputs") == 2
    assert by_hand == ["FSDP::all_gather (inner)", "FSDP::all_gather_copy_out (inner)"]


@on_ranks(2)
def test_w24_lines_of_the_debug_log(rank: int, n_ranks: int) -> None:
    log = logging.getLogger("torch.distributed.fsdp.fully_shard")

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    handler = Notes()

    def see(fsdp: Any) -> Any:
        model = partial(fsdp)
        lines.clear()
        log.addHandler(handler)
        level, propagates = log.level, log.propagate
        log.propagate = False
        try:
            for step_level in (logging.INFO, logging.DEBUG):
                log.setLevel(step_level)
                backward(model, data(rank).requires_grad_())
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagates
        backward(model, data(rank))
        return [line for line in lines if line.startswith("FSDP::")]

    found = agree(see)
    assert found[:3] == [
        "FSDP::root_pre_forward",
        "FSDP::pre_forward",
        "FSDP::pre_forward (used, unused)",
    ]
    assert found.count("FSDP::force_complete_post_forward") == 1
    assert found[-2:] == ["FSDP::post_backward", "FSDP::root_post_backward"]


@on_ranks(2)
def test_w26_a_step_warns_of_nothing(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp, mp_policy=BF16)
        parameters = shards(model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                backward(model, torch.ones(2, 3, 4))
                torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            with torch.no_grad():
                model(torch.ones(2, 4))
        texts = [str(warning.message) for warning in seen]
        if fsdp is torch_fsdp:  # of outputs that are views, which ours need not
            texts = [text for text in texts if "view" not in text]
        return texts, gradients(parameters)

    assert agree(see)[0] == []


@on_ranks(2)
def test_w27_the_usage_key(rank: int, n_ranks: int) -> None:
    keys: list[str] = []

    def see(fsdp: Any) -> Any:
        keys.clear()
        linear(fsdp)
        return [key for key in keys if "fsdp" in key]

    with mock.patch.object(torch._C, "_log_api_usage_once", keys.append):
        assert agree(see) == ["torch.distributed.fsdp.fully_shard"]


# --- collectives of the user ---


class Recorded:
    """A collective that does what torch does, out of memory that it keeps if asked to."""

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self.kept: dict[Any, Tensor] = {}
        self.calls: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append((tuple(size), str(dtype), str(device)))
        if not self.keeps:
            return torch.empty(*size, dtype=dtype, device=device)
        return self.kept.setdefault((*size, dtype), torch.empty(*size, dtype=dtype, device=device))


class Gather(Recorded):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self.calls.append(("gather", async_op))
        dist.all_gather_single(output_tensor, input_tensor.clone(), group=group)


class Reduce(Recorded):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.calls.append(("reduce", str(op).rpartition(".")[2], async_op))
        dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


@on_ranks(1, 2)
def test_w29_w30_w31_w32_memory_and_calls_of_custom_collectives(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        mesh = cached_mesh((n_ranks,))
        model = chain(fsdp, 3, mesh=mesh, mp_policy=BF16)
        parameters = shards(model)
        gather, reduce = Gather(keeps=True), Reduce()
        for unit in model:
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)
        backward(model, torch.full((2, 4), rank + 1.0))
        first = [*gather.calls], [*reduce.calls]
        gather.calls.clear()
        handle = model[0].unshard(async_op=True)
        handle.wait()
        model[0].reshard()
        return first, gather.calls, gradients(parameters)

    (gathers, reduces), later, grads = agree(see)
    bf16, f32 = "torch.bfloat16", "torch.float32"
    size = (16,)
    assert None not in grads.values()
    if n_ranks == 1:  # nothing moves
        assert gathers == later == [] and reduces == [(size, f32, "cpu")] * 6
        return
    assert gathers == [(size, bf16, "cpu"), ("gather", False)] * 6
    assert reduces == [(size, f32, "cpu"), ((8,), f32, "cpu"), ("reduce", "AVG", False)] * 3
    assert later == [(size, bf16, "cpu"), ("gather", True)]


@on_ranks(2)
def test_w28_what_is_no_collective(rank: int, n_ranks: int) -> None:
    """Torch finds out in the next forward; ours says so in the setter, and takes None back."""

    def see(fsdp: Any) -> Any:
        kinds = []
        for name, comm in (("all_gather", object()), ("reduce_scatter", object())):
            model = linear(fsdp)
            setter = getattr(model, f"set_custom_{name}")
            kinds.append(raised(lambda set_it=setter, comm=comm: set_it(comm)))
            kinds.append(raised(lambda model=model: backward(model, torch.ones(1, 4))))
        model = linear(fsdp)
        model.set_custom_all_gather(Gather())
        model.set_custom_all_gather(None)
        kinds.append(raised(lambda: backward(model, torch.ones(1, 4))))
        return kinds

    assert see(torch_fsdp) == ["nothing", "AttributeError"] * 2 + ["AttributeError"]
    ours = implementation()
    if ours is not torch_fsdp:
        assert see(ours) == ["TypeError", "nothing"] * 2 + ["nothing"]
        with mock.patch.dict(os.environ, FSDP_C_STRICT="1"):
            assert see(ours)[:4] == ["nothing", "AttributeError"] * 2


@on_ranks(2)
def test_w34_memory_of_the_group_with_a_custom_reduction(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        model.set_custom_reduce_scatter(Reduce())
        refused = raised(
            lambda: model.set_allocate_memory_from_process_group_for_comm(True),
            "cannot call set_allocate_memory_from_process_group()",
        )
        return refused, type(model._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__

    assert see(torch_fsdp) == ("AssertionError", "ProcessGroupAllocAllGather")
    if (ours := implementation()) is not torch_fsdp:
        assert see(ours) == ("AssertionError", "DefaultAllGather")


@on_ranks(2)
def test_w37_the_separate_group_is_made_once(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        groups = []
        for _ in range(2):
            model[0].set_separate_reduce_scatter_group(True)
            of = [unit._get_fsdp_state()._fsdp_param_group for unit in model]
            groups.append(of[0]._reduce_scatter_process_group)
            alone = of[1]._reduce_scatter_process_group is of[1]._all_gather_process_group
            model[0].set_separate_reduce_scatter_group(False)
        return groups[0] is groups[1], alone

    assert see(torch_fsdp) == (False, True)
    if (ours := implementation()) is not torch_fsdp:
        assert see(ours) == (True, True)


@on_ranks(2)
def test_w38_weights_that_backward_needs_after_all(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        model[1].set_unshard_in_backward(False)
        try:
            backward(model, torch.ones(2, 4, requires_grad=True))
        except RuntimeError as error:
            text = str(error)
        model.reset_iter_state()
        model[1].set_unshard_in_backward(True)
        parameters = shards(model)
        for parameter in parameters.values():
            parameter.grad = None
        backward(model, torch.ones(2, 4, requires_grad=True))
        assert None not in gradients(parameters).values()
        return text

    assert "out of bounds for storage of size 0" in see(torch_fsdp)
    if (ours := implementation()) is not torch_fsdp:
        text = see(ours)
        assert "unit '1'" in text and "set_unshard_in_backward(True)" in text, text
