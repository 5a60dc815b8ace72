"""What parts of gpu-check find: lines for who looks on, and rows for the record.

Rows are written as they come, one JSON object a line, so that a part which crashes or takes too
long leaves what it has found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BAD = ("failed", "not run")  # results that nobody may overlook


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
        print(
            f"  {shown(result)} {name}" + (f": {note}" if note else f" ({seconds} s)"), flush=True
        )
        self._add(check=name, result=result, seconds=seconds, note=note)

    def left_out(self, name: str, why: str) -> None:
        """What this machine has nothing for."""
        self.end(name, "left out", time.monotonic(), why)

    def not_run(self, name: str, why: str) -> None:
        """What gpu-check has to have run: without it, it has not passed."""
        self.end(name, "not run", time.monotonic(), why)

    def figure(self, table: str, **cells: Any) -> None:
        """A row of a table; cells are numbers and words."""
        words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in cells.items())
        print(f"  {table}: {', '.join(words)}", flush=True)
        self._add(table=table, **cells)


def shown(result: str) -> str:
    """In capitals, and on a terminal in red, if it is a bad one."""
    if result not in BAD:
        return result
    return f"\033[31m{result.upper()}\033[0m" if sys.stdout.isatty() else result.upper()


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
