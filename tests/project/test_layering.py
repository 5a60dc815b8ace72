"""Who may include and import whom: the core's layers, its headers, and the Python modules."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "fsdp_c"

# Headers that other layers may include; base's are all public, every other one is private.
PUBLIC = {
    "base": sorted(path.name for path in (CSRC / "base").glob("*.h")),
    "kernels": ["kernels.h", "cuda/kern_cuda.h", "cuda/runs.h"],
    "optim": ["clip.h", "optim.h"],
    "snapshot": ["copier.h", "ranks.h", "snapshot.h"],
    "device": [
        "device.h",
        "caller.h",
        "events.h",
        "host/host.h",
        "host/moves.h",
        "host/operators.h",
    ],
    "window": ["page.h", "window.h"],
    "transport": ["collectives.h", "nccl.h", "transport.h"],
    "comm": ["beats.h", "comm.h", "rails.h"],
    "engine": [
        "batch.h",
        "domain.h",
        "exchange.h",
        "gathers.h",
        "layout.h",
        "layout_runs.h",
        "order.h",
        "reduction.h",
        "root.h",
        "schedule.h",
        "slots.h",
        "training.h",
        "unit.h",
        "unsharding.h",
        "updates.h",
        "waits.h",
    ],
    "libtorch": [
        "accelerator.h",
        "process_group.h",
        "storage.h",
        "types.h",
        "unlocked.h",
        "versions.h",
    ],
    "bind": [],
}

# Layers whose public headers a layer may include, beside its own headers.
MAY_INCLUDE = {
    "base": [],
    "kernels": ["base"],
    "optim": ["base", "kernels"],
    "snapshot": ["base"],
    "device": ["base", "kernels"],
    "window": ["base"],
    "transport": ["base", "device", "window"],
    "comm": ["base", "kernels", "window", "transport"],
    "engine": ["base", "kernels", "device", "window", "transport", "comm"],
    "libtorch": ["base", "kernels", "device", "transport", "comm"],
    "bind": ("base kernels optim snapshot device window transport comm engine libtorch".split()),
}

# Downward: a folder imports only what stands before it. Beside the folders are what all of them use
# and the package's own names, which use all of them.
USED_BY_ALL = ("_built", "_env", "_native")
USES_ALL = ("__init__", "__main__", "_api")
FOLDERS = (
    "_text _compat _window _comm _optim _fully_shard _checkpoint _snapshots strategy fsdp1"
    " _diagnostics _memory _estimate _install"
).split()

SUFFIXES = (".c", ".h", ".cpp", ".cu")
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)
PYTHON = sorted(PACKAGE.rglob("*.py"))
MODULES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PYTHON]
PUBLIC_HEADERS = [f"{layer}/{name}" for layer, names in PUBLIC.items() for name in names]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
# Functions that take memory of a device, or pin the host's, past torch's allocators.
ALLOCATES = re.compile(r"\b(?:cudaMalloc|cudaHost(?:Alloc|Register)|cuMem|ncclMem)\w*")
ENVIRONMENT = re.compile(r"\b(secure_getenv|getenv|setenv|putenv|environ)\b")


def includes(path: Path) -> Iterator[tuple[str, str]]:
    for match in INCLUDE.finditer(path.read_text()):
        yield match[1], match[2]


def include_fault(path: Path, quote: str, name: str) -> str | None:
    layer = path.relative_to(CSRC).parts[0]
    target, _, header = name.partition("/")
    if quote == "<":
        if name == "Python.h" or target == "pybind11":
            return "sees Python" if layer != "bind" else None
        is_torchs = target in ("torch", "ATen", "c10")
        return "sees torch" if is_torchs and layer not in ("libtorch", "bind") else None
    if not (CSRC / name).is_file():
        return "is not written from csrc, or does not exist"
    if target == layer:
        own = path.relative_to(CSRC / layer).as_posix()
        is_leak = own in PUBLIC[layer] and header not in PUBLIC[layer]
        return "is private, in a public header" if is_leak else None
    if target not in MAY_INCLUDE[layer]:
        return f"lies above {layer}"
    return None if header in PUBLIC[target] else f"is private to {target}"


def test_every_layer_is_known():
    assert {path.relative_to(CSRC).parts[0] for path in SOURCES} == MAY_INCLUDE.keys()
    assert [name for name in PUBLIC_HEADERS if not (CSRC / name).exists()] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_includes_go_downward(path: Path):
    faults = [
        f"{name} {fault}"
        for quote, name in includes(path)
        if (fault := include_fault(path, quote, name)) is not None
    ]
    assert not faults


@pytest.mark.parametrize(
    ("path", "quote", "name", "fault"),
    [
        ("base/status.c", '"', "kernels/kernels.h", "lies above base"),
        ("kernels/kern_ref.c", '"', "transport/transport.h", "lies above kernels"),
        ("comm/comm.c", '"', "kernels/kern_tables.h", "is private to kernels"),
        ("base/dtype.h", '"', "dtype.h", "is not written from csrc, or does not exist"),
        ("kernels/kernels.h", '"', "kernels/kern_tables.h", "is private, in a public header"),
        ("engine/layout.c", "<", "torch/torch.h", "sees torch"),
        ("libtorch/types.cpp", "<", "c10/core/ScalarType.h", None),
        ("libtorch/types.cpp", "<", "Python.h", "sees Python"),
        ("libtorch/types.cpp", '"', "bind/core.h", "lies above libtorch"),
        ("bind/module.cpp", "<", "Python.h", None),
        ("comm/comm.c", '"', "kernels/kernels.h", None),
    ],
)
def test_the_rule_itself(path: str, quote: str, name: str, fault: str | None):
    assert include_fault(CSRC / path, quote, name) == fault


def test_what_uses_libtorch_does_without_python():
    """Nor does any header of torch that it includes see Python."""
    include = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-M", f"-I{CSRC}", f"-I{include}"]
    sources = sorted((CSRC / "libtorch").glob("*.cpp"))
    done = subprocess.run(
        [*command, f"-I{include}/torch/csrc/api/include", *sources], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "/Python.h" not in done.stdout


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize(
    "header", [header for header in PUBLIC_HEADERS if not header.startswith("libtorch/")]
)
def test_public_header_stands_alone(header: str, language: str):
    compiler, standard = {"c": ("gcc", "gnu11"), "c++": ("g++", "c++20")}[language]
    command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    done = subprocess.run(
        [*command, f"-I{CSRC}", "-fsyntax-only", "-x", language, "-"],
        input=f'#include "{header}"\n#include "{header}"\n',
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_core_reads_no_environment(path: Path):
    assert not ENVIRONMENT.findall(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_device_memory_is_torchs(path: Path):
    assert not ALLOCATES.findall(path.read_text())


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def known_module(parts: list[str]) -> str | None:
    """The module that an import of ``fsdp_c.<parts>`` loads; a last part may be a name in it."""
    for end in (len(parts), len(parts) - 1):
        name = ".".join(parts[:end])
        if name in (*MODULES, "_C"):
            return name
        package = ".".join([*parts[:end], "__init__"])
        if package in MODULES:
            return package
    return None


class Imports(ast.NodeVisitor):
    """Modules of fsdp_c that a file in `folder` imports, wherever in it."""

    def __init__(self, folder: list[str], with_types: bool) -> None:
        self.folder = folder
        self.with_types = with_types
        self.names: list[str | None] = []

    def visit_If(self, node: ast.If) -> None:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        is_left_out = is_for_types and not self.with_types
        for child in node.orelse if is_left_out else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first, *parts = alias.name.split(".")
            if first == "fsdp_c":
                self.names.append(known_module(parts))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = [part for part in (node.module or "").split(".") if part]
        if node.level:
            parts = self.folder[: len(self.folder) - node.level + 1] + parts
        elif parts[0] == "fsdp_c":
            parts = parts[1:]
        else:
            return
        self.names += [known_module([*parts, alias.name]) for alias in node.names]


def imported(code: str, folder: list[str], with_types: bool = True) -> list[str | None]:
    imports = Imports(folder, with_types)
    imports.visit(ast.parse(code))
    return imports.names


def reads_environment(tree: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in names for alias in node.names):
                return True
    return False


def place_of(module: str) -> int:
    """The higher, the more it may import."""
    folder, _, rest = module.partition(".")
    if rest:
        return 1 + FOLDERS.index(folder)
    return 0 if module in USED_BY_ALL else 1 + len(FOLDERS)


def imports_of(path: Path, with_types: bool) -> set[str | None]:
    folder = list(path.parent.relative_to(PACKAGE).parts)
    return set(imported(path.read_text(), folder, with_types))


def test_every_folder_is_known():
    assert {module.split(".")[0] for module in MODULES if "." in module} == set(FOLDERS)
    assert {module for module in MODULES if "." not in module} == {*USED_BY_ALL, *USES_ALL}


@pytest.mark.parametrize("path", PYTHON, ids=module_of)
def test_imports_go_downward(path: Path):
    """Those for types count."""
    module = module_of(path)
    names = imports_of(path, with_types=True) - ({"_C"} if module == "_native" else set())
    assert None not in names
    assert [name for name in names if place_of(name) > place_of(module)] == []


def test_imports_make_no_circle():
    """Within a folder too, those for types included."""
    graph = {module_of(path): imports_of(path, with_types=True) for path in PYTHON}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", PYTHON, ids=module_of)
def test_environment_is_read_in_one_file(path: Path):
    assert reads_environment(ast.parse(path.read_text())) == (path.stem == "_env")


def test_only_native_names_the_extension():
    pattern = re.compile(r"fsdp_c\._C\b[\"']")
    assert [p.stem for p in PYTHON if pattern.search(p.read_text())] == ["_native"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import fsdp_c", ["__init__"]),
        ("import fsdp_c._C as native", ["_C"]),
        ("from fsdp_c import _C, _env", ["_C", "_env"]),
        ("from . import _api", ["_api"]),
        ("from ._api import shard", ["_api"]),
        ("def late():\n    from fsdp_c._api import shard", ["_api"]),
        ("from fsdp_c import fully_shard", ["__init__"]),
        ("from fsdp_c._api.nowhere import shard", [None]),
        ("import os\nfrom torch import _C", []),
        ("if TYPE_CHECKING:\n    from fsdp_c._api import shard", []),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from fsdp_c import _api", ["_api"]),
    ],
)
def test_imports_are_seen(code: str, names: list[str | None]):
    assert imported(code, [], with_types=False) == names
    if "TYPE_CHECKING" in code:
        assert imported(code, []) == ["_api"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from fsdp_c.folder import _a", "folder._a"),
        ("from fsdp_c.folder._a import Name", "folder._a"),
        ("import fsdp_c.folder._a", "folder._a"),
        ("from fsdp_c.folder import Name", "folder.__init__"),
        ("from fsdp_c import folder", "folder.__init__"),
        ("from ._a import Name", "folder._a"),
        ("from . import Name", "folder.__init__"),
        ("from .. import _env", "_env"),
        ("from .._env import Name", "_env"),
    ],
)
def test_imports_are_seen_in_folders(monkeypatch, code: str, name: str):
    monkeypatch.setattr(
        sys.modules[__name__], "MODULES", [*MODULES, "folder._a", "folder.__init__"]
    )
    assert imported(code, ["folder"]) == [name]


@pytest.mark.parametrize(
    "code", ["import os\nos.environ['X']", "from os import getenv", "import os as o\no.getenv('X')"]
)
def test_environment_reads_are_seen(code: str):
    assert reads_environment(ast.parse(code))
