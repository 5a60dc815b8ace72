"""What a benchmark leaves behind: tables, and a JSON record with machine, versions and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Table:
    """Cells are text already; the first column is aligned left, the others right."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def render(self) -> str:
        widths = [max(len(line[i]) for line in [self.columns, *self.rows]) for i in self._indices()]
        rule = ["-" * widths[i] if i == 0 else "-" * (widths[i] - 1) + ":" for i in self._indices()]
        lines = [f"### {self.title}", ""]
        for line in [self.columns, rule, *self.rows]:
            cells = [
                line[i].ljust(widths[i]) if i == 0 else line[i].rjust(widths[i])
                for i in self._indices()
            ]
            lines.append("| " + " | ".join(cells) + " |")
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def _indices(self) -> range:
        return range(len(self.columns))


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def duration(us: float | None) -> str:
    """Microseconds in the unit that keeps three figures readable."""
    if us is None:
        return "-"
    if us < 1000:
        return f"{us:.1f} us"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def size_text(n_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= scale and n_bytes % scale == 0:
            return f"{n_bytes // scale} {unit}"
    return f"{n_bytes} B"


def ratio(over: float | None, under: float | None, digits: int = 2) -> str:
    """A dash where a side is missing, or where noise left nothing positive to divide by."""
    if over is None or under is None or under <= 0:
        return "-"
    return f"{over / under:,.{digits}f}"


def _proc_field(path: str, name: str) -> str:
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
    except OSError:
        pass
    return ""


def hardware() -> dict[str, Any]:
    memory = _proc_field("/proc/meminfo", "MemTotal").split()
    return {
        "cpu_model": _proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory[0]) // 1024 if memory else None,
        "kernel": platform.release(),
    }


def host_kind() -> str:
    """A short name for machines of this kind, for file names: processor family and cores."""
    facts = hardware()
    model = re.sub(r"\((R|TM)\)|@.*|\b(CPU|Processor)\b|\d+-Core", " ", facts["cpu_model"])
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{slug or facts['machine']}-{facts['cores']}c"


def versions(implementations: list[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in dict.fromkeys(["torch", *implementations]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed, from the source tree"
    return found


def command_line() -> str:
    script = Path(sys.argv[0])
    root = RESULTS.parent.parent
    shown = script.resolve()
    if shown.is_relative_to(root):
        shown = shown.relative_to(root)
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def result_path(folder: Path, bench: str, quick: bool, suffix: str) -> Path:
    month = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m")
    return folder / f"{bench}_{host_kind()}_{month}{'_quick' if quick else ''}{suffix}"


def record(bench: str, args: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "bench": bench,
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "quick": args.quick,
        "versions": versions(args.impl),
        "hardware": hardware(),
        "rows": rows,
    }


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def heading(facts: dict[str, Any]) -> str:
    machine, found = facts["hardware"], facts["versions"]
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    return (
        f"{machine['cpu_model']}, {machine['cores']} cores, {machine['memory_mib']} MiB, "
        f"Linux {machine['kernel']}; {names}; {facts['date']}"
    )
