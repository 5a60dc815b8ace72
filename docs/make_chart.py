"""Draws docs/chart.svg, torch beside fsdp_c, from results that are kept in benchmarks/results.

python docs/make_chart.py [--results FOLDER] [--host amd-epyc-2c_202611]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PICTURE = DOCS / "chart.svg"
RESULTS = DOCS.parent / "benchmarks" / "results"
HOST = "amd-epyc-2c_202611"

# Narrow, with large letters: it is read on phones, too.
WIDTH, HEIGHT = 600, 590
TOP, BOTTOM = 70, 232  # of a panel
SECOND_ROW = 272
TORCH, OURS, PLAIN = "#c7522a", "#1b6ca8", "#9a9a9a"


@dataclass(frozen=True)
class Bar:
    colour: str
    value: float
    shown: str


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    groups: list[tuple[str, list[Bar]]]  # a name below its bars


def record(results: Path, bench: str, host: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{bench}_{host}.json").read_text())
    return found


def step_panel(of: dict[str, Any]) -> Panel:
    """Seconds of a training step, beside the same work with no communication."""
    groups = []
    for row in of["rows"]:
        times = {name: entry["median_us"] / 1e6 for name, entry in row["times"].items()}
        bars = [
            Bar(colour, times[name], f"{times[name]:.2f}")
            for name, colour in (("floor", PLAIN), ("torch", TORCH), ("fsdp_c", OURS))
        ]
        groups.append(({"fp32": "float32", "bf16": "bfloat16"}[row["precision"]], bars))
    return Panel("Training step, GPT of 29M", "seconds", groups)


def memory_panel(of: dict[str, Any]) -> Panel:
    """Peak memory of a rank in GiB, by the number of blocks."""
    by_units: dict[int, dict[str, float]] = {}
    for row in of["rows"]:
        by_units.setdefault(row["units"], {})[row["case"]] = row["above_empty_mib"] / 1024
    groups = []
    for units, sizes in sorted(by_units.items()):
        bars = [
            Bar(colour, sizes[name], f"{sizes[name]:.2f}")
            for name, colour in (("torch", TORCH), ("fsdp_c", OURS))
        ]
        groups.append((f"{units} blocks", bars))
    return Panel("Peak memory of a rank, blocks of 32 MiB", "GiB", groups[-4:])


def optimizer_panel(of: dict[str, Any]) -> Panel:
    """Milliseconds of a step and of clipping, 600 small parameters, beside plain tensors."""
    rows: dict[str, dict[str, Any]] = {}
    for row in of["rows"]:
        if row["ranks"] == 2 and "plain" in row["times"]:
            rows.setdefault(row["row"], row)
    groups = []
    for call, name in (("AdamW", "AdamW step"), ("clip_grad_norm_", "clipping")):
        times = {case: entry["median_us"] / 1e3 for case, entry in rows[call]["times"].items()}
        bars = [
            Bar(colour, times[case], f"{times[case]:.1f}")
            for case, colour in (("plain", PLAIN), ("torch", TORCH), ("fsdp_c", OURS))
        ]
        groups.append((name, bars))
    return Panel("600 small parameters", "milliseconds", groups)


def drawn(panel: Panel, left: float, width: float, row: float = 0) -> list[str]:
    most = max(bar.value for _, bars in panel.groups for bar in bars)
    top, bottom = TOP + row, BOTTOM + row
    parts = [
        f'<text x="{left:.1f}" y="{row + 26}" font-weight="bold">{panel.title}</text>',
        f'<text x="{left:.1f}" y="{row + 45}" fill="#555">{panel.unit}, lower is better</text>',
        f'<line x1="{left:.1f}" y1="{bottom}" x2="{left + width:.1f}" y2="{bottom}"'
        ' stroke="#555"/>',
    ]
    room = width / len(panel.groups)
    for at, (name, bars) in enumerate(panel.groups):
        thick = min(46.0, (room - 8) / len(bars))
        x = left + room * at + (room - thick * len(bars)) / 2
        for bar in bars:
            height = max((bottom - top) * bar.value / most, 1.0)
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{thick - 2:.1f}"'
                f' height="{height:.1f}" fill="{bar.colour}"/>'
                f'<text x="{x + thick / 2 - 1:.1f}" y="{bottom - height - 4:.1f}"'
                f' text-anchor="middle">{bar.shown}</text>'
            )
            x += thick
        middle = left + room * (at + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{name}</text>')
    return parts


def legend() -> list[str]:
    names = (
        (PLAIN, "the same work without sharding"),
        (TORCH, "torch's fully_shard"),
        (OURS, "fsdp_c"),
    )
    parts, x = [], 20
    for colour, name in names:
        parts.append(
            f'<rect x="{x}" y="540" width="13" height="13" fill="{colour}"/>'
            f'<text x="{x + 19}" y="552">{name}</text>'
        )
        x += 44 + 7 * len(name)
    return parts


def caption(of: dict[str, Any]) -> str:
    machine, versions = of["hardware"], of["versions"]
    return (
        f"{machine['cpu_model']}, {machine['cores']} cores, 2 ranks,"
        f" torch {versions['torch'].split('+')[0]}, {of['date'][:10]}"
    )


def picture(results: Path = RESULTS, host: str = HOST) -> str:
    step, memory, optim = (record(results, bench, host) for bench in ("step", "memory", "optim"))
    body = [
        *drawn(step_panel(step), 20, 290),
        *drawn(optimizer_panel(optim), 335, 245),
        *drawn(memory_panel(memory), 20, 560, SECOND_ROW),
        *legend(),
        f'<text x="20" y="577" fill="#555">{caption(step)}</text>',
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-size="14" font-family="sans-serif" role="img">'
    )
    title = "<title>Time of a step, memory and optimizer under torch and fsdp_c</title>"
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, title, background, *body, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--host", default=HOST, help="what the records' names end in")
    args = parser.parse_args()
    PICTURE.write_text(picture(args.results, args.host))


if __name__ == "__main__":
    main()
