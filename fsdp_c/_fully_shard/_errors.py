"""Names the parameter, and the method, when a weight is used where its unit is not in forward.

The error comes from DTensor's dispatch in C++, which knows neither parameters nor units. It begins
with the operator's name, and for that C++ asks Python: nothing else does so in the midst of an
operation on tensors. That is when the weight is looked for, in the expression that fails. Modules
and the launcher look at errors that leave them, should that have found nothing.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import textwrap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard import _fqns

_MIXED = "got mixed torch.Tensor and DTensor"
_ADDED = "FSDP unit '"  # what is added has it, torch's text has not
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Of torch's own code what may stand between a user's and an operation on tensors.
_BETWEEN = tuple(_TORCH + part for part in ("nn" + os.sep, "functional.py", "_tensor.py"))
_BACKWARD = (_TORCH + os.path.join("autograd", "graph.py"), "_engine_run_backward")
_MAX_MEMBERS = 100  # of a list of operands
_MAX_NODES = 10_000  # of a graph that is searched for parameters
_states: weakref.WeakSet[Any] = weakref.WeakSet()  # of all units that live
has_units = False  # once there was one


def watch(state: Any) -> None:
    """Parameters of the state's unit are named from now on."""
    global has_units
    has_units = True
    _states.add(state)
    OpOverload.__str__ = _name_in_error  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives torch's class back as it was, until the next fully_shard."""
    OpOverload.__str__ = _name_of  # type: ignore[method-assign]


def explain(error: BaseException) -> None:
    """Adds to the error's text which sharded parameter was used, and the cures; once."""
    text = str(error)
    if type(error) is not RuntimeError or _MIXED not in text or len(error.args) != 1:
        return
    if _ADDED not in text and (advice := _advice_at(list(_frames(error.__traceback__)))):
        error.args = (f"{text} {advice}",)


_name_of = OpOverload.__str__


def _name_in_error(self: Any) -> str:
    """The operator's name; with advice in front of it where an error begins with it."""
    name = _name_of(self)
    frame = sys._getframe(1)
    if _is_foreign(frame.f_code):
        return name
    try:
        advice = _advice_in(frame, name)
    except Exception:  # the error itself is what counts
        advice = ""
    return f"{advice}. Torch's error: {name}" if advice else name


def _is_foreign(code: CodeType) -> bool:
    """Whether Python code there asks for names of operators, and no error of a user's does."""
    if code.co_filename.startswith(_TORCH):
        is_backward = (code.co_filename, code.co_name) == _BACKWARD
        return not is_backward and not code.co_filename.startswith(_BETWEEN)
    return code.co_name in ("__torch_dispatch__", "__torch_function__")


def _advice_in(frame: FrameType, operator: str) -> str:
    """While the frame, the innermost, calls an operator."""
    if (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD:
        return _advice_on_loss(frame.f_locals.get("t_outputs", ()))
    if not any(isinstance(value, DTensor) for value in _operands(frame, frame.f_lasti)):
        return ""
    advice = _advice_at(list(_callers(frame)))
    if operator == "aten.copy_.default" and advice:
        advice = (
            f"{advice.partition('. ')[0]}. To copy into it, take distribute_tensor(value,"
            " param.device_mesh, param.placements), or fsdp_c.load_full() for a whole state dict;"
            " to copy from it, param.full_tensor() on all ranks"
        )
    return advice


# ---- text ----


def _advice_at(frames: Sequence[tuple[FrameType, int]]) -> str:
    """For an error in the first of the frames, which the others have called."""
    units = _units_by_param()
    for frame, at in frames:
        found = {id(value): value for value in _operands(frame, at)}
        named = [units[key] for key in found if key in units]
        named = named or _behind([v for v in found.values() if isinstance(v, DTensor)], units)
        if named:
            return _advice(named, found, [frame for frame, _ in frames])
    return ""


def _advice(
    named: Sequence[tuple[str, Any]], operands: Iterable[int], frames: Sequence[FrameType]
) -> str:
    params = " and ".join(f"'{param}'" for param, _ in named)
    group = named[0][1]
    if others := [name for key, name in _unsharded().items() if key in operands]:
        return (
            f"Here {params} of {_ADDED}{_unit_name(group)}' is sharded and '{others[0]}' of"
            " another is not, for instance since a root keeps its parameters after forward: call"
            " reshard() on that model first, so that both are shards"
        )
    return (
        f"Here {params} of {_ADDED}{_unit_name(group)}' {'is' if len(named) == 1 else 'are'}"
        f" sharded, because the unit is not in forward. {_cure(group.modules, frames)}"
    )


def _cure(modules: Sequence[nn.Module], frames: Sequence[FrameType]) -> str:
    """By how the weight was come by: the unit's modules, and frames from the inside out."""
    by_hand = "call unshard() on the unit before and reshard() after"
    own = [(owner, f) for f in frames if (owner := _self_of(f)) is not None]
    of_unit = [(owner, f.f_code.co_name) for owner, f in own if any(owner is m for m in modules)]
    if of_unit:
        owner, method = of_unit[-1]  # the outermost, so that all it calls works too
        name = _class_of(owner)
        if method == "forward":
            return f"Call the {name} itself in place of its method forward(), or {by_hand}"
        return (
            f"{name}.{method}() was called, which bypasses the hooks that gather parameters:"
            f" register it, with register_fsdp_forward_method(module, '{method}') after"
            f" fully_shard, or {by_hand}"
        )
    part = next((_class_of(owner) for owner, f in own if f.f_code.co_name == "forward"), "")
    if part and not any(_is_around(owner, modules) for owner, _ in own):
        return (
            f"A {part} of it was called by itself: call the {_class_of(modules[0])} of the unit"
            f" instead, or make the {part} a unit of its own by fully_shard, or {by_hand}"
        )
    return (
        "Call its module instead of using the weight, or register the method that uses it with"
        f" register_fsdp_forward_method(), or {by_hand}. Modules that use one another's weights can"
        " be one unit: fully_shard([a, b])"
    )


def _advice_on_loss(outputs: Iterable[Any]) -> str:
    """For a backward that met sharded parameters."""
    named = _behind([o for o in outputs if isinstance(o, Tensor)], _units_by_param())
    if not named:
        return ""
    params = " and ".join(f"'{param}'" for param, _ in named)
    return (
        f"The loss of this backward was computed from {params} of {_ADDED}"
        f"{_unit_name(named[0][1])}' outside of forward, where it is sharded, and so it became"
        " a DTensor. Add such a term, for instance a penalty on a weight, as term.full_tensor(), or"
        " compute it in forward"
    )


def _self_of(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_torchs = code.co_name in ("_call_impl", "_wrapped_call_impl", "__call__")
    return owner if issubclass(type(owner), nn.Module) and not is_torchs else None


def _is_around(owner: nn.Module, modules: Sequence[nn.Module]) -> bool:
    inside = {id(module) for module in owner.modules()}
    return any(id(module) in inside for module in modules)


def _unit_name(group: Any) -> str:
    if group._module_fqn is None:  # before the first forward
        return ", ".join(map(_class_of, group.modules))
    return _fqns.unit_name(group)


def _class_of(module: nn.Module) -> str:
    """As the user wrote it: fully_shard puts a class in front."""
    cls = type(module)
    return (cls.__mro__[2] if hasattr(module, "_get_fsdp_state") else cls).__name__


# ---- which parameters ----


def _units_by_param() -> dict[int, tuple[str, Any]]:
    """Of all sharded parameters, by id: their own names and their units."""
    return {id(p.sharded_param): (name, group) for p, name, group in _named()}


def _named() -> Iterator[tuple[Any, str, Any]]:
    """Each unit's parameters with their names, and the unit."""
    for group in (group for state in list(_states) for group in state._fsdp_param_groups):
        within = {}
        if any(fsdp_param._param_fqn is None for fsdp_param in group.fsdp_params):
            pairs = [pair for module in group.modules for pair in module.named_parameters()]
            within = {id(param): name for name, param in pairs}
        for fsdp_param in group.fsdp_params:
            own = within.get(id(fsdp_param.sharded_param), fsdp_param._module_info.param_name)
            yield fsdp_param, _fqns.clean(fsdp_param._param_fqn or own), group


def _unsharded() -> dict[int, str]:
    """Names of parameters that stand for sharded ones now, by id."""
    pairs = [(getattr(p, "_unsharded_param", None), name) for p, name, _ in _named()]
    return {id(param): name for param, name in pairs if param is not None}


def _behind(tensors: Sequence[Tensor], units: dict[int, tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The sharded parameters that tensors were computed from."""
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    found = {}
    while todo and len(seen) < _MAX_NODES:
        node = todo.pop()
        leaf = id(getattr(node, "variable", None))
        if leaf in units:
            found[leaf] = units[leaf]
        before = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= before
        todo += before
    return list(found.values())


# ---- what an expression names ----


def _callers(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """The frame and who called it, each with its instruction."""
    while frame is not None:
        yield frame, frame.f_lasti
        frame = frame.f_back


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Where the error came by and who called that, from the inside out: frame and instruction."""
    if trace is None:
        return
    caller = trace.tb_frame.f_back
    passed = []
    while trace is not None:
        passed.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    yield from reversed(passed)
    yield from _callers(caller)


def _operands(frame: FrameType, at: int) -> Iterator[Any]:
    """What the expression that failed names; reading it has no effects."""
    for node in ast.walk(_expression(frame.f_code, at)):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            value = _value(node, frame)
            if type(value) in (tuple, list):
                yield from value[:_MAX_MEMBERS]
            elif value is not None:
                yield value


def _expression(code: CodeType, at: int) -> ast.AST:
    """The source of an instruction, as far as it is there and complete."""
    text = linecache.getlines(code.co_filename)
    try:
        if hasattr(code, "co_positions"):
            return _exact(text, *next(itertools.islice(code.co_positions(), at // 2, None)))
        return _statement(text, next(line for begin, end, line in code.co_lines() if at < end))
    except (SyntaxError, TypeError, ValueError, LookupError, StopIteration):
        return ast.Tuple(elts=[], ctx=ast.Load())


def _exact(text: list[str], line: int, end_line: int, column: int, end_column: int) -> ast.AST:
    lines = [one.encode() for one in text[line - 1 : end_line]]
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    source = textwrap.dedent(b"".join(lines).decode())
    try:
        return ast.parse(f"({source}\n)", mode="eval")
    except SyntaxError:  # a statement, such as `a += b`
        return ast.parse(source)


def _statement(text: list[str], line: int) -> ast.AST:
    """Before Python 3.11 an instruction knows its line alone: the innermost statement there."""
    within = [
        node
        for node in ast.walk(ast.parse("".join(text)))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(within, key=lambda node: node.lineno)


def _value(node: ast.expr, frame: FrameType) -> Any:
    """None where finding out would run code of the user's."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        own: dict[str, Any] = getattr(owner, "__dict__", {})
        if isinstance(owner, nn.Module):
            own = {**own, **owner._modules, **owner._parameters}
        return own.get(node.attr)
    if isinstance(node, ast.Subscript):
        owner = _value(node.value, frame)
        if isinstance(owner, nn.ModuleList | nn.Sequential | nn.ParameterList):
            owner = [*owner._modules.values(), *owner._parameters.values()]
        if type(owner) in (dict, list, tuple):
            try:
                return owner[ast.literal_eval(node.slice)]
            except (LookupError, TypeError, ValueError):
                return None
    return None
