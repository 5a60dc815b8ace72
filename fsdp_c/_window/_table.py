"""The table of `top` in a terminal, by rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_c._window import _top
from fsdp_c._window._ranks import Host, Rank

_LONG_WAIT_S = 1.0


def of(host: Host) -> RenderableType:
    if not host.ranks:
        return Group(Text(_top.nothing()), *map(Text, _top.remarks_of(host)))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _top.COLUMNS:
        table.add_column(column, overflow="ellipsis", no_wrap=column not in ("last error", "unit"))
    for rank in host.ranks:
        table.add_row(*map(Text, _top.cells_of(rank)), style=_style(rank))
    remarks = (Text(line, style="yellow") for line in _top.remarks_of(host))
    return Group(table, Text(), *remarks)


def _style(rank: Rank) -> str:
    if rank.is_stopped or rank.phase == "left by an exception":
        return "red"
    return "yellow" if rank.waits is not None and rank.waits.seconds >= _LONG_WAIT_S else ""
