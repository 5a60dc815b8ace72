"""The list of torch's private names: it is whole, it is true, and a torch that differs is named."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group

import fsdp_c
from fsdp_c._compat import _torch_names, _versions
from fsdp_c._fully_shard._fsdp_param import FSDPParam
from fsdp_c._fully_shard._fsdp_param_group import FSDPParamGroup
from fsdp_c._fully_shard._fsdp_state import FSDPState

PACKAGE = Path(fsdp_c.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "_torch_pre_2_13.py"]
SUBCLASSES = [
    (FSDPParam, _versions.TorchParam),
    (FSDPParamGroup, _versions.TorchGroup),
    (FSDPState, _versions.TorchState),
]
VERSION = _torch_names.minor_of(torch.__version__)
has_list = pytest.mark.skipif(VERSION < _torch_names.OLDEST, reason="an older torch has no list")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(path: Path) -> Iterator[str]:
    """What a file imports of torch, or reads in a module of torch, that has an underscore."""
    tree = ast.parse(path.read_text())
    modules = {"torch": "torch", "dist": "torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if is_module(name):
                    modules[alias.asname or alias.name] = name
                elif is_private(name):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            name = f"{modules.get(first, '')}.{rest}"
            if first in modules and is_private(name) and not is_module(name):
                yield name


def test_versions_without_a_list_are_those_that_are_tested() -> None:
    """Whoever tests under a newer torch says so in the list's file."""
    assert VERSION <= _torch_names.NEWEST


@has_list
def test_what_is_listed_is_in_this_torch() -> None:
    assert _torch_names.changes(VERSION) == []


def test_every_private_name_is_listed() -> None:
    listed = {
        f"{name.module}.{name.path}"
        for version in (_torch_names.OLDEST, _torch_names.NEWEST)
        for name in _torch_names.names(version)
    }
    listed |= {"torch.nn.Module._apply", "torch._C._distributed_c10d"}  # listed by other paths
    found = {f"{path.name}: {name}": name for path in FILES for name in private_names(path)}
    known = {where for where, name in found.items() if any(name.startswith(x) for x in listed)}
    assert sorted(set(found) - known) == []


@has_list
def test_every_method_that_is_replaced_is_listed() -> None:
    listed = {name.path for name in _torch_names.names(VERSION) if name.is_method}
    missing = [
        f"{theirs.__name__}.{name}"
        for ours, theirs in SUBCLASSES
        for name in vars(theirs)
        if getattr(ours, name) is not getattr(theirs, name) and not name.endswith("__")
        if callable(vars(theirs)[name]) and f"{theirs.__name__}.{name}" not in listed
    ]
    assert missing == []


def test_nothing_is_listed_that_nobody_uses() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "csrc" / "bind").rglob("*.[ch]*")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    unused = {
        f"{name.path} {word}"
        for version in (_torch_names.OLDEST, _torch_names.NEWEST)
        for name in _torch_names.names(version)
        for word in (name.path.split(".")[-1], *name.attributes)
        if word not in words
    }
    assert sorted(unused) == []


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The installed torch is one that nobody has tested."""
    _torch_names.check.cache_clear()
    monkeypatch.setattr(_torch_names, "NEWEST", VERSION)
    monkeypatch.setattr(torch, "__version__", f"{VERSION[0]}.{VERSION[1] + 1}.0")
    yield monkeypatch
    _torch_names.check.cache_clear()


@has_list
def test_newer_torch_with_the_same_names_gets_a_line(newer: Any, capfd: Any) -> None:
    _torch_names.check()
    wanted = f"is newer than any that fsdp_c was tested with (up to {VERSION[0]}.{VERSION[1]})"
    assert wanted in capfd.readouterr().err
    _torch_names.check()
    assert capfd.readouterr().err == ""


@has_list
def test_newer_torch_that_differs_is_an_error_that_says_what(newer: Any) -> None:
    group = _fsdp_param_group.FSDPParamGroup
    newer.setattr(group, "unshard", lambda self, async_op=False, stream=None: None)
    newer.setattr(_fsdp_init, "_validate_module", lambda module: None)
    newer.delattr(_fsdp_init, "_init_default_mesh")
    # Takes more than before, which who calls it does not notice.
    newer.setattr(_fsdp_init, "_get_device_from_mesh", lambda mesh, index=0: None)
    newer.setattr(_torch_names, "_attributes", without("_fsdp_param_groups"))
    with pytest.raises(ImportError) as raised:
        _torch_names.check()
    text = str(raised.value)
    assert "FSDPParamGroup.unshard(self, async_op) is now" in text
    assert "FSDPParamGroup.unshard(self, async_op, stream)" in text
    assert "_validate_module(module, func_name) is now _validate_module(module)" in text
    assert "_init_default_mesh is gone" in text
    assert "FSDPState has no _fsdp_param_groups" in text
    assert "_get_device_from_mesh" not in text
    assert f"pip install 'torch=={VERSION[0]}.{VERSION[1]}.*'" in text


def without(attribute: str) -> Any:
    before = _torch_names._attributes
    return lambda owner: before(owner) - {attribute}
