"""One training step of a model on fake tensors: what each stretch of it computes and keeps.

No memory is taken and no data is read. Of a stack of equal blocks four are run, and the middle is
repeated: the cost of a trace does not grow with depth.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_c._compat import _versions
from fsdp_c._estimate import _convolution, _recurrent

# Blocks of a stack that are run: a first, two in the middle to compare, a last.
_KEPT = 4


@dataclass
class Segment:
    """A stretch of a step between two boundaries of units or blocks."""

    phase: str  # "forward" or "backward"
    module: str  # dotted name; "" is the model itself
    flops: int = 0  # of matrix products and convolutions
    matrix_bytes: int = 0  # that those read and write
    other_bytes: int = 0  # that all other operations read and write
    n_ops: int = 0
    peak: int = 0  # bytes alive at most: activations and whole gradients, without parameters
    end: int = 0  # bytes alive at its end
    calls: int = 0  # how often the module's forward or backward begins with it


@dataclass(frozen=True)
class Trace:
    segments: list[Segment]
    kept: int  # bytes alive between forward and backward
    unreached: frozenset[str] = frozenset()  # parameters that want a gradient and get none

    @property
    def peak(self) -> int:
        return max((segment.peak for segment in self.segments), default=0)

    @property
    def flops(self) -> int:
        return sum(segment.flops for segment in self.segments)

    def calls(self, phase: str, module: str) -> int:
        """How often that module runs, or its gradients do."""
        return sum(s.calls for s in self.segments if (s.phase, s.module) == (phase, module))


@dataclass(frozen=True)
class Rules:
    """What happens to whole gradients: when a unit's are reduced, and when they are let go."""

    compute_dtype: torch.dtype | None = None  # of parameters and inputs while they compute
    holds: bool = False  # to the end of the step, whole
    lent_bytes: int = 0  # a unit's gradients up to this size wait for the next unit's reduction
    on_cpu: bool = False  # by torch's operators for the CPU


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
    stacks = _stacks_of(model)
    try:
        if stacks:
            with _shortened(stacks):
                short = _run(model, inputs, loss, units, rules, checkpointed, stacks)
            grown = _grown(short, model, stacks)
            if grown is not None:
                return grown
        return _run(model, inputs, loss, units, rules, checkpointed, {})
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ValueError(
            f"estimate: sizes inside of {type(model).__name__} depend on data ({error.func}), and"
            " a trace has none: estimate a stand-in with fixed sizes, such as experts that each"
            " take topk() of their capacity instead of the rows of a mask"
        ) from error
    except Exception as error:  # whatever the model's code raises
        raise ValueError(
            f"estimate: {type(model).__name__} cannot be traced on fake tensors"
            f" ({type(error).__name__}: {error}); give inputs= that its forward takes, and a loss="
            " that makes one number of what it returns"
        ) from error


# ---- stacks of equal blocks ----


def _signature(module: nn.Module, index: int) -> tuple[Any, ...]:
    """What makes a block do what it does, except its own position."""
    parts: list[Any] = []
    for name, child in module.named_modules():
        parts.append((name, type(child)))
        for key, value in vars(child).items():
            if isinstance(value, (bool, float, str)) or (
                isinstance(value, int) and not (value == index and "id" in key)
            ):
                parts.append((key, value))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        parts.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return tuple(parts)


def _stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Containers of more equal blocks than are worth running; outermost ones."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name == other or name.startswith(f"{other}.") for other in found):
            continue
        children = list(module.children())
        if type(module) not in (nn.ModuleList, nn.Sequential) or len(children) <= _KEPT:
            continue
        first, *rest = (_signature(child, i) for i, child in enumerate(children))
        if any(True for _ in children[0].parameters()) and all(one == first for one in rest):
            found[name] = module
    return found


@contextlib.contextmanager
def _shortened(stacks: dict[str, nn.Module]) -> Iterator[None]:
    whole = {name: dict(stack._modules) for name, stack in stacks.items()}
    try:
        for stack in stacks.values():
            kept = list(stack._modules.items())[:_KEPT]
            stack._modules.clear()
            stack._modules.update(kept)
        yield
    finally:
        for name, stack in stacks.items():
            stack._modules.clear()
            stack._modules.update(whole[name])


def _grown(short: Trace, model: nn.Module, stacks: dict[str, nn.Module]) -> Trace | None:
    """The trace of the whole model; None if the middle blocks are not alike after all."""
    segments, kept, unreached = short.segments, short.kept, short.unreached
    for name, stack in stacks.items():
        names = [f"{name}.{key}".lstrip(".") for key in stack._modules]
        added = _repeat(segments, names)
        if added is None:
            return None
        segments, per_block = added
        kept += per_block * (len(names) - _KEPT)
        unreached = _spread(unreached, names)
    return Trace(segments, kept, unreached)


def _spread(parameters: frozenset[str], names: list[str]) -> frozenset[str]:
    """Names in blocks that ran, as names in all blocks: those that did not are like the third."""
    found = {p for p in parameters if not any(p.startswith(f"{n}.") for n in names[:_KEPT])}
    for i, name in enumerate(names):
        like = names[3 if name == names[-1] else min(i, 2)]
        found |= {name + p[len(like) :] for p in parameters if p.startswith(f"{like}.")}
    return frozenset(found)


def _is_in(segment: Segment, block: str) -> bool:
    return segment.module == block or segment.module.startswith(f"{block}.")


def _span(segments: list[Segment], phase: str, block: str) -> tuple[int, int] | None:
    """Where a block's segments lie: they are next to each other if it runs once."""
    places = [i for i, s in enumerate(segments) if s.phase == phase and _is_in(s, block)]
    if not places or any(
        s.module.count(".") == block.count(".") and not _is_in(s, block)
        for s in segments[places[0] : places[-1] + 1]
        if s.module.rpartition(".")[0] == block.rpartition(".")[0] and s.module
    ):
        return None
    return places[0], places[-1] + 1


def _repeat(segments: list[Segment], names: list[str]) -> tuple[list[Segment], int] | None:
    """Repeats the third of four blocks; bytes that were kept per block stay alive meanwhile."""
    n_more = len(names) - _KEPT
    spans = {
        (phase, i): _span(segments, phase, names[i])
        for phase in ("forward", "backward")
        for i in range(_KEPT)
    }
    if any(span is None for span in spans.values()):
        return None
    at = {key: span for key, span in spans.items() if span is not None}
    # A period reaches from where one middle block begins to where its neighbour does.
    first = at["forward", 1][0], at["forward", 2][0]
    second = at["forward", 2][0], at["forward", 3][0]
    third = at["backward", 2][0], at["backward", 1][0]
    fourth = at["backward", 1][0], at["backward", 0][0]
    if not (_alike(segments, first, second) and _alike(segments, third, fourth)):
        return None
    grown = segments[second[1] - 1].end - segments[first[1] - 1].end
    shrunk = segments[third[1] - 1].end - segments[fourth[1] - 1].end
    out = list(segments[: second[0]])
    for k in range(n_more + 1):
        out += [_moved(s, grown * k, names[2], names[2 + k]) for s in segments[slice(*second)]]
    shift = grown * n_more
    out += [_moved(s, shift, names[3], names[-1]) for s in segments[second[1] : third[0]]]
    for k in range(n_more + 1):
        by, name = shift - shrunk * k, names[2 + n_more - k]
        out += [_moved(s, by, names[2], name) for s in segments[slice(*third)]]
    rest = shift - shrunk * n_more
    return out + [_moved(s, rest, "", "") for s in segments[third[1] :]], grown


def _alike(segments: list[Segment], a: tuple[int, int], b: tuple[int, int]) -> bool:
    left, right = segments[slice(*a)], segments[slice(*b)]
    return len(left) == len(right) and all(
        (x.flops, x.matrix_bytes, x.other_bytes, x.n_ops, x.calls)
        == (y.flops, y.matrix_bytes, y.other_bytes, y.n_ops, y.calls)
        for x, y in zip(left, right, strict=True)
    )


def _moved(segment: Segment, by: int, old: str, new: str) -> Segment:
    module = segment.module
    if old and _is_in(segment, old):
        module = new + module[len(old) :]
    return replace(segment, module=module, peak=segment.peak + by, end=segment.end + by)


# ---- one run ----


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
    recorder = _Recorder(model, unit_set, unit_set | set(blocks), rules)
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
        recorder.turn()
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
    model: nn.Module, dtype: torch.dtype | None, recorder: _Recorder
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


class _Boundary(torch.autograd.Function):
    """Passes tensors on; its backward is the end of a module's backward."""

    @staticmethod
    def forward(ctx: Any, on_end: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.on_end = on_end
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.on_end()
        return None, *grads


class _Recorder(TorchDispatchMode):
    """Follows storages and operations, and lets go of whole gradients as units reduce them."""

    def __init__(
        self, model: nn.Module, units: set[nn.Module], boundaries: set[nn.Module], rules: Rules
    ) -> None:
        super().__init__()
        self.rules = rules
        self.flops_of = {**_versions.flop_formulas(), **_recurrent.flop_formulas()}
        self.live = 0
        self.kept = 0
        self.known: dict[int, int] = {}
        self.stack = [""]
        self.segments = [Segment("forward", "", calls=1)]
        self.names = {m: name for name, m in model.named_modules() if m in boundaries}
        self.units = units
        self.model = model
        self.lent: list[nn.Parameter] = []
        self.begun: set[object] = set()  # calls whose backward has begun
        self.whole: set[str] = set()  # modules whose parameters backward has, and not given up
        self.reached: set[nn.Parameter] = set()  # that have had a gradient
        self.unreached: frozenset[str] = frozenset()

    # -- boundaries

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        for module, name in self.names.items():
            before = functools.partial(self._before, name)
            after = functools.partial(self._after, name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, phase: str, name: str) -> None:
        last = self.segments[-1]
        last.end = self.live
        if (last.phase, last.module) != (phase, name):
            self.segments.append(Segment(phase, name, peak=self.live))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._phase == "backward":  # recomputed: a stretch of the backward it is in
            return None
        self.stack.append(name)
        self._enter("forward", name)
        self.segments[-1].calls += 1
        flat, spec = _pytree.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]
        if places:
            end = functools.partial(self._end_backward, name, module)
            for i, tensor in zip(
                places, _Boundary.apply(end, *(flat[i] for i in places)), strict=True
            ):
                flat[i] = tensor
            return _pytree.tree_unflatten(flat, spec)
        return None

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase == "backward":
            return
        self.stack.pop()
        begin = functools.partial(self._begin_backward, name, object())
        for tensor in _pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)
        self._enter("forward", self.stack[-1])

    @property
    def _phase(self) -> str:
        return self.segments[-1].phase

    def turn(self) -> None:
        """From forward to backward."""
        self.segments[-1].end = self.kept = self.live
        self.segments.append(Segment("backward", "", peak=self.live, calls=1))

    def _begin_backward(self, name: str, call: object, gradient: torch.Tensor) -> None:
        """Of each of a call's outputs; the first one counts, unless an earlier call is not over.

        Where no input wants a gradient (an embedding), a call is over with the whole backward.
        """
        self._enter("backward", name)
        if call not in self.begun and name not in self.whole:
            self.whole.add(name)
            self.segments[-1].calls += 1
        self.begun.add(call)

    def _end_backward(self, name: str, module: nn.Module) -> None:
        self.whole.discard(name)
        if module in self.units:
            self._reduce(module)
        parent = name.rpartition(".")[0]
        while parent and parent not in self.names.values():
            parent = parent.rpartition(".")[0]
        self._enter("backward", parent)

    def _reduce(self, module: nn.Module) -> None:
        if self.rules.holds:
            return
        for param in self.lent:
            param.grad = None
        inner = [u for u in self.units if u is not module and u in set(module.modules())]
        nested = {id(p) for unit in inner for p in unit.parameters()}
        own = [p for p in module.parameters() if p.grad is not None and id(p) not in nested]
        self.reached.update(own)
        size = sum(p.grad.numel() * p.grad.itemsize for p in own if p.grad is not None)
        self.lent = own if size <= self.rules.lent_bytes else []
        if not self.lent:
            for param in own:
                param.grad = None

    def finish(self) -> None:
        self.segments[-1].end = self.live
        self.reached.update(p for p in self.model.parameters() if p.grad is not None)
        self.unreached = frozenset(
            name
            for name, param in self.model.named_parameters()
            if param.requires_grad and param not in self.reached
        )
        for param in self.model.parameters():
            param.grad = None

    # -- storages and operations

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks storages as parameters or inputs, which are counted elsewhere."""
        for tensor in tensors:
            self.known[tensor.untyped_storage()._cdata] = 0

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = size = storage.nbytes()
        self.live += size
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self.known.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = _recurrent.with_workspace(func, args, func(*args, **kwargs))
        read = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t in _pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        for tensor in written:
            self._see(tensor)
        segment = self.segments[-1]
        scratch = _convolution.scratch(func, args, out) if self.rules.on_cpu else 0
        segment.peak = max(segment.peak, self.live + scratch)
        sources = {t.untyped_storage()._cdata for t in read}
        is_view = all(t.untyped_storage()._cdata in sources for t in written)
        if is_view and not func._schema.is_mutable:
            return out
        n_bytes = sum(t.numel() * t.itemsize for t in (*read, *written))
        segment.n_ops += 1
        formula = self.flops_of.get(func._overloadpacket)
        if formula is None:
            segment.other_bytes += n_bytes
        else:
            segment.matrix_bytes += n_bytes
            segment.flops += formula(*args, **kwargs, out_val=out)
        return out
