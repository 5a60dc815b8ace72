"""The library of GPU kernels: symbols, registers, spills; and what a build without nvcc says."""

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import build_script
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

from gpu_kernels import KernelError, Kernels, build_helper  # noqa: E402

KERNELS = ["adam_kernel", "finish_kernel", "move_kernel", "slots_kernel", "squares_kernel"]


@pytest.fixture(scope="module", name="build_script")
def loaded_build_script() -> ModuleType:
    return build_script.load()


@pytest.fixture(scope="module")
def built(build_script: ModuleType) -> Any:
    """What the extension's build left behind, made again if it is out of date."""
    nvcc = build_script.Nvcc.wanted()
    if nvcc is None:
        pytest.skip("nvcc was not found (or FSDP_C_CUDA=0): nothing was compiled")
    before = Path.cwd()
    with build_script.build_lock():
        library = build_script.build_cuda(nvcc, build_script.Toolchain())
    os.chdir(before)
    return library


def dynamic(path: Path, *flags: str) -> list[str]:
    command = ["nm", "--dynamic", *flags, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_library_exports_one_symbol(built: Any):
    assert dynamic(ROOT / built.shared_object, "--defined-only") == ["fc_cuda_kernels_v1"]


def fat_entries(content: bytes) -> Iterator[tuple[str, int]]:
    """What the library holds for which machine, CUDA's runtime too; in "fat binaries" of CUDA's."""
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), content):
        version, header_bytes, bytes_after = struct.unpack_from("<HHQ", content, match.start() + 4)
        at = match.start() + header_bytes
        end = at + bytes_after
        while version == 1 and at < min(end, len(content)):
            kind, _, header_bytes, entry_bytes = struct.unpack_from("<HHIQ", content, at)
            yield {1: "ptx", 2: "elf"}[kind], struct.unpack_from("<I", content, at + 28)[0]
            at += header_bytes + entry_bytes


def test_library_holds_code_for_each_machine_and_ptx_for_newer_ones(
    built: Any, build_script: ModuleType
):
    """The machines that the project names, as far as this nvcc knows them."""
    machines = {int(name[3:]) for name in build_script.Nvcc.wanted().machines()}
    found = set(fat_entries((ROOT / built.shared_object).read_bytes()))
    assert found >= {("elf", machine) for machine in machines} | {("ptx", min(machines))}
    assert machines <= {80, 86, 89, 90, 100}


def test_library_needs_the_c_library_alone(built: Any):
    """CUDA's runtime is inside; the driver is found by it at run time."""
    command = ["readelf", "--dynamic", str(ROOT / built.shared_object)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    system = r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux.*)\.so\.\d+"
    assert needed and all(re.fullmatch(system, name) for name in needed)


def test_kernels_keep_everything_in_registers(built: Any, build_script: ModuleType):
    """Stack, spills and local memory would show here, for each kernel on each machine."""
    report = (ROOT / built.report).read_text()
    entries = re.findall(r"Compiling entry function '(\w+)' for '(sm_\w+)'", report)
    machines = build_script.Nvcc.wanted().machines()
    seen = {(kernel, machine) for name, machine in entries for kernel in KERNELS if kernel in name}
    assert seen == {(kernel, machine) for kernel in KERNELS for machine in machines}
    stacks = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    assert len(stacks) >= len(seen) and set(stacks) == {("0", "0", "0")}
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == len(seen) and max(registers) <= 80  # 6 blocks of 4 warps
    assert "lmem" not in report


def test_vectors_are_loaded_and_stored_whole(build_script: ModuleType, tmp_path: Path):
    """Left to nvcc, a vector's store became four, and the addresses were of no known memory."""
    nvcc = build_script.Nvcc.wanted()
    if nvcc is None:
        pytest.skip("nvcc was not found (or FSDP_C_CUDA=0): nothing was compiled")
    ptx = tmp_path / "kernels.ptx"
    command = [nvcc.path, "-std=c++17", "-O3", "-fmad=false", "-Icsrc", "-ptx"]
    command += [f"-arch={nvcc.machines()[0]}", build_script.CUDA_SOURCE, "-o", str(ptx)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    accesses = re.findall(r"\b((?:ld|st)\.[\w.]+)", ptx.read_text())
    assert {name.split(".")[1] for name in accesses} <= {"global", "param", "shared"}
    assert accesses.count("ld.global.v4.u32") > 100 and accesses.count("st.global.v4.u32") > 100


def test_core_opens_the_library(built: Any, tmp_path: Path):
    """That needs no GPU; a launch without one is answered with an error, not with a crash."""
    helper = build_helper(tmp_path)
    with pytest.raises(KernelError, match="no GPU kernels at .*: nvcc was missing"):
        Kernels(helper, tmp_path / "libfsdp_c_cuda.so")
    with pytest.raises(KernelError, match="holds GPU kernels of another version"):
        Kernels(helper, helper)
    kernels = Kernels(helper, ROOT / built.shared_object)
    kernels.check(0)
    with pytest.raises(KernelError, match="invalid argument"):
        kernels.check(1)


def test_switch_of_the_build(
    build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FSDP_C_CUDA", "0")
    assert build_script.Nvcc.wanted() is None
    monkeypatch.setenv("FSDP_C_CUDA", "yes")
    with pytest.raises(SystemExit, match="FSDP_C_CUDA='yes': expected auto, 0 or 1"):
        build_script.Nvcc.wanted()
    monkeypatch.setattr(build_script.shutil, "which", lambda name: None)
    monkeypatch.setenv("FSDP_C_CUDA", "1")
    with pytest.raises(SystemExit, match="nvcc is neither on the PATH nor below CUDA_HOME"):
        build_script.Nvcc.wanted()
    monkeypatch.delenv("FSDP_C_CUDA")
    monkeypatch.setattr(build_script.Path, "exists", lambda path: False)
    assert build_script.Nvcc.wanted() is None
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(build_script.Path, "exists", lambda path: True)
    assert build_script.Nvcc.wanted() is None
    assert "has a GPU but no nvcc" in capsys.readouterr().out


def test_nvcc_that_is_too_old_is_named(build_script: ModuleType, tmp_path: Path):
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho sm_70\n")
    old.chmod(0o755)
    with pytest.raises(SystemExit, match="compiles for none of sm_80.*FSDP_C_CUDA=0"):
        build_script.Nvcc(str(old)).command(build_script.Toolchain())
