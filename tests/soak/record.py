"""What a campaign has done, kept so that one that was cut off goes on; and its report."""

import collections
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import report

from soak.case import FAILED, LEFT_OUT, Family, Verdict, command_of

LARGEST = ("slowest notice, s", "most lives")  # other numbers of cases are added up
SHOWN = 3000  # characters of a failure in the Markdown


class Record:
    """Verdicts by family and key."""

    def __init__(self, path: Path, goes_on: bool) -> None:
        self.path = path
        self.verdicts: dict[str, dict[str, Verdict]] = collections.defaultdict(dict)
        self.seconds: collections.Counter[str] = collections.Counter()
        self.whole: dict[str, str] = {}
        if goes_on and path.exists():
            kept = json.loads(path.read_text())
            self.seconds.update(kept["seconds"])
            self.whole.update(kept.get("whole", {}))
            for family, verdicts in kept["verdicts"].items():
                for key, fields in verdicts.items():
                    self.verdicts[family][key] = Verdict(**fields)

    def add(self, family: str, key: str, verdict: Verdict, seconds: float) -> None:
        self.verdicts[family][key] = verdict
        self.seconds[family] += seconds
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.as_dict()))
        fresh.replace(self.path)  # in one step: a run may be killed here

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": dict(self.seconds),
            "whole": self.whole,
            "verdicts": {
                family: {key: dataclasses.asdict(v) for key, v in verdicts.items()}
                for family, verdicts in self.verdicts.items()
            },
        }

    def failures(self) -> list[tuple[str, str, Verdict]]:
        return [
            (family, key, verdict)
            for family, verdicts in self.verdicts.items()
            for key, verdict in verdicts.items()
            if verdict.fate == FAILED
        ]

    def row(self, family: Family) -> dict[str, Any]:
        verdicts = list(self.verdicts[family.name].values())
        numbers: dict[str, list[float]] = collections.defaultdict(list)
        for verdict in verdicts:
            for name, value in verdict.facts.items():
                numbers[name].append(value)
        return {
            "family": family.name,
            "what": family.what,
            "unit": family.unit,
            "whole": self.whole.get(family.name, ""),
            "cases": len(verdicts),
            "trials": sum(v.n for v in verdicts if v.fate != LEFT_OUT),
            "failed": sum(v.fate == FAILED for v in verdicts),
            "left out": collections.Counter(v.text for v in verdicts if v.fate == LEFT_OUT),
            "seconds": round(self.seconds[family.name]),
            "facts": {
                name: {"sum": round(sum(values), 2), "largest": max(values)}
                for name, values in numbers.items()
            },
        }


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| family | proves | ran | failed | left out | minutes | seen |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        seen = "; ".join(
            f"{name}: {fact['largest' if name in LARGEST else 'sum']:g}"
            for name, fact in row["facts"].items()
        )
        whole = f" ({row['whole']} in all)" if row["whole"] else ""
        lines.append(
            f"| {row['family']} | {row['what']} | {row['trials']} {row['unit']}{whole}"
            f" | {row['failed']}"
            f" | {sum(row['left out'].values())} | {row['seconds'] / 60:.1f} | {seen} |"
        )
    return lines


def write(record: Record, families: list[Family], options: dict[str, Any], folder: Path) -> Path:
    """The report, in JSON and Markdown; gives the Markdown's path."""
    rows = [record.row(family) for family in families if record.verdicts[family.name]]
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": report.hardware(),
        "versions": report.versions(["fsdp_c"]),
        "command": report.command_line(),
        **options,
    }
    failures = [
        {
            "case": f"{family}/{key}",
            "reproduce": v.command or command_of(family, key),
            "text": v.text,
        }
        for family, key, v in record.failures()
    ]
    minor = ".".join(facts["versions"]["torch"].split(".")[:2])
    path = report.result_path(folder, f"soak_torch{minor}", False, ".json")
    report.write_json(path, {**facts, "rows": rows, "failures": failures})
    machine = facts["hardware"]
    names = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# The campaign",
        "",
        f"{machine['cpu_model']}, {machine['cores']} cores, Linux {machine['kernel']}; {names};"
        f" {facts['date']}; seeds {options['seeds']}.",
        "",
        f"    {facts['command']}",
        "",
        *lines_of(rows),
        "",
    ]
    for row in rows:
        for reason, n in row["left out"].items():
            lines += [f"- {row['family']}: {n} not run: {reason}"]
    for failure in failures:
        lines += ["", f"## {failure['case']}", "", f"    {failure['reproduce']}", "", "```"]
        lines += [failure["text"][-SHOWN:].strip(), "```"]
    path = path.with_suffix(".md")
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path
