"""The name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message: the closest of the names, however it is capitalized; or nothing."""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
