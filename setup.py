"""Builds fsdp_c: the core as plain C, then the binding as C++ against the torch installed here.

The core is compiled with csrc as its only include path of ours, so it cannot see Python or torch.
Only what changed is compiled again. Switches, all from the environment:
  FSDP_C_DEBUG=1         no optimisation, assertions, symbols
  FSDP_C_SANITIZE=LIST   address, undefined, thread; joined by commas
  FSDP_C_WERROR=1        warnings are errors
  FSDP_C_CUDA=auto|0|1   kernels for NVIDIA GPUs: where nvcc is found, never, or nvcc must be there
  CC, CXX, MAX_JOBS      compilers (gcc, g++) and how many run at once (one per CPU, at most 4)
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)


# Every source, by folder; a file that is not named here is an error.
C_SOURCES = {
    "csrc/base": "alloc clock dtype idle status sum threads",
    "csrc/kernels": "kern_avx2 kern_avx512 kern_avx512_bf16 kern_optim kern_ref kern_select no_x86",
    "csrc/optim": "clip optim",
    "csrc/kernels/cuda": "load runs",
    "csrc/device": "caller cuda_events",
    "csrc/device/host": "device moves operators",
    "csrc/window": "window",
    "csrc/transport": (
        "callback collectives nccl_board nccl_call nccl_collectives nccl_group nccl_library "
        "nccl_marks nccl_wait nccl_watch process shm shm_ask shm_region shm_segment shm_wait "
        "transport watcher"
    ),
    "csrc/comm": (
        "arrays beats comm mapped message pieces rails rails_collectives rails_gathers "
        "rails_phases rails_sums step"
    ),
    "csrc/snapshot": "copier ranks snapshot sums",
    "csrc/engine": (
        "apart batch clock domain exchange exchange_arena exchange_full gathers layout "
        "layout_runs meet order present reduction reduction_begun reduction_replicas root "
        "root_backward schedule schedule_moves schedule_reduce schedule_setup "
        "schedule_slots slots training unit unsharding unsharding_device unsharding_mapped "
        "unsharding_messages unsharding_states unsharding_writes updates waits"
    ),
}
# Linked with the programs that test the core, and with nothing else.
C_SIM_SOURCES = {
    "csrc/device/sim": "sim_collective sim_memory sim_ops sim_queue sim_run",
}
CXX_SOURCES = {
    "csrc/libtorch": ("accelerator group_collectives group_rails group_store noted storage types"),
    "csrc/bind": "module",
    "csrc/bind/comm": "beats communicator host nccl process_group transport",
    "csrc/bind/device": "device device_comm device_unit",
    "csrc/bind/fsdp": (
        "accumulated autograd domain events extended gradients graphs hooks module_call "
        "param_group parameters python_door root root_object slices state unit unit_ops"
    ),
    "csrc/bind/optim": "local_tensors params",
    "csrc/bind/python": "calls python replaced_functions",
    "csrc/bind/snapshot": "copier",
    "csrc/bind/tensor": "layout pytree tensors",
}
C_TEST_SOURCES = {
    "tests/c": (
        "test_apart test_base test_batch test_batch_pieces test_batch_posts "
        "test_beats test_begun_sums test_collectives test_comm test_comm_arrays "
        "test_cuda_flat test_cuda_index test_cuda_open test_cuda_plans "
        "test_device_host test_device_sim test_domain test_exchange test_exchange_arena "
        "test_exchange_failed test_exchange_room test_exchange_steps test_faults "
        "test_gathers test_group_history "
        "test_kernels test_kernels_bf16 test_kernels_cpuid test_kernels_optim "
        "test_kernels_round test_layout test_leaving test_meetings test_nccl "
        "test_nccl_deadlines test_optim "
        "test_order test_present test_rails test_rails_begun test_rails_faults "
        "test_rails_scale test_reduction test_reduction_messages "
        "test_reduction_seen test_reduction_sent test_reduction_types test_root "
        "test_root_calls test_root_failures test_schedule test_schedule_alone "
        "test_schedule_capture test_schedule_faults test_schedule_gathers "
        "test_schedule_grads test_schedule_kernels test_schedule_meetings "
        "test_schedule_order test_schedule_units test_slots test_snapshot "
        "test_transport test_unit test_unsharding test_unsharding_ahead "
        "test_unsharding_calls test_unsharding_device test_unsharding_extended "
        "test_unsharding_pages test_unsharding_slices test_unsharding_writes "
        "test_updates test_waits test_window"
    ),
}
# Libraries that the test programs open: NCCL's newest interface, and an old one, with events of
# CUDA's driver, and GPU kernels of this version, and of another one.
NCCL_STAND_IN = [
    f"tests/c/nccl/{name}.c" for name in ("driver", "engine", "gpu_kernels", "stand_in")
]
C_TEST_LIBRARIES = {"libnccl_stand_in.so": [], "libnccl_stand_in_old.so": ["-DSTAND_IN_OLD"]}

# One library beside the extension, without a link to torch. One PTX for all: machine code for each
# of these, and the driver's compiler for what is newer.
CUDA_SOURCE = "csrc/kernels/cuda/kern_cuda.cu"
CUDA_LIBRARY = "fsdp_c/libfsdp_c_cuda.so"
CUDA_MACHINES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
CUDA_EXPORTS = "{ global: fc_cuda_kernels_v1; local: *; };\n"

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd", "-mf16c", "-mfma"]

# Flags of single files; the CPU is asked at run time whether a kernel of theirs may be called.
FILE_FLAGS = {
    "csrc/kernels/kern_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "csrc/kernels/kern_avx512.c": AVX512,
    "csrc/kernels/kern_avx512_bf16.c": [*AVX512, "-mavx512bf16"],
}
IS_X86 = platform.machine() in ("x86_64", "AMD64")
OTHER_CPU = {"csrc/kernels/no_x86.c"} if IS_X86 else set(FILE_FLAGS)

C_WARNINGS = shlex.split(
    "-Wall -Wextra -Wpedantic -Wshadow -Wundef -Wconversion -Wsign-conversion -Wstrict-prototypes"
    " -Wmissing-prototypes -Wwrite-strings -Wvla"
)
CXX_WARNINGS = shlex.split("-Wall -Wextra -Wshadow=local -Wno-missing-field-initializers")
LINK_FLAGS = ["-pthread", "-lm", "-ldl"]
EXPORTS = "{ global: PyInit__C; local: *; };\n"


def sources(table: dict[str, str], suffix: str) -> list[str]:
    """The paths that a table names, after a check that they are the files that exist."""
    named = {
        f"{folder}/{name}{suffix}" for folder, names in table.items() for name in names.split()
    }
    there = {
        str(path.relative_to(ROOT))
        for folder in table
        for path in (ROOT / folder).glob(f"*{suffix}")
    }
    if named != there:
        raise SystemExit(
            f"setup.py names files that do not exist: {sorted(named - there)},"
            f" or misses files that do: {sorted(there - named)}"
        )
    return sorted(named - OTHER_CPU)


def environment_folders() -> list[str]:
    """Where this Python's packages are; pip's isolation takes them off sys.path, and only that."""
    is_venv = sys.prefix != sys.base_prefix
    return [*site.getsitepackages(), *([] if is_venv else [site.getusersitepackages()])]


@dataclass(frozen=True)
class Torch:
    """The torch of this environment, read without importing it."""

    version: str
    root: Path

    @classmethod
    def installed(cls) -> Torch:
        places = [*sys.path, *environment_folders()]
        spec = importlib.util.find_spec("torch") or PathFinder.find_spec("torch", places)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(
                "fsdp_c is built against the torch of your environment, and none is found from"
                " here: install torch first; if it is, add --no-build-isolation"
            )
        found = importlib.metadata.distributions(name="torch", path=places)
        torch = cls(next(found).version, Path(spec.submodule_search_locations[0]))
        if tuple(map(int, torch.minor.split("."))) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise SystemExit(f"fsdp_c needs torch {oldest} or newer, and here is {torch.version}")
        return torch

    @property
    def minor(self) -> str:
        """What a build depends on: 2.13 of 2.13.1+cpu."""
        return ".".join(self.version.split(".")[:2])

    def compile_flags(self) -> list[str]:
        include = self.root / "include"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise SystemExit(
                f"fsdp_c needs the headers of Python, and {sysconfig.get_path('include')} has no"
                " Python.h: install them (python3-dev on Debian and Ubuntu, python3-devel on"
                " Fedora)"
            )
        paths = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
        return [
            "-D_GLIBCXX_USE_CXX11_ABI=1",
            *(f"-isystem{path}" for path in paths),
        ]

    def link_flags(self) -> list[str]:
        # No run path: fsdp_c/_native.py imports torch first, so its libraries are loaded already.
        libraries = ("torch_python", "torch", "torch_cpu", "c10")
        return [f"-L{self.root / 'lib'}", *(f"-l{name}" for name in libraries)]


# The code that runs once per unit and step is never in the processor's nearest cache, so its size
# is its cost: the binding and the engine are optimized as one, and call torch without trampolines.
STEP_FLAGS = ["-flto=auto", "-fno-plt"]


@dataclass
class Toolchain:
    """Compilers and flags of one variant; objects of different variants never mix."""

    is_test: bool = False
    is_debug: bool = os.environ.get("FSDP_C_DEBUG") == "1"
    is_strict: bool = os.environ.get("FSDP_C_WERROR") == "1"
    sanitize: str = os.environ.get("FSDP_C_SANITIZE", "")
    is_joined: bool = True  # optimized as one; what stands between objects needs them apart
    cc: list[str] = field(default_factory=lambda: shlex.split(os.environ.get("CC", "gcc")))
    cxx: list[str] = field(default_factory=lambda: shlex.split(os.environ.get("CXX", "g++")))

    @cached_property
    def can_join(self) -> bool:
        """Both are gcc, since objects of clang need its own linker for this, and the linker finds
        gcc's part in it; some installations lack that."""
        versions = [
            subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
            for command in (self.cc, self.cxx)
        ]
        if not all("Free Software Foundation" in text for text in versions):
            return False
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "tried.cpp"), Path(folder, "tried.so")
            source.write_text("int tried() { return 1; }\n")
            command = [*self.cxx, *STEP_FLAGS, "-fPIC", "-shared", str(source), "-o", str(library)]
            return subprocess.run(command, capture_output=True).returncode == 0

    def mode_flags(self) -> list[str]:
        flags = ["-O0", "-g3"] if self.is_debug else ["-O2", "-g1" if self.sanitize else "-g0"]
        if not self.is_debug and not self.is_test:
            flags.append("-DNDEBUG")
        if self.sanitize:
            flags += [f"-fsanitize={self.sanitize}", "-fno-omit-frame-pointer"]
            flags.append("-fno-sanitize-recover=all")
        is_plain = not (self.is_test or self.is_debug or self.sanitize)
        if is_plain and self.is_joined and self.can_join:
            flags += STEP_FLAGS
        if self.is_strict:
            flags.append("-Werror")
        return flags

    def c_command(self, source: str) -> list[str]:
        flags = ["-std=gnu11", *C_WARNINGS, *self.mode_flags(), "-fPIC", "-fvisibility=hidden"]
        if source.startswith("csrc/kernels/"):
            flags += ["-ffp-contract=off", *([] if self.is_debug else ["-O3"])]
            flags += ["-fno-lto"]  # the code that the programs of tests/c have tested
        return [*self.cc, *flags, *FILE_FLAGS.get(source, []), "-pthread", "-Icsrc"]

    def cxx_command(self, torch: Torch) -> list[str]:
        flags = ["-std=c++20", *CXX_WARNINGS, *self.mode_flags(), "-fPIC", "-fvisibility=hidden"]
        flags.append("-fopenmp")  # for at::parallel_for; torch brings the library
        return [*self.cxx, *flags, *torch.compile_flags(), "-pthread", "-Icsrc"]

    def folder(self, kind: str, *facts: str) -> Path:
        key = repr((self, sysconfig.get_platform(), facts)).encode()
        return Path("build", kind, hashlib.sha256(key).hexdigest()[:12])


@dataclass(frozen=True)
class Nvcc:
    """CUDA's compiler. `-fmad=false`: where a product and a sum are rounded once is written out."""

    path: str

    @classmethod
    def wanted(cls) -> Nvcc | None:
        """As FSDP_C_CUDA says; a machine with a GPU and without nvcc is told what it lacks."""
        choice = os.environ.get("FSDP_C_CUDA") or "auto"
        if choice not in ("auto", "0", "1"):
            raise SystemExit(f"FSDP_C_CUDA={choice!r}: expected auto, 0 or 1")
        if choice == "0":
            return None
        folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        places = [f"{folder}/bin/nvcc" for folder in folders if folder]
        found = next(filter(None, map(shutil.which, [*places[:-1], "nvcc", places[-1]])), None)
        if found is not None:
            return cls(found)
        if choice == "1":
            raise SystemExit(
                "FSDP_C_CUDA=1, but nvcc is neither on the PATH nor below CUDA_HOME: install CUDA's"
                " toolkit, or set CUDA_HOME"
            )
        if Path("/proc/driver/nvidia/version").exists():
            print(
                "fsdp_c: this machine has a GPU but no nvcc, so the GPU kernels are not built:"
                " torch's operators take their place, a parameter at a time; install CUDA's"
                " toolkit (or set CUDA_HOME) and build again",
                flush=True,
            )
        return None

    def machines(self) -> list[str]:
        """Those of CUDA_MACHINES that this nvcc knows."""
        done = subprocess.run([self.path, "--list-gpu-code"], capture_output=True, text=True)
        known = done.stdout.split()
        return [name for name in CUDA_MACHINES if name in known]

    def command(self, tools: Toolchain) -> list[str]:
        machines = self.machines()
        if not machines:
            raise SystemExit(
                f"{self.path} compiles for none of {', '.join(CUDA_MACHINES)}: install a newer"
                " toolkit, or set FSDP_C_CUDA=0"
            )
        ptx = machines[0].replace("sm", "compute")
        codes = ",".join([*machines, ptx])
        flags = ["-std=c++17", "-O3", "-fmad=false", f"-gencode=arch={ptx},code=[{codes}]"]
        flags += [f"--threads={job_count()}", "-Xptxas=-v"]
        flags.append("-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas")
        if tools.is_strict:
            flags.append("-Werror=all-warnings")
        return [self.path, *flags, "-Icsrc"]


def is_stale(target: Path, command: list[str], inputs: list[Path]) -> bool:
    """Whether `target` is missing, older than an input, or made by another command."""
    note = target.with_name(target.name + ".cmd")
    if not target.exists() or not note.exists() or note.read_text() != shlex.join(command):
        return True
    made = target.stat().st_mtime_ns
    return any(not p.exists() or p.stat().st_mtime_ns > made for p in inputs)


def make(target: Path, command: list[str], report: Path | None = None) -> None:
    """Runs a command that writes `target`; what it prints goes into `report` if all went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    note = target.with_name(target.name + ".cmd")
    note.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(
            f"fsdp_c is compiled with {command[0]}, which is not installed: install gcc and g++,"
            " or set CC and CXX to other compilers"
        ) from None
    if report is not None and done.returncode == 0:
        report.write_text(done.stdout + done.stderr)
    elif done.stdout or done.stderr:
        print(f"{target.name}:\n{done.stdout}{done.stderr}", end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"fsdp_c: this command failed:\n{shlex.join(command)}")
    note.write_text(shlex.join(command))


def compile_object(
    source: str, command: list[str], folder: Path, report: Path | None = None
) -> Path:
    """Compiles one file unless its object is newer than it and every header of ours it read."""
    name = source.removeprefix(f"{folder}/")
    target = folder / f"{name}.o"
    deps = target.with_suffix(".d")
    command = [*command, "-MMD", "-MF", str(deps), "-c", source, "-o", str(target)]
    inputs = [Path(source)]
    if deps.exists():
        names = deps.read_text().replace("\\\n", " ").partition(":")[2].split()
        inputs += [Path(name) for name in names]
    if is_stale(target, command, inputs):
        print(f"compiling {source}", flush=True)
        make(target, command, report)
    return target


def job_count() -> int:
    return int(os.environ.get("MAX_JOBS") or min(os.cpu_count() or 1, 4))


def compile_all(*wanted: tuple[dict[str, list[str]], Path]) -> list[Path]:
    """The objects of each source's command, in a folder."""
    with ThreadPoolExecutor(job_count()) as pool:
        work = [
            pool.submit(compile_object, source, command, folder)
            for commands, folder in wanted
            for source, command in commands.items()
        ]
        wait(work, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    for item in work:
        if not item.cancelled() and item.exception() is not None:
            raise item.exception()
    return [item.result() for item in work]


def link(target: Path, command: list[str], objects: list[Path], libraries: list[str]) -> None:
    command = [*command, "-o", str(target), *map(str, objects), *libraries]
    if is_stale(target, command, objects):
        print(f"linking {target}", flush=True)
        make(target, command)


@dataclass(frozen=True)
class CudaBuild:
    shared_object: Path
    report: Path  # of the assembler: registers, stack and spills of each kernel


def build_cuda(nvcc: Nvcc, tools: Toolchain) -> CudaBuild:
    """The library of GPU kernels, in the build folder. It depends on no torch and no Python."""
    command = nvcc.command(tools)
    folder = tools.folder("cuda", *command)
    folder.mkdir(parents=True, exist_ok=True)
    built = CudaBuild(folder / Path(CUDA_LIBRARY).name, folder / "kern_cuda.report")
    objects = [compile_object(CUDA_SOURCE, command, folder, built.report)]
    exports = folder / "exports.map"
    exports.write_text(CUDA_EXPORTS)
    flags = ["-shared", "-cudart=static", "-Xlinker", f"--version-script={exports}"]
    link(built.shared_object, [nvcc.path, *flags], objects, [])
    return built


def replace(target: Path, content: bytes) -> None:
    """Writes a library in one step: programs that have the old one mapped keep it."""
    if target.exists() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.chmod(0o755)
    fresh.replace(target)


@contextmanager
def build_lock() -> Iterator[None]:
    """One build at a time in this tree: objects are shared."""
    os.chdir(ROOT)
    Path("build").mkdir(exist_ok=True)
    with open("build/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildExtension(build_ext):
    """Compiles core and binding and links fsdp_c._C.

    The file is named after the torch it was built against, so that environments with different
    torches share one source tree; fsdp_c/_native.py loads the one that fits.
    """

    def get_ext_filename(self, fullname: str) -> str:
        path = Path(super().get_ext_filename(fullname))
        suffix = f"_C-torch{Torch.installed().minor}"
        return str(path.with_name(path.name.replace("_C", suffix, 1)))

    def run(self) -> None:
        with build_lock():
            super().run()

    def build_extension(self, ext: Extension) -> None:
        torch, tools = Torch.installed(), Toolchain()
        folder = tools.folder("objects", str(torch), sysconfig.get_config_var("EXT_SUFFIX"))
        binding = {self.join_binding(folder): tools.cxx_command(torch)}
        core = {source: tools.c_command(source) for source in sources(C_SOURCES, ".c")}  # any torch
        objects = compile_all((binding, folder), (core, tools.folder("objects")))
        exports = folder / "exports.map"
        exports.write_text(EXPORTS)
        library = folder / "_C.so"
        flags = [*tools.mode_flags(), "-shared", f"-Wl,--version-script={exports}"]
        link(library, [*tools.cxx, *flags], objects, [*torch.link_flags(), *LINK_FLAGS])
        target = Path(self.get_ext_fullpath(ext.name))
        for other in target.parent.glob("_C*"):
            if other != target:
                other.unlink()
        replace(target, library.read_bytes())
        self.place_cuda(Path(self.build_lib, CUDA_LIBRARY))

    def place_cuda(self, target: Path) -> None:
        nvcc = Nvcc.wanted()
        if nvcc is None:
            target.unlink(missing_ok=True)
        else:
            replace(target, build_cuda(nvcc, Toolchain()).shared_object.read_bytes())

    def join_binding(self, folder: Path) -> str:
        """One file that includes the binding's: reading torch's headers is most of their time.

        Fifteen files took 120 s of CPU one by one and take 16 s together.
        """
        joined = folder / "bind.cpp"
        names = [source.removeprefix("csrc/") for source in sources(CXX_SOURCES, ".cpp")]
        text = "".join(f'#include "{name}"\n' for name in names)
        if not joined.exists() or joined.read_text() != text:
            joined.parent.mkdir(parents=True, exist_ok=True)
            joined.write_text(text)
        return str(joined)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            replace(ROOT / name, Path(self.build_lib, name).read_bytes())
        library = Path(self.build_lib, CUDA_LIBRARY)
        if library.exists():
            replace(ROOT / CUDA_LIBRARY, library.read_bytes())
        else:
            (ROOT / CUDA_LIBRARY).unlink(missing_ok=True)


class BuildCTests(Command):
    """Builds tests/c/test_*.c, each linked with the core alone, and prints the folder."""

    description = "build the programs that test the C core"
    user_options: list[tuple[str, str | None, str]] = [
        ("build-dir=", "d", "where to put them"),
        ("only-libraries", None, "not the programs, but what they open"),
    ]
    boolean_options = ["only-libraries"]

    def initialize_options(self) -> None:
        self.build_dir = "build/c-tests"
        self.only_libraries = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        with build_lock():
            self.build()

    def build(self) -> None:
        tools = Toolchain(is_test=True)
        folder = tools.folder("objects")
        names = sources(C_SOURCES, ".c") + sources(C_SIM_SOURCES, ".c")
        core = compile_all(({s: tools.c_command(s) for s in names}, folder))
        for name, flags in C_TEST_LIBRARIES.items():
            commands = {s: [*tools.c_command(s), *flags, "-Itests/c"] for s in NCCL_STAND_IN}
            made = compile_all((commands, folder / name))
            library = Path(self.build_dir, name)
            link(library, [*tools.cc, *tools.mode_flags(), "-shared"], [*made, *core], LINK_FLAGS)
        if not self.only_libraries:
            self.build_programs(tools, core, folder)

    def build_programs(self, tools: Toolchain, core: list[Path], folder: Path) -> None:
        programs = sources(C_TEST_SOURCES, ".c")
        # Hardly optimized: most of their time is in the core, and they compile in a third of it.
        commands = {s: [*tools.c_command(s), "-Og", "-Itests/c"] for s in programs}
        tests = compile_all((commands, folder))
        for test in tests:
            program = Path(self.build_dir, test.name.removesuffix(".c.o"))
            link(program, [*tools.cc, *tools.mode_flags()], [test, *core], LINK_FLAGS)


def metadata_of(commands: list[str]) -> dict[str, object]:
    """A wheel fits one minor version of torch, and says so; a source tree has builds for several.

    `dist_info` alone is asked for a wheel's metadata; an editable wheel is a tree's.
    """
    version = runpy.run_path(str(ROOT / "fsdp_c/_built.py"))["__version__"]
    if {"bdist_wheel", "dist_info"}.isdisjoint(commands):
        oldest = ".".join(map(str, OLDEST_TORCH))
        return {"version": version, "install_requires": [f"torch>={oldest}"]}
    minor = Torch.installed().minor
    metadata: dict[str, object] = {"version": f"{version}+torch{minor}"}
    if "bdist_wheel" in commands:  # whoever has the tree on sys.path would find it there
        Path(ROOT, "build").mkdir(exist_ok=True)
        metadata["options"] = {"egg_info": {"egg_base": "build"}}
    return {**metadata, "install_requires": [f"torch=={minor}.*"]}


if __name__ == "__main__":
    setup(
        **metadata_of(sys.argv[1:]),
        ext_modules=[Extension("fsdp_c._C", sources=[])],
        cmdclass={"build_ext": BuildExtension, "build_c_tests": BuildCTests},
    )
