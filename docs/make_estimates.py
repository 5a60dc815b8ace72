"""Runs the commands of docs/estimates.md again: rewrites their output and draws the picture."""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
PAGE = DOCS / "estimates.md"
PICTURE = DOCS / "estimates.svg"
COMMAND = "$ python -m fsdp_c estimate "
_BLOCK = re.compile(r"```\n" + re.escape(COMMAND) + r"((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```\n", re.S)

# A line of the picture: name, arguments, dashes.
LINES = [
    ("Llama 70B, zero3", "llama-70b", "zero3", ""),
    ("Llama 70B, hybrid over 64", "llama-70b", "hybrid", "6 3"),
    ("GPT 175B, zero3", "gpt-175b", "zero3", "2 2"),
]
GIB = 1 << 30
WORLDS = [2**k for k in range(5, 13)]
COLOURS = ["#1b6ca8", "#c7522a", "#3d7a3d"]


def output_of(arguments: str) -> str:
    from fsdp_c._estimate import _command

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _command.main(shlex.split(arguments.replace("\\\n", " ")))
    return out.getvalue()


def blocks(text: str) -> list[tuple[str, str]]:
    """Arguments of each command on the page, and the output under it."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(text)]


def renewed(text: str) -> str:
    return _BLOCK.sub(lambda match: f"```\n{COMMAND}{match[1]}\n{output_of(match[1])}```\n", text)


# ---- the picture ----


def curves() -> list[tuple[str, str, list[tuple[int, float, float]]]]:
    """Name, dashes and (ranks, GiB, seconds) of each line."""
    from fsdp_c._estimate import estimate
    from fsdp_c._estimate._evaluate import Estimator
    from fsdp_c._estimate._models import CONFIGS, build
    from fsdp_c.strategy import strategy_named

    found = []
    for name, model, strategy, dashes in LINES:
        module = build(CONFIGS[model])
        first = estimate(module, world_size=WORLDS[-1], seq=2048, batch=2, checkpoint=True).setting
        estimator = Estimator()  # of several worlds: it traces once
        points = []
        for world in WORLDS:
            shards = min(64, world) if strategy == "hybrid" else None
            setting = first.replaced(
                world_size=world, strategy=strategy_named(strategy), shards=shards
            )
            one = estimator.evaluate(setting)
            points.append((world, one.total / GIB, one.times.step))
        found.append((name, dashes, points))
    return found


def panel(
    left: int, title: str, unit: str, lines: list[tuple[str, str, list[tuple[int, float]]]]
) -> list[str]:
    """One diagram of 340 x 230; x and y are logarithmic."""
    values = [y for _, _, points in lines for _, y in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    right, top, bottom = left + 340, 40, 270

    def at_x(x: float) -> float:
        span = math.log2(WORLDS[-1] / WORLDS[0])
        return left + (right - left) * math.log2(x / WORLDS[0]) / span

    def at_y(y: float) -> float:
        return bottom - (bottom - top) * (math.log10(y) - low) / (high - low)

    parts = [f'<text x="{left}" y="24" font-weight="bold">{title}, {unit}</text>']
    for world in WORLDS:
        x = at_x(world)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{world}</text>')
    for decade in range(low, high + 1):
        for step in (1, 2, 5):
            value = step * 10.0**decade
            if value <= 10.0**high:
                y = at_y(value)
                parts.append(
                    f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
                    f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
                )
    for colour, (_, dashes, points) in zip(COLOURS, lines, strict=True):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dashes}"/>'
        )
    if unit == "GiB":
        y = at_y(80e9 / GIB)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#900"/>'
            f'<text x="{right - 4}" y="{y - 4:.1f}" text-anchor="end" fill="#900">'
            "74.5 GiB: a card of 80 GB</text>"
        )
    return parts


def picture() -> str:
    found = curves()
    memory = [(name, dashes, [(x, gib) for x, gib, _ in p]) for name, dashes, p in found]
    seconds = [(name, dashes, [(x, s) for x, _, s in p]) for name, dashes, p in found]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 430 650" width="516" height="780"'
        ' font-size="11" font-family="sans-serif" role="img">',
        "<title>Memory of a rank and time of a step over the number of GPUs</title>",
        '<rect width="430" height="650" fill="white"/>',
        *panel(60, "Memory of a rank", "GiB", memory),
        '<g transform="translate(0 300)">',
        *panel(60, "Time of a step", "s", seconds),
        "</g>",
    ]
    for i, (colour, (name, dashes, _)) in enumerate(zip(COLOURS, found, strict=True)):
        x, y = 60 + 170 * (i % 2), 616 + 20 * (i // 2)
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 30}" y2="{y}" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dashes}"/><text x="{x + 36}" y="{y + 4}">{name}</text>'
        )
    parts.append('<text x="400" y="640" text-anchor="end">x: H100 GPUs</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
    PICTURE.write_text(picture())
