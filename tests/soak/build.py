"""A copy of the package whose extension has the shim between its objects, in build/soak.

The core is that of the programs of tests/c, and nothing is optimized as one: calls from object to
object have to stay where the shim can be. `address` is under the address sanitizer.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build_script
import harness

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path("tests/soak/shim.c")
WRAPPED = re.compile(r"__wrap_(\w+)\(|^STATE(?:_VOID)?\((\w+),", re.MULTILINE)
ADDRESS = "address"


def folder_of(sanitize: str) -> Path:
    return ROOT / "build/soak" / (sanitize or "plain")


def build(sanitize: str = "") -> Path:
    """Makes it, or what is stale of it; gives the folder to import from."""
    os.environ["FSDP_C_SANITIZE"] = sanitize
    script = build_script.load()
    del os.environ["FSDP_C_SANITIZE"]
    torch, tools = script.Torch.installed(), script.Toolchain(is_joined=False)
    with script.build_lock():
        objects_at = tools.folder(
            "objects", str(torch), script.sysconfig.get_config_var("EXT_SUFFIX")
        )
        binding = script.BuildExtension.join_binding(None, objects_at)
        own = {
            binding: [*tools.cxx_command(torch), "-O0"],
            str(SHIM): [*tools.c_command(str(SHIM)), "-O1"],
        }
        checked = script.Toolchain(is_test=True)
        core = {s: checked.c_command(s) for s in script.sources(script.C_SOURCES, ".c")}
        objects = script.compile_all((own, objects_at), (core, checked.folder("objects")))
        exports = objects_at / "soak.map"
        exports.write_text(script.EXPORTS.replace("global:", "global: soak_*;"))
        names = sorted({a or b for a, b in WRAPPED.findall((ROOT / SHIM).read_text())} - {"##fn"})
        flags = [*tools.mode_flags(), "-shared", f"-Wl,--version-script={exports}"]
        flags += [f"-Wl,--wrap={name}" for name in names if name != "fn"]
        library = objects_at / "soak_C.so"
        script.link(
            library, [*tools.cxx, *flags], objects, [*torch.link_flags(), *script.LINK_FLAGS]
        )
        place(folder_of(sanitize), library, torch.minor)
    return folder_of(sanitize)


def place(folder: Path, library: Path, minor: str) -> None:
    """The package's own files, and this extension in the place of its own."""
    package = folder / "fsdp_c"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        if old.is_symlink():
            old.unlink()
    for path in (ROOT / "fsdp_c").iterdir():
        if path.suffix != ".so" and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    suffix = build_script.load().sysconfig.get_config_var("EXT_SUFFIX")
    target = package / f"_C-torch{minor}{suffix}"
    target.unlink(missing_ok=True)
    os.link(library, target)


def preloaded() -> dict[str, str]:
    """What Python needs to load an extension that is sanitized while it is not."""

    def find(compiler: str, name: str) -> str:
        command = [compiler, f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    libraries = f"{find('gcc', 'libasan.so')} {find('g++', 'libstdc++.so')}"
    return {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"}


@contextlib.contextmanager
def imported_from(folder: Path) -> Iterator[None]:
    """Ranks that are started within import the package from there."""
    harness.stop()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        harness.stop()
        sys.path.remove(str(folder))
