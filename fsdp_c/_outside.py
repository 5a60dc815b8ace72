"""Names the parameter when a weight is used where its unit is not in forward.

The error comes from DTensor's dispatch in C++, which knows neither parameters nor units. Modules
and the launcher look at errors that leave them, and find the weight in the expression that failed.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import textwrap
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import nn

from fsdp_c import _names, _plan

_MIXED = "got mixed torch.Tensor and DTensor"
_states: weakref.WeakSet[Any] = weakref.WeakSet()  # of all units that live


def watch(state: Any) -> None:
    """Parameters of the state's unit are named from now on."""
    _states.add(state)


def explain(error: BaseException) -> None:
    """Adds to the error's text which sharded parameter was used, and the cures; once."""
    text = str(error)
    if type(error) is not RuntimeError or _MIXED not in text or len(error.args) != 1:
        return
    units = _units_by_param()
    for frame, at in _frames(error.__traceback__):
        found = {id(value): value for value in _operands(frame, at)}
        named = [units[key] for key in found if key in units]
        if named:
            error.args = (f"{text} {_advice(named)}",)
            return


def _advice(named: list[tuple[str, str]]) -> str:
    params = " and ".join(f"'{param}'" for param, _ in named)
    unit = named[0][1]
    return (
        f"Here {params} of FSDP unit '{unit}' {'is' if len(named) == 1 else 'are'} sharded,"
        " because the unit is not in forward. Call its module instead of using the weight, or"
        " register the method that uses it with register_fsdp_forward_method(), or call unshard()"
        " on the unit before and reshard() after. Modules that use one another's weights can be"
        " one unit: fully_shard([a, b])"
    )


def _units_by_param() -> dict[int, tuple[str, str]]:
    """Of all sharded parameters, by id: their own and their unit's name."""
    found = {}
    for group in (group for state in list(_states) for group in state._fsdp_param_groups):
        for fsdp_param in group.fsdp_params:
            name = _names.clean(fsdp_param._param_fqn or fsdp_param._module_info.param_name)
            found[id(fsdp_param.sharded_param)] = name, _plan.unit_name(group)
    return found


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
    while caller is not None:
        yield caller, caller.f_lasti
        caller = caller.f_back


def _operands(frame: FrameType, at: int) -> Iterator[Any]:
    """What the expression that failed names; reading it has no effects."""
    for node in ast.walk(_expression(frame.f_code, at)):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            value = _value(node, frame)
            if value is not None:
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
    return ast.parse("(" + textwrap.dedent(b"".join(lines).decode()) + "\n)", mode="eval")


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
