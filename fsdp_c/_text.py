"""How the package writes for people: bytes with their unit, and the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SCALES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def bytes_text(n_bytes: float) -> str:
    """With two decimals: "12.34 MiB"; below 1 KiB as they are: "436 B"."""
    for name, scale in _SCALES:
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:,.2f} {name}"
    return f"{n_bytes:.0f} B"


def row(label: str, what: str, *amounts: float) -> str:
    """A line of a report: a label, bytes, and what they are."""
    columns = "".join(f"{bytes_text(n):>14}" for n in amounts)
    return f"  {label:18}{columns}  {what}".rstrip()


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message: the closest of the names, however it is capitalized; or nothing."""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
