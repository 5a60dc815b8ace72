"""Follows a step on fake tensors: storages that live, operations, and units' boundaries."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_c._compat import _versions
from fsdp_c._estimate import _convolution, _recurrent
from fsdp_c._estimate._segments import Rules, Segment


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


class Recorder(TorchDispatchMode):
    """Follows storages and operations, and lets go of unsharded gradients as units reduce them."""

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
        self.borrowed: list[nn.Parameter] = []
        self.begun: set[object] = set()  # calls whose backward has begun
        self.in_backward: set[str] = set()  # modules whose backward has begun and is not over
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

    def begin_backward_phase(self) -> None:
        """From forward to backward."""
        self.segments[-1].end = self.kept = self.live
        self.segments.append(Segment("backward", "", peak=self.live, calls=1))

    def _begin_backward(self, name: str, call: object, gradient: torch.Tensor) -> None:
        """Of each of a call's outputs; the first one counts, unless an earlier call is not over.

        Where no input wants a gradient (an embedding), a call is over with the whole backward.
        """
        self._enter("backward", name)
        if call not in self.begun and name not in self.in_backward:
            self.in_backward.add(name)
            self.segments[-1].calls += 1
        self.begun.add(call)

    def _end_backward(self, name: str, module: nn.Module) -> None:
        self.in_backward.discard(name)
        if module in self.units:
            self._reduce(module)
        parent = name.rpartition(".")[0]
        while parent and parent not in self.names.values():
            parent = parent.rpartition(".")[0]
        self._enter("backward", parent)

    def _reduce(self, module: nn.Module) -> None:
        if self.rules.keeps_gradients:
            return
        for param in self.borrowed:
            param.grad = None
        inner = [u for u in self.units if u is not module and u in set(module.modules())]
        nested = {id(p) for unit in inner for p in unit.parameters()}
        own = [p for p in module.parameters() if p.grad is not None and id(p) not in nested]
        self.reached.update(own)
        size = sum(p.grad.numel() * p.grad.itemsize for p in own if p.grad is not None)
        self.borrowed = own if size <= self.rules.borrowed_bytes else []
        if not self.borrowed:
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
