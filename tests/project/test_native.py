"""What the extension shows is what fsdp_c/_C.pyi says of it."""

import ast
import re
from pathlib import Path
from types import GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType

import pytest

from fsdp_c._native import _C

ROOT = Path(__file__).resolve().parents[2]
STUB = ast.parse((ROOT / "fsdp_c/_C.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]

Attribute = GetSetDescriptorType | MemberDescriptorType


def decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def kinds_in_stub(cls: ast.ClassDef) -> dict[str, str]:
    found = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = "attribute"
        elif isinstance(node, ast.FunctionDef) and node.name != "__init__":
            kind = {"property": "attribute", "staticmethod": "static"}
            found[node.name] = kind[decorators(node)[0]] if node.decorator_list else "method"
    return found


def kinds_at_run_time(cls: type) -> dict[str, str]:
    found = {}
    for name, value in vars(cls).items():
        if isinstance(value, Attribute):
            found[name] = "attribute"
        elif isinstance(value, MethodDescriptorType):
            found[name] = "method"
        elif isinstance(value, staticmethod):
            found[name] = "static"
    return found


def names_of(node: ast.stmt) -> str:
    return (
        ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else getattr(node, "name", "")
    )


def test_the_stub_has_all_names_of_the_module():
    in_stub = {names_of(node) for node in STUB.body} - {""}
    assert in_stub == {name for name in vars(_C) if not name.startswith("__")}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
def test_the_stub_has_all_names_of_a_class(cls: ast.ClassDef):
    assert kinds_in_stub(cls) == kinds_at_run_time(getattr(_C, cls.name))


def test_the_binding_reads_every_argument():
    source = "".join(path.read_text() for path in (ROOT / "csrc/bind").rglob("*.cpp"))
    read = set(re.findall(r'\bgiven\.\w+(?:<\w+>)?\("(\w+)"\)|\btype_in\("(\w+)"\)', source))
    names = {name for pair in read for name in pair}
    functions = [node for node in ast.walk(STUB) if isinstance(node, ast.FunctionDef)]
    arguments = {argument.arg for function in functions for argument in function.args.kwonlyargs}
    assert len(arguments) > 50
    assert arguments == names - {""}
