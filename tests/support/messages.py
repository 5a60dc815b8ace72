"""Finds the texts that the package can show: in its C and C++ sources, and in its Python.

Values that a message fills in are written as an ellipsis. A text has at least three words; shorter
ones (names, parts of a sentence) are no use to somebody who looks for what was printed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIN_WORDS = 3
GAP = "…"

# In C: literals next to one another, also around a macro of <inttypes.h>.
_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_LITERALS = re.compile(rf"{_LITERAL}(?:\s*(?:PRI\w+\s*)?{_LITERAL})*")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"%[-+ #0-9.*]*(?:hh|h|ll|l|z|t|j)?[diouxXeEfgGcsp]")
_RAISES = re.compile(
    r"\b(?:raise_error|fc_fail\w*|TORCH_CHECK\w*|TORCH_WARN\w*|PyErr_\w+|warn\w*|attempt"
    r"|set_unreadable_text)\("
)
_ESCAPES = {r"\n": " ", r"\"": '"', r"\\": "\\", r"\t": " "}
_WORD = re.compile(r"[A-Za-z]{2}")
_ASSERTION = re.compile(r"\b_?[Ss]tatic_assert\([^;]*;")

# Here texts are made or put together that others raise or print.
_TEXT_MODULES = set(
    "_advice _built _core_messages _errors _explain _torchs_own _full _hosts _idle"
    " _beats _last_error _lines _peer_location _ranks _status _step_messages _torch_names"
    " _unmanaged_params _verify".split()
)
_SHOWN_BY = re.compile(r"warn\w*|print|exit")


def squeezed(text: str) -> str:
    """One line with single spaces; neighbouring gaps are one."""
    text = re.sub(rf"(?:{GAP}\s*)+{GAP}", GAP, text)
    return re.sub(r"\s+", " ", text).strip()


def is_text(text: str) -> bool:
    return sum(bool(_WORD.search(part)) for part in text.split()) >= MIN_WORDS


def of_c(path: Path) -> Iterator[str]:
    code = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", path.read_text(), flags=re.MULTILINE)
    code = _ASSERTION.sub("", _without_comments(code))
    if "bind" in path.parts:
        code = "\n;\n".join(_raising_calls(code))
    for match in _LITERALS.finditer(code):
        text = re.sub(r'%[-+ #0-9.*]*"\s*PRI\w+\s*"', GAP, match[0])
        parts = re.findall(_LITERAL, text)
        joined = "".join(part[1:-1] for part in parts)
        for escape, plain in _ESCAPES.items():
            joined = joined.replace(escape, plain)
        joined = _DIRECTIVE.sub(GAP, joined).replace("%%", "%")
        if is_text(joined):
            yield squeezed(joined)


def _raising_calls(code: str) -> Iterator[str]:
    """In the binding most text is the help of methods: the calls that show some to users."""
    for match in _RAISES.finditer(code):
        depth, at = 1, match.end()
        while depth and at < len(code):
            literal = re.compile(_LITERAL).match(code, at)
            if literal:
                at = literal.end()
                continue
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            at += 1
        yield code[match.start() : at]


def _without_comments(code: str) -> str:
    """Comments go; what looks like one inside of a literal stays."""
    whole = re.compile(rf"({_LITERAL})|{_COMMENT.pattern}", re.DOTALL)
    return whole.sub(lambda match: match[1] or " ", code)


def of_python(path: Path, with_names: bool = True) -> Iterator[str]:
    """`with_names`: also texts that have a name in the module."""
    tree = ast.parse(path.read_text())
    if path.stem in _TEXT_MODULES:
        yield from _texts_below(tree)
        return
    for node in tree.body if with_names else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from _texts_below(node.value)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                shown = [*node.exc.args, *[keyword.value for keyword in node.exc.keywords]]
            elif isinstance(node, ast.Call) and _SHOWN_BY.fullmatch(_name_of(node.func)):
                shown = node.args
            else:
                continue
            for argument in shown:
                texts = list(_texts_below(argument))
                yield from texts
                if not texts and not isinstance(argument, ast.Constant):
                    yield from _texts_below(function)  # made in the function before


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _texts_below(tree: ast.AST) -> Iterator[str]:
    """The largest string expressions, without docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = _text_of(node)
            if text is not None:
                if id(node) not in docs and is_text(text):
                    yield squeezed(text)
                if isinstance(node, ast.Constant):
                    return
                for part in ast.walk(node):  # alternatives inside of a gap
                    if isinstance(part, ast.FormattedValue):
                        yield from visit(part.value)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(tree)


def _text_of(node: ast.AST) -> str | None:
    """None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (_text_of(part) for part in node.values)
        return "".join(GAP if part is None else part for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text_of(node.left), _text_of(node.right)
        if left is None and right is None:
            return None
        return (left or GAP) + (right or GAP)
    return None


def all_messages() -> dict[str, str]:
    """Each text with the first file that has it, relative to the root."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".c", ".h", ".cpp", ".cu"):
            for text in of_c(path):
                found.setdefault(text, str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "fsdp_c").rglob("*.py")):
        for text in of_python(path):
            found.setdefault(text, str(path.relative_to(ROOT)))
    for name in ("setup.py", "build_backend.py"):
        for text in of_python(ROOT / name, with_names=False):
            found.setdefault(text, name)
    return found
