"""python -m fsdp_c top: shows what the ranks on this host do, without touching them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from fsdp_c._window import _lines, _processes, _ranks
from fsdp_c._window._ranks import Host

_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp_c top", description=__doc__)
    parser.add_argument("--once", action="store_true", help="look once, print, and end")
    parser.add_argument("--json", action="store_true", help="an object for each look, on a line")
    parser.add_argument("--run", help="only the ranks of this run")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="how often to look; 1"
    )
    options = parser.parse_args(arguments)
    seen = _processes.Seen()
    try:
        if options.json:
            _print_json(seen, options)
        elif options.once:
            host = _ranks.look(seen)
            _processes.require_run(parser, seen, options.run)
            print("\n".join(_lines.lines_of(_of_run(host, options.run))))
        else:
            _watch(seen, options)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read has gone
        sys.stderr.close()
    finally:
        seen.close()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("from 0.05 to 3600")
    return seconds


def _look(seen: _processes.Seen, run: str | None) -> Host:
    return _of_run(_ranks.look(seen), run)


def _of_run(host: Host, run: str | None) -> Host:
    if run is None:
        return host
    return Host(tuple(rank for rank in host.ranks if rank.run == run), host.refused)


def _print_json(seen: _processes.Seen, options: argparse.Namespace) -> None:
    while True:
        print(json.dumps(_look(seen, options.run).as_json()), flush=True)
        if options.once:
            return
        time.sleep(options.every)


def _watch(seen: _processes.Seen, options: argparse.Namespace) -> None:
    if not sys.stdout.isatty():  # rich would show a pipe or a file nothing before the end
        _watch_plainly(seen, options)
        return
    try:
        from rich.live import Live
    except ImportError:
        _watch_plainly(seen, options)
        return
    from fsdp_c._window import _table

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            table = _table.of(_look(seen, options.run), live.console.width)
            live.update(table, refresh=True)
            time.sleep(options.every)


def _watch_plainly(seen: _processes.Seen, options: argparse.Namespace) -> None:
    if sys.stdout.isatty():
        print("for a table that fits the terminal: pip install 'fsdp_c[top]'", file=sys.stderr)
        time.sleep(options.every)
    while True:
        clear = _CLEAR if sys.stdout.isatty() else ""
        print(clear + "\n".join(_lines.lines_of(_look(seen, options.run))), flush=True)
        time.sleep(options.every)
