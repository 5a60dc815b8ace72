"""What parts of gpu-check find: lines for who looks on, and rows for the record.

Rows are written as they come, one JSON object a line, so that a part which crashes or takes too
long leaves what it has found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    def __init__(self, path: Path, part: str) -> None:
        self.path, self._part = path, part

    def _add(self, **cells: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"part": self._part, **cells}) + "\n")

    def check(self, name: str, run: Callable[[], object]) -> None:
        """Passed, unless `run` raises."""
        begun = time.monotonic()
        try:
            run()
        except Exception as error:  # every check is told about; the rows count them
            self.end(name, "failed", begun, f"{type(error).__name__}: {error}")
        else:
            self.end(name, "passed", begun)

    def end(self, name: str, result: str, begun: float, note: str = "") -> None:
        seconds = round(time.monotonic() - begun, 1)
        shown = result.upper() if result == "failed" else result
        print(f"  {shown} {name}" + (f": {note}" if note else f" ({seconds} s)"), flush=True)
        self._add(check=name, result=result, seconds=seconds, note=note)

    def left_out(self, name: str, why: str) -> None:
        print(f"  left out {name}: {why}", flush=True)
        self._add(check=name, result="left out", seconds=0, note=why)

    def figure(self, table: str, **cells: Any) -> None:
        """A row of a table; cells are numbers and words."""
        words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in cells.items())
        print(f"  {table}: {', '.join(words)}", flush=True)
        self._add(table=table, **cells)


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # its writer was killed
    return found
