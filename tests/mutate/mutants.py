"""Mutants of a C source: an operator, a constant, a bound, an early return or a call changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# What stands for what; the first that fits at a place is taken.
SWAPS = {
    "<=": ["<"],
    ">=": [">"],
    "==": ["!="],
    "!=": ["=="],
    "&&": ["||"],
    "||": ["&&"],
    "<": ["<="],
    ">": [">="],
    "+": ["-"],
    "-": ["+"],
    "true": ["false"],
    "false": ["true"],
}
_OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<|>|\+|-)(?= )|\b(true|false)\b")
# Nothing tells that an array has room for one more.
_NUMBER = re.compile(r"(?<=[ (\[])(?<!alloc\()([012])(?=[;,)\] ])")
_NEGATION = re.compile(r"(?<=[ (])!(?=[\w(])")
_TRIED = re.compile(r"^(\s*)FC_TRY\((.*)\);$")
_CALL = re.compile(r"^(\s+)(?:\(void\))?([a-z]\w*)\(.*\);$")
_STEP = re.compile(r"\b(\w+(?:->\w+|\.\w+)*)(\+\+|--)(?=[;)])")
_NAME = re.compile(r"^\w[\w *]*?\b(\w+)\(")
_KEPT_CALLS = frozenset({"assert", "return", "sizeof", "va_end", "va_start"})


@dataclass(frozen=True)
class Mutant:
    """A line of a source as it is, and as it is tried."""

    file: str
    number: int  # of the line, from 1
    before: str
    after: str
    function: str
    ordinal: int  # among those of the function that read the same, from 0

    @property
    def key(self) -> str:
        """The same after lines were added elsewhere."""
        place = f"{self.function} #{self.ordinal}" if self.ordinal else self.function
        return f"{self.file} {place}: {self.before.strip()} -> {self.after.strip()}"


def _blanked(text: str) -> list[str]:
    """The lines with comments, strings and characters blanked out."""
    pattern = re.compile(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL
    )
    blank = pattern.sub(lambda m: re.sub(r"[^\n]", "\x00", m[0]), text)
    return blank.splitlines()


def _edits(line: str, blank: str) -> Iterator[str]:
    def put(begin: int, end: int, text: str) -> str:
        return line[:begin] + text + line[end:]

    for match in _OPERATOR.finditer(blank):
        for text in SWAPS[match[0]]:
            yield put(match.start(), match.end(), text)
    for match in _NUMBER.finditer(blank):
        yield put(match.start(), match.end(), str(int(match[0]) + 1))
    for match in _NEGATION.finditer(blank):
        yield put(match.start(), match.end(), "")
    for match in _STEP.finditer(blank):
        other = "--" if match[2] == "++" else "++"
        yield put(match.start(2), match.end(2), other)
    if match := _TRIED.match(line):
        yield f"{match[1]}(void)({match[2]});"
    elif (match := _CALL.match(blank)) and match[2] not in _KEPT_CALLS:
        yield f"{match[1]};"


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All of a source, in order. Only bodies of functions are changed, and nothing that is for the
    compiler of GPUs alone."""
    found = []
    n_alike: Counter[tuple[str, str, str]] = Counter()
    is_inside = is_of_device = False
    function = ""
    for number, (line, blank) in enumerate(zip(text.splitlines(), _blanked(text), strict=True), 1):
        if blank.startswith("{"):
            is_inside = True
        elif blank.startswith("}"):
            is_inside = False
        elif not is_inside and (match := _NAME.match(blank)):
            function = match[1]
        if blank.startswith("#"):
            is_of_device = blank == "#ifdef __CUDA_ARCH__"
        if is_of_device:
            continue
        if is_inside and not blank.lstrip().startswith(("#", "static const")):
            for after in _edits(line, blank):
                alike = (function, line.strip(), after.strip())
                found.append(Mutant(file, number, line, after, function, n_alike[alike]))
                n_alike[alike] += 1
    return found
