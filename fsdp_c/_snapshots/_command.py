"""python -m fsdp_c snapshots: lists what runs have kept, and removes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from fsdp_c import _text
from fsdp_c._snapshots import _files


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_c snapshots", description=__doc__)
    parser.add_argument("--folder", type=Path, default=_files.MEMORY, help="where to look")
    parser.add_argument(
        "--remove",
        nargs="*",
        metavar="RUN",
        help="remove these runs' files, by the names that are shown here and by top; without a"
        " name, of all that no launcher will start again. Files that a living process writes stay",
    )
    options = parser.parse_args(arguments)
    found = _files.find(options.folder)
    runs = {run: list(files) for run, files in groupby(found, key=lambda file: file.run)}
    if not runs:
        print(f"there are no snapshots in {options.folder}")
    elif options.remove is None:
        print(_table(runs))
    if options.remove is None:
        return
    names = {run: {run, _name(files)} for run, files in runs.items()}
    if unknown := set(options.remove) - set().union(*names.values()):
        parser.error(f"there is no run {', '.join(sorted(unknown))} in {options.folder}")
    for run, files in runs.items():
        is_named = not names[run].isdisjoint(options.remove)
        if is_named or not options.remove:
            print(f"{_name(files)}: {_remove(files, is_named)}")


def _name(files: Sequence[_files.Found]) -> str:
    """As `top` has it; of files that do not tell it, what theirs have in common."""
    shown = [file.owner.shown for file in files if file.owner is not None and file.owner.shown]
    return shown[0] if shown else files[0].run


def _remove(files: Sequence[_files.Found], is_named: bool) -> str:
    if any(file.owner and _files.is_alive(file.owner.process) for file in files):
        return "stays, a living process writes it"
    if not is_named and not all(file.owner is None or _files.is_over(file.owner) for file in files):
        return "stays, its launcher lives or is not known: name it to remove it"
    for file in files:
        file.path.unlink(missing_ok=True)
    return f"removed, {_size(files)}"


def _table(runs: dict[str, list[_files.Found]]) -> str:
    rows = [
        ("run", "of", "name", "ranks", "step", "size", "age", "process lives", "launcher lives")
    ]
    for files in runs.values():
        owners = [file.owner for file in files if file.owner is not None]
        ranks = {file.rank for file in files}
        world = owners[0].world if owners else len(ranks)
        rows.append(
            (
                _name(files),
                Path(owners[0].run).name if owners else "?",
                owners[0].name if owners else "?",
                f"{len(ranks)} of {world}",
                _steps(files),
                _size(files),
                _age(min(file.age_s for file in files)),
                _lives([owner.process for owner in owners]),
                _lives([owner.launcher for owner in owners]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _steps(files: Iterable[_files.Found]) -> str:
    """The newest that all ranks here have."""
    by_rank: dict[int, set[int]] = {}
    for file in files:
        steps = by_rank.setdefault(file.rank, set())
        if file.step is not None:
            steps.add(file.step)
    common = set.intersection(*by_rank.values())
    return str(max(common)) if common else "none"


def _size(files: Iterable[_files.Found]) -> str:
    return _text.bytes_text(sum(file.n_bytes for file in files))


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _lives(processes: Sequence[str]) -> str:
    if not processes:
        return "?"
    return "yes" if any(map(_files.is_alive, processes)) else "no"
