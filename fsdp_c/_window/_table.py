"""The tables of `top` in a terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_c._window import _lines, _ranks
from fsdp_c._window._ranks import Host, Rank

_FOLDED = ("unit", "waits for")
_NARROW = 110  # columns of a terminal that has no room for these
_LEFT_OUT = ("core", "last error")


def of(host: Host, width: int) -> RenderableType:
    parts: list[RenderableType] = []
    for run in _ranks.by_run(host.ranks):
        parts += [Text(_lines.heading_of(run), style="bold"), _table_of(run, width)]
        parts += [Text(line, style="yellow") for line in _lines.notes_of(run)]
        parts.append(Text())
    return Group(*parts, *map(Text, _lines.remarks_of(host)))


def _table_of(run: Sequence[Rank], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    left_out = _LEFT_OUT if width < _NARROW else ()
    shown = [i for i, column in enumerate(_lines.COLUMNS) if column not in left_out]
    for column in (_lines.COLUMNS[i] for i in shown):
        is_folded = column in _FOLDED
        table.add_column(column, no_wrap=not is_folded, min_width=10 if is_folded else None)
    for rank in run:
        cells = _lines.cells_of(rank)
        table.add_row(*(Text(cells[i]) for i in shown), style=_style(rank))
    return table


def _style(rank: Rank) -> str:
    if rank.is_stopped or rank.phase == "left by an exception":
        return "red"
    return "yellow" if rank.waits is not None and rank.waits.seconds >= _lines.HELD_UP_S else ""
