"""What the build hands out: symbols, the note about torch, make's targets, the source archive."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import build_script
import pytest
import torch

import fsdp_c
from fsdp_c import _built, _native

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(scope="module", name="build_script")
def loaded_build_script() -> ModuleType:
    return build_script.load()


def test_extension_exports_its_entry_alone():
    command = ["nm", "--dynamic", "--defined-only", _native._C.__file__]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit__C"]


def test_other_torch_minor_is_refused():
    built_for = re.search(r"_C-torch(\d+\.\d+)\.", _native._C.__file__)
    assert built_for is not None
    with pytest.raises(ImportError) as error:
        _built.extension("2.9.1+cpu")
    text = str(error.value)
    assert built_for[1] in text and "torch 2.9.1+cpu is installed" in text
    root = _built.FOLDER.parent
    assert f"`pip install --no-deps -e {root}`" in text
    assert text.endswith(f"run from another folder than {root}, which hides it")


def test_without_the_source_another_build_is_named(tmp_path: Path):
    for minor in ("2.9", "2.13"):
        (tmp_path / Path(_native._C.__file__).name.replace(MINOR, minor)).touch()
    assert _built.torches(tmp_path) == ["2.9", "2.13"]
    with pytest.raises(ImportError) as error:
        _built.extension("2.14.0", tmp_path)
    assert str(error.value) == (
        f"fsdp_c {fsdp_c.__version__} was built for torch 2.9 and 2.13, but torch 2.14.0 is"
        " installed: go back with `pip install 'torch==2.13.*'`, or install a build for torch 2.14,"
        " whose version ends in +torch2.14"
    )


def test_other_torch_patch_is_accepted():
    path = Path(_native._C.__file__)
    assert _built.extension(f"{MINOR}.99+other", path.parent) == path


def test_missing_extension_is_explained(tmp_path: Path):
    with pytest.raises(ImportError, match="not built for this Python: install a build for"):
        _built.extension(torch.__version__, tmp_path)


@pytest.mark.parametrize("name", ["ref", ""])
def test_kernels_are_chosen_by_name(name: str):
    code = "from fsdp_c._native import _C; print(_C.kernels())"
    env = {**os.environ, "FSDP_C_KERNELS": name}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (name or _native._C.kernels())


def test_kernels_that_the_cpu_lacks_are_refused():
    lacking = SimpleNamespace(use_kernels=lambda name: False, kernels=lambda: "avx2")
    with pytest.raises(ImportError, match="FSDP_C_KERNELS=avx512: this CPU lacks .* avx2"):
        _native.choose_kernels(lacking, "avx512")


TABLES = [("C_SOURCES", ".c"), ("C_SIM_SOURCES", ".c"), ("CXX_SOURCES", ".cpp")]
TABLES += [("C_TEST_SOURCES", ".c")]


@pytest.mark.parametrize(("name", "suffix"), TABLES)
def test_source_lists_are_whole_and_sorted(build_script: ModuleType, name: str, suffix: str):
    table: dict[str, str] = getattr(build_script, name)
    assert build_script.sources(table, suffix)
    assert all(names.split() == sorted(names.split()) for names in table.values())


def test_every_folder_is_named(build_script: ModuleType):
    folders = {folder for name, _ in TABLES for folder in getattr(build_script, name)}
    paths = [path for glob in ("csrc/**/*.c*", "tests/c/*.c") for path in ROOT.glob(glob)]
    assert {str(path.parent.relative_to(ROOT)) for path in paths} == folders


def test_source_list_is_held_to_the_files(build_script: ModuleType):
    for names in ("alloc clock dtype", "alloc clock dtype status strings"):
        with pytest.raises(SystemExit, match="status|strings"):
            build_script.sources({"csrc/base": names}, ".c")


def test_core_cannot_see_python(build_script: ModuleType, tmp_path: Path):
    source = tmp_path / "sees_python.c"
    source.write_text("#include <Python.h>\n")
    command = build_script.Toolchain().c_command("csrc/base/status.c")
    done = subprocess.run(
        [*command, "-fsyntax-only", str(source)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Python.h: No such file" in done.stderr


@pytest.mark.parametrize("can_link", [True, False])
def test_gcc_that_cannot_join_objects_builds_without(
    build_script: ModuleType, tmp_path: Path, can_link: bool
):
    """As where the linker says "could not run lto-wrapper": sources compile all the same."""
    compiler = tmp_path / "g++"
    refusal = "" if can_link else 'case "$*" in *-flto*-shared*) exit 1;; esac\n'
    compiler.write_text(f'#!/bin/sh\n{refusal}exec g++ "$@"\n')
    compiler.chmod(0o755)
    tools = build_script.Toolchain(is_test=False, is_debug=False, sanitize="", cxx=[str(compiler)])
    assert ("-flto=auto" in tools.mode_flags()) == can_link


def test_make_lists_every_target():
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z-]+) +\S", shown, re.MULTILINE)
    assert listed == rules
    wanted = "build demo test test-c bench sanitize lint format gpu-check clean".split()
    assert set(wanted) <= set(listed)


def test_source_archive_can_be_built_and_tested(tmp_path: Path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    patterns = ("csrc/**/*.[ch]", "csrc/**/*.c*", "tests/**/*.py", "tests/c/*", "fsdp_c/**/*.py")
    files = {str(path.relative_to(ROOT)) for glob in patterns for path in ROOT.glob(glob)}
    files |= {
        "Makefile",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "build_backend.py",
        "fsdp_c/py.typed",
    }
    files |= {"tests/gpu/helper.c", "benchmarks/bench_cuda_kernels.py"}
    pages = ("docs/**/*.*", ".github/**/*.*", "benchmarks/results/*.json", ".ci/run", "*.md")
    files |= {str(path.relative_to(ROOT)) for glob in pages for path in ROOT.glob(glob)}
    assert files <= names
