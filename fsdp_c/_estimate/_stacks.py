"""Stacks of equal blocks: four are run, and the middle of their trace is repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_c._estimate._segments import Segment, Trace

# Blocks of a stack that are run: a first, two in the middle to compare, a last.
_KEPT = 4


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
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


@contextlib.contextmanager
def shortened(stacks: dict[str, nn.Module]) -> Iterator[None]:
    all_blocks = {name: dict(stack._modules) for name, stack in stacks.items()}
    try:
        for stack in stacks.values():
            kept = list(stack._modules.items())[:_KEPT]
            stack._modules.clear()
            stack._modules.update(kept)
        yield
    finally:
        for name, stack in stacks.items():
            stack._modules.clear()
            stack._modules.update(all_blocks[name])


def extended(short: Trace, stacks: dict[str, nn.Module]) -> Trace | None:
    """The trace of all blocks; None if the middle blocks are not alike after all."""
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
