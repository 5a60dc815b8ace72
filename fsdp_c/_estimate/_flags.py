"""What errors and advice say of arguments, in the words of the command line."""

from __future__ import annotations

import re

_NAMES = (
    *("world_size", "strategy", "hardware", "batch", "seq", "inputs", "precision", "optimizer"),
    *("units", "checkpoint", "offload", "micro_batches", "shards", "ranks_per_host", "measured"),
)
_ARGUMENT = re.compile(
    rf"""\b({"|".join(_NAMES)})=(?:(True\b)|"([^"]*)"|'([^']*)'|\((\d+),\ ([^)]*)\)|([\w.]+))?""",
    re.VERBOSE,
)


def in_flags(text: str, *, has_inputs: bool) -> str:
    """``world_size=16`` as ``--world-size 16``, ``checkpoint=True`` as ``--checkpoint``.

    Args:
        has_inputs: the batch is a part of ``--inputs``, and there is no ``--batch`` beside it.
    """

    def flag(found: re.Match[str]) -> str:
        name, _, *quoted, ranks, seconds, plain = found.groups()
        value = f"{ranks}:{seconds}" if ranks else next(filter(None, (*quoted, plain)), None)
        if name == "batch" and has_inputs:
            return f"--inputs of batches of {value}"
        words = f"--{name.replace('_', '-')}"
        return words if value is None else f"{words} {value}"

    return _ARGUMENT.sub(flag, text)
