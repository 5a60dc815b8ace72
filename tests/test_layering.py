"""Who may include and import whom: the core's layers, its headers, and the Python modules."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "fsdp_c"

# Headers that other layers may include; base's are all public, every other one is private.
PUBLIC = {
    "base": sorted(path.name for path in (CSRC / "base").glob("*.h")),
    "kernels": ["kernels.h", "cuda/kern_cuda.h", "cuda/runs.h"],
    "device": ["device.h", "caller.h", "host/host.h", "host/moves.h"],
    "transport": ["nccl.h", "transport.h"],
    "comm": ["comm.h"],
    "group": [
        "batch.h",
        "domain.h",
        "exchange.h",
        "gathers.h",
        "layout.h",
        "layout_runs.h",
        "order.h",
        "schedule.h",
        "slots.h",
        "unit.h",
        "waits.h",
    ],
    "bind": [],
}

# Layers whose public headers a layer may include, beside its own headers.
MAY_INCLUDE = {
    "base": [],
    "kernels": ["base"],
    "device": ["base", "kernels"],
    "transport": ["base", "device"],
    "comm": ["base", "kernels", "transport"],
    "group": ["base", "kernels", "device", "transport", "comm"],
    "bind": ["base", "kernels", "device", "transport", "comm", "group"],
}

# Downward: a module imports only what stands before it. One in a folder: `folder.module`.
MODULES = (
    "_version _built _env _native _older _compat _delegate _watch _libraries _stale _updates"
    " _checkpoints _guards _where _comm _nccl _extension _containers _road _origins _param"
    " _buckets _pieces _waits _owner _files _names _load _dump _iterate _unheld _saving _modes"
    " _clip _norms _optim_lists _optim _patches _device _plan _outside _traffic _status _ties"
    " _unit _state _init _offload _stats _memory_plan _fully_shard _clone _replicas fsdp1._meshes"
    " fsdp1._materialize fsdp1._clip fsdp1._convert fsdp1._hooks fsdp1._summon fsdp1._state_dicts"
    " fsdp1._optim_states fsdp1._bridge fsdp1._wrapper fsdp1.__init__ _spawn _replicate _install"
    " strategy._strategies strategy._units strategy._chosen strategy._mesh strategy._checkpoint"
    " strategy._advice strategy._shard strategy.__init__ _explain _estimate._hardware"
    " _estimate._measure _estimate._convolution _estimate._recurrent _estimate._trace"
    " _estimate._volume _estimate._memory _estimate._time _estimate._setting _estimate._table"
    " _estimate._result _estimate._evaluate _estimate._advice _estimate._measured"
    " _estimate._estimate _estimate._models _estimate.__init__ _estimate._command _api __init__"
    " _idle _launch _child __main__"
).split()

SUFFIXES = (".c", ".h", ".cpp", ".cu")
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)
PYTHON = sorted(PACKAGE.rglob("*.py"))
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
        is_foreign = name == "Python.h" or target in ("torch", "ATen", "c10", "pybind11")
        return "sees Python or torch" if is_foreign and layer != "bind" else None
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
        ("group/layout.c", "<", "torch/torch.h", "sees Python or torch"),
        ("bind/module.cpp", "<", "Python.h", None),
        ("comm/comm.c", '"', "kernels/kernels.h", None),
    ],
)
def test_the_rule_itself(path: str, quote: str, name: str, fault: str | None):
    assert include_fault(CSRC / path, quote, name) == fault


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("header", PUBLIC_HEADERS)
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
    """Modules of fsdp_c that a file in `folder` imports at run time, wherever in it."""

    def __init__(self, folder: list[str]) -> None:
        self.folder = folder
        self.names: list[str | None] = []

    def visit_If(self, node: ast.If) -> None:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
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


def imported(code: str, folder: list[str]) -> list[str | None]:
    imports = Imports(folder)
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


def test_every_listed_module_exists():
    assert sorted(MODULES) == sorted(map(module_of, PYTHON))


@pytest.mark.parametrize("path", PYTHON, ids=module_of)
def test_imports_go_downward(path: Path):
    module = module_of(path)
    assert module in MODULES, "give the new module its place in MODULES"
    below = MODULES[: MODULES.index(module)]
    extension = ["_C"] if module == "_native" else []
    folder = list(path.parent.relative_to(PACKAGE).parts)
    assert set(imported(path.read_text(), folder)) <= {*below, *extension}


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
        ("from . import _param", ["_param"]),
        ("from ._state import State", ["_state"]),
        ("def late():\n    from fsdp_c._unit import Unit", ["_unit"]),
        ("from fsdp_c import fully_shard", ["__init__"]),
        ("from fsdp_c._unit.nowhere import Unit", [None]),
        ("import os\nfrom torch import _C", []),
        ("if TYPE_CHECKING:\n    from fsdp_c._unit import Unit", []),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from fsdp_c import _unit", ["_unit"]),
    ],
)
def test_imports_are_seen(code: str, names: list[str | None]):
    assert imported(code, []) == names


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
