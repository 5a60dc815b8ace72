"""One training step of a model on fake tensors: what each stretch of it computes and keeps.

No memory is taken and no data is read. Of a stack of equal blocks four are run, and the middle is
repeated: the cost of a trace does not grow with depth.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from fsdp_c._estimate import _recurrent, _stacks
from fsdp_c._estimate._recorder import Recorder
from fsdp_c._estimate._segments import Rules, Trace


class NotTraced(ValueError):
    """The model's code raised; the cure depends on who asks."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(f"{why}; {cure}")
        self.why = why


def trace_step(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[[Any], torch.Tensor],
    units: Sequence[nn.Module],
    rules: Rules,
    checkpointed: Iterable[nn.Module] = (),
) -> Trace:
    """Traces a step; `units` have boundaries of their own, the model is one anyway.

    Raises:
        ValueError: the model does not run on fake tensors; with the reason.
    """
    stacks = _stacks.stacks_of(model)
    try:
        if stacks:
            with _stacks.shortened(stacks):
                short = _run(model, inputs, loss, units, rules, checkpointed, stacks)
            extended = _stacks.extended(short, stacks)
            if extended is not None:
                return extended
        return _run(model, inputs, loss, units, rules, checkpointed, {})
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ValueError(
            f"estimate: sizes inside of {type(model).__name__} depend on data ({error.func}), and"
            " a trace has none: estimate a stand-in with fixed sizes, such as experts that each"
            " take topk() of their capacity instead of the rows of a mask"
        ) from error
    except Exception as error:  # whatever the model's code raises
        raise NotTraced(
            f"estimate: {type(model).__name__} cannot be traced on fake tensors"
            f" ({type(error).__name__}: {error})",
            "give inputs= that its forward takes, and a loss= that makes one number of what it"
            " returns",
        ) from error


def _run(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[[Any], torch.Tensor],
    units: Sequence[nn.Module],
    rules: Rules,
    checkpointed: Iterable[nn.Module],
    stacks: dict[str, nn.Module],
) -> Trace:
    inside = set(model.modules())
    blocks = [child for stack in stacks.values() for child in stack.children()]
    unit_set = {unit for unit in units if unit in inside and unit is not model}
    recorder = Recorder(model, unit_set, unit_set | set(blocks), rules)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(_fake_tensors(model, rules.compute_dtype, recorder))
        for module in checkpointed:
            if module in inside:
                stack.enter_context(_checkpointed(module))
        stack.enter_context(recorder.hooks())
        arguments = _pytree.tree_map(lambda x: _fake(x, None), inputs)
        recorder.own(t for t in _pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))
        if rules.on_cpu:
            stack.enter_context(_recurrent.one_call_per_layer())
        stack.enter_context(recorder)
        out = loss(model(*_cast(arguments, rules.compute_dtype)))
        recorder.begin_backward_phase()
        out.backward()
        recorder.finish()
    return Trace(recorder.segments, recorder.kept, recorder.unreached)


def _fake(value: Any, dtype: torch.dtype | None) -> Any:
    """Called under the fake mode: takes no memory."""
    if not isinstance(value, torch.Tensor):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=wanted)


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    """As units do before forward: what it takes is the step's, not the caller's."""
    return _pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, inputs
    )


@contextlib.contextmanager
def _fake_tensors(
    model: nn.Module, dtype: torch.dtype | None, recorder: Recorder
) -> Iterator[None]:
    """Fake parameters and buffers in the place of the model's own, which are put back."""
    made: dict[int, torch.Tensor] = {}
    old: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is None:
                    continue
                old.append((module._parameters, name, param))
                if id(param) not in made:
                    fake = nn.Parameter(_fake(param.detach(), dtype), param.requires_grad)
                    made[id(param)] = fake
                module._parameters[name] = made[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    old.append((module._buffers, name, buffer))
                    module._buffers[name] = _fake(buffer, None)
        recorder.own(made.values())
        recorder.own(buffer for buffer in model.buffers())
        yield
    finally:
        for where, name, value in old:
            where[name] = value


@contextlib.contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    forward = module.forward
    # The number generators of fake tensors have no state that would have to be kept.
    module.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint, forward, use_reentrant=False, preserve_rng_state=False
    )
    try:
        yield
    finally:
        del module.forward
