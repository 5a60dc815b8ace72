"""The log of a training run: one JSON object a line, of kind start, step or end."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


def log_path(out: Path, impl: str) -> Path:
    return out / impl / "log.jsonl"


@dataclass
class Run:
    """A log that was read back; `end` is empty if the run did not come to its end."""

    start: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Run:
    """Reads a log; of a run that was resumed, the last start and end count."""
    run = Run(start={})
    for line in path.read_text().splitlines():
        record = json.loads(line)
        kind = record.pop("kind")
        if kind == "step":
            run.steps.append(record)
        elif kind == "start":
            run.start, run.end = record, {}
        else:
            run.end = record
    return run


class Writer:
    """Writes the log, line by line as things happen. Only rank 0 has one."""

    def __init__(self, path: Path, first_step: int):
        """Keeps what the log says of the steps before `first_step`, which a resumed run goes on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if first_step and path.exists():
            kept = [s for s in read(path).steps if s["step"] < first_step]
        self._file: TextIO = path.open("w", buffering=1)
        for record in kept:
            self.write("step", **record)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()
