"""torch.optim's element-wise optimizers see the local tensors of sharded parameters.

An element-wise update of a DTensor whose gradient and state have its placements is the same update
of the local tensors, without the dispatch. The optimizers' `_init_group` collects the tensors of a
step in lists; here the lists get the local tensors. Parameter groups and state are never touched,
so that everyone who looks, at any moment, sees DTensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, optim

from fsdp_c._native import _C
from fsdp_c._optim import _dispatch_modes, _param_lists, _replaced_params
from fsdp_c._optim._param_lists import Members

# By exact type: what a subclass does with parameters is not known.
CLASSES: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

# What an optimizer keeps here, an attribute of it: pickles, copies and state_dict do not see it.
_KNOWN = "_fsdp_c_members"
# With one of these they compute otherwise.
_ADAM_SWITCHES = ("capturable", "differentiable")
_SGD_SWITCHES = ("differentiable",)
# What the core is told of a group, under torch's names.
_ADAM_NUMBERS = ("eps", "weight_decay")
_ADAM_KINDS = ("decoupled_weight_decay", "amsgrad", "maximize")
_SGD_NUMBERS = ("momentum", "dampening", "weight_decay")
_SGD_KINDS = ("nesterov", "maximize")
# What a GradScaler leaves to an optimizer's step: to unscale, and to pass over what is not finite.
_UNSCALED = {"grad_scale": None, "found_inf": None}

# Where torch.compile has a wrapper for what it leaves alone: from its first use on `_init_group`.
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")

_units: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: dict[type[optim.Optimizer], Callable[..., Any]] = {}


def watch(units: Iterable[Any]) -> None:
    """Lets optimizers see the local tensors of these units' parameters."""
    _units.update(units)
    _install()
    _replaced_params.watch(_unsharded)


def _unsharded() -> Iterable[tuple[Tensor, str]]:
    for unit in _units:
        for fsdp_param in unit.fsdp_params:
            if hasattr(fsdp_param, "_unsharded_param"):
                yield fsdp_param._unsharded_param, fsdp_param._name


def _install() -> None:
    for cls in CLASSES:
        original = cls.__dict__.get("_init_group")
        # AdamW has Adam's; what somebody else has put in stays.
        if cls in _originals or original is None or not _are_torchs(original):
            continue
        _originals[cls] = original
        cls._init_group = _replacement(cls, original)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Gives torch.optim's classes back as they were, until the next fully_shard."""
    for cls, original in _originals.items():
        cls._init_group = original  # type: ignore[attr-defined]
    _originals.clear()


def _replacement(cls: type[optim.Optimizer], original: Callable[..., Any]) -> Callable[..., Any]:
    localize = _param_lists.step_momentum if cls is optim.SGD else _param_lists.localize
    torchs_step = _torchs_step(cls)

    @functools.wraps(original)
    def _init_group(
        self: optim.Optimizer, group: dict[str, Any], *lists: list[Any], **named: list[Any]
    ) -> Any:
        members = None
        if (
            not named
            and type(self) in CLASSES
            and not torch.compiler.is_compiling()
            # Another caller, such as a `step` that somebody put in, wants lists of the parameters.
            and _caller() is torchs_step
        ):
            members = _members_of(self, group)
        if members is None:
            return original(self, group, *lists, **named)
        is_stock = _param_lists.is_stock(self.state)
        step = _STEPS.get(cls) if members.is_on_host else None
        if is_stock and step is not None and step(self, group, members.plan):
            return False  # nothing is complex; the lists stay empty
        if is_stock and members.collect(self, group, lists):
            return members.result
        if is_stock and cls is optim.SGD and _param_lists.step_buffers(members, self, group):
            return False
        # For DTensors this changes nothing but the price of each of their attributes.
        alone = torch._C.DisableTorchFunctionSubclass
        with alone() if members.only_known_types else contextlib.nullcontext():
            result = original(self, group, *lists)
        if not group["differentiable"]:
            localize(members, self, group, lists, result)
        return result

    return _init_group


def _caller() -> CodeType | None:
    """Of the function that asks."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _DYNAMO:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _torchs_step(cls: type[optim.Optimizer]) -> CodeType | None:
    """What calls `_init_group` in torch's own step; None if the class has another by now."""
    code = inspect.unwrap(cls.step).__code__
    return code if _is_of_torch(code) else None


def _is_of_torch(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.parent == Path(optim.__file__).parent or str(path) == _DYNAMO


def _runs_torchs_arithmetic(cls: type[optim.Optimizer]) -> bool:
    """Whether nobody has replaced the functions that a pass stands for, to see or change them."""
    names = vars(sys.modules[cls.__module__])
    kind = cls.__name__.lower()
    parts = (kind, f"_single_tensor_{kind}", f"_multi_tensor_{kind}", f"_fused_{kind}")
    return _are_torchs(*[names.get(part) for part in parts])


@functools.lru_cache(maxsize=16)
def _are_torchs(*functions: Any) -> bool:
    for function in functions:
        layer = function
        while layer is not None:
            if not inspect.isfunction(layer) or not _is_of_torch(layer.__code__):
                return False
            layer = getattr(layer, "__wrapped__", None)
    return True


def _members_of(optimizer: optim.Optimizer, group: dict[str, Any]) -> Members | None:
    """What is known of the group; None if it is unusual, or nothing in it is sharded by fsdp_c."""
    params = group["params"]
    if type(params) is not list:
        return None
    known = optimizer.__dict__.setdefault(_KNOWN, {})
    members = known.get(id(group))
    if members is None or not members.plan.is_for(params):
        sharded = {id(p.sharded_param) for unit in _units for p in unit.fsdp_params}
        members = known[id(group)] = Members(params, sharded)
    return members if members.sharded else None


def _step_adam(optimizer: optim.Optimizer, group: dict[str, Any], plan: _C.Params) -> bool:
    """Steps the whole group in one pass over memory; False if torch has to."""
    beta1, beta2 = group["betas"]
    numbers = {"lr": _rate(group), "beta1": beta1, "beta2": beta2, **_of(group, _ADAM_NUMBERS)}
    if any(group[name] for name in _ADAM_SWITCHES) or not _are_plain(numbers.values()):
        return False
    if not _runs_torchs_arithmetic(optim.Adam):  # AdamW's too
        return False
    lanes = _lanes(_agrees, bool(group["fused"]))
    if lanes is None or _is_scaled(optimizer):
        return False
    kind = _of(group, _ADAM_KINDS)
    return plan.step_adam(state=optimizer.state, **numbers, **kind, fused_lanes=lanes)


def _step_sgd(optimizer: optim.Optimizer, group: dict[str, Any], plan: _C.Params) -> bool:
    """The same for SGD."""
    numbers = {"lr": _rate(group), **_of(group, _SGD_NUMBERS)}
    if any(group[name] for name in _SGD_SWITCHES) or not _are_plain(numbers.values()):
        return False
    if not _runs_torchs_arithmetic(optim.SGD):
        return False
    # torch writes the look ahead into the gradients then.
    writes_gradients = group["foreach"] and group["nesterov"]
    lanes = _lanes(_sgd_agrees, bool(group["fused"]))
    if lanes is None or writes_gradients or _is_scaled(optimizer):
        return False
    kind = _of(group, _SGD_KINDS)
    return plan.step_sgd(state=optimizer.state, **numbers, **kind, fused_lanes=lanes)


def _of(group: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: group[name] for name in names}


def _rate(group: dict[str, Any]) -> Any:
    """The learning rate; of a tensor torch's fused kernels take the number."""
    rate = group["lr"]
    return rate.item() if group["fused"] and type(rate) is Tensor and rate.is_cpu else rate


def _is_scaled(optimizer: optim.Optimizer) -> bool:
    return any(getattr(optimizer, name, None) is not None for name in _UNSCALED)


def _are_plain(numbers: Iterable[Any]) -> bool:
    """Whether nobody wants to see what is done with these numbers."""
    return not _dispatch_modes.see_operations() and all(type(n) in (float, int) for n in numbers)


@functools.cache
def _lanes(agrees: Callable[[int], bool], is_fused: bool) -> int | None:
    """How many floats torch's fused kernel takes at a time, 0 without it; None: not known."""
    with torch.inference_mode(False), torch.no_grad():
        return next(filter(agrees, (16, 8) if is_fused else (0,)), None)


def _agrees(fused_lanes: int) -> bool:
    """Whether the pass gives this torch's bits on this CPU, tried on a few numbers."""
    betas = {"beta1": 0.9, "beta2": 0.999}
    switches = dict.fromkeys(_ADAM_SWITCHES, False)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    for numel, *kind in (
        (75, True, False, True),
        (1035, False, False, False),
        (75, False, True, False),
    ):
        kind = dict(zip(_ADAM_KINDS, kind, strict=True))
        for weight_decay in (0.0, 0.01):
            numbers = {"lr": 0.01, **betas, "eps": 1e-8, "weight_decay": weight_decay}
            param, other = _wave(numel), _wave(numel)
            sizes = (numel, numel, numel, ())
            theirs, ours = ([_wave(0).new_zeros(size) for size in sizes] for _ in range(2))
            plan = _C.Params(params=[other], sharded={id(other)})
            for scale in (1.0, 1e-3, 7.0):
                other.grad = (param * scale * numel).sin()
                lists = [[param], [other.grad.clone()], *[[t] for t in theirs]]
                if not kind["amsgrad"]:
                    lists[4] = []
                how = {"foreach": False, "fused": fused_lanes != 0, **switches, **_UNSCALED}
                _param_lists.function_of(optim.Adam)(*lists, **how, **numbers, **kind)
                state = {other: dict(zip(names, ours, strict=True))}
                plan.step_adam(state=state, **numbers, **kind, fused_lanes=fused_lanes)
                if not all(map(torch.equal, [param, *theirs], [other, *ours])):
                    return False
    return True


def _sgd_agrees(fused_lanes: int) -> bool:
    """The same for SGD."""
    for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)):
        for weight_decay in (0.0, 0.01):
            numbers = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
            kind = {"nesterov": nesterov, "maximize": momentum != 0 and weight_decay == 0}
            param, other = _wave(1035), _wave(1035)
            theirs, ours = param.sin(), param.sin()
            plan = _C.Params(params=[other], sharded={id(other)})
            for scale in (1.0, 1e-3, 7.0):
                other.grad = (param * scale * 1035).sin()
                lists = [[param], [other.grad.clone()], [theirs] if momentum else []]
                _param_lists.function_of(optim.SGD)(
                    *lists,
                    foreach=False,
                    fused=fused_lanes != 0,
                    **_UNSCALED,
                    lr=0.01,
                    **numbers,
                    **kind,
                )
                state = {other: {"momentum_buffer": ours}}
                plan.step_sgd(state=state, lr=0.01, **numbers, **kind, fused_lanes=fused_lanes)
                if not torch.equal(param, other) or not torch.equal(theirs, ours):
                    return False
    return True


def _wave(numel: int) -> Tensor:
    return torch.arange(float(numel), device="cpu", dtype=torch.float32).cos()


_STEPS: dict[type[optim.Optimizer], Callable[..., bool]] = {
    optim.Adam: _step_adam,
    optim.AdamW: _step_adam,
    optim.SGD: _step_sgd,
}
