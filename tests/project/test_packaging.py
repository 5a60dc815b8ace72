"""What users install: a wheel that names its torch, a tree in place, and the types of both."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import build_script
import pytest
import torch
import wheels

import fsdp_c

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
KINDS = ("wheel", "editable")
SOURCES = "LICENSE README.md build_backend.py csrc fsdp_c pyproject.toml setup.py".split()

FACTS = """import importlib.metadata as metadata, json
import fsdp_c
fsdp_c.fully_shard
from fsdp_c._compat import _torch_names
assert list(_torch_names.names(_torch_names.NEWEST))
print(json.dumps([fsdp_c.__file__, metadata.version("fsdp_c"), metadata.requires("fsdp_c")]))
"""

# Under --strict an ignored error that is not there is an error too.
USER = """import torch
from torch import nn

import fsdp_c
from fsdp_c import FSDPModule, fully_shard


class GPT(nn.Module):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


model = fully_shard(GPT())
loss: torch.Tensor = model.loss(torch.ones(2))
linear: nn.Linear = model  # type: ignore[assignment]
blocks: list[nn.Linear] = fully_shard([nn.Linear(2, 2)], mp_policy=fsdp_c.MixedPrecisionPolicy())
assert isinstance(model, FSDPModule)
model.unshard()
loss = model.loss(loss)
copy: GPT = fsdp_c.clone(fsdp_c.shard(GPT(), "zero2"))
norm: torch.Tensor = fsdp_c.FullyShardedDataParallel(copy).clip_grad_norm_(1.0)
fully_shard(1)  # type: ignore[type-var]
fsdp_c.fuly_shard(model)  # type: ignore[attr-defined]
print(fsdp_c.__version__, fsdp_c.DataParallelMeshDims, fsdp_c.status().version)
"""


def run(*command: Any, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = list(map(str, command))
    return subprocess.run(
        words, cwd=cwd, env={**own, **env}, capture_output=True, text=True, timeout=300
    )


def make_environment(folder: Path) -> Path:
    """A Python that has what this one has, but for what is installed in place here."""
    done = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    (Path(packages) / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return folder / "bin/python"


def copy_sources(folder: Path) -> None:
    """A source folder of its own, which takes the objects that are compiled already."""
    (folder / "build").mkdir(parents=True)
    unwanted = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            shutil.copy2(ROOT / name, folder)
    (ROOT / "build/objects").mkdir(parents=True, exist_ok=True)
    (folder / "build/objects").symlink_to(ROOT / "build/objects")


@pytest.fixture(scope="module", params=KINDS, name="installed")
def installed_copy(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The kind of an installation, and the Python that has it; the user's folder is above."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp(request.param)
    source, python = folder / "source", make_environment(folder / "env")
    copy_sources(source)
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", *(["-e"] if request.param == "editable" else []), source]
    done = run(*command, cwd=folder, FSDP_C_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(source.glob("*.egg-info"))
    return request.param, python


EXTRA = 'rich; extra == "top"'


def test_metadata_names_the_torch_of_a_wheel(installed: tuple[str, Path], tmp_path: Path):
    kind, python = installed
    done = run(python, "-c", FACTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, version, requires = json.loads(done.stdout)
    if kind == "wheel":
        assert (version, requires) == (
            f"{fsdp_c.__version__}+torch{MINOR}",
            [f"torch=={MINOR}.*", EXTRA],
        )
    else:  # the next build in the tree may be for another torch
        assert (version, requires) == (fsdp_c.__version__, ["torch>=2.11", EXTRA])
    assert ("site-packages" in file) == (kind == "wheel")


def test_what_make_wheels_trains(installed: tuple[str, Path], tmp_path: Path):
    """Of a wheel; an editable install is found in its tree, which the program refuses."""
    (tmp_path / "train.py").write_text(wheels.TRAINING)
    command = [installed[1], "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run(*command, "train.py", cwd=tmp_path)
    assert (done.returncode == 0) == (installed[0] == "wheel"), done.stderr
    assert "source/fsdp_c/__init__.py" in done.stderr or installed[0] == "wheel"


def test_pythons_of_wheels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    here = wheels.pythons()
    assert "{}.{}".format(*sys.version_info) in here
    assert all(Path(path).exists() for path in here.values())
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--pythons", "2.7"])
    with pytest.raises(SystemExit):
        wheels.main()
    assert "no Python 2.7 with headers here, but 3." in capsys.readouterr().err
    monkeypatch.setattr(wheels, "tried", failing)
    said = list(wheels.outcomes([("3.11", Path("python"))], ["2.13.0", "2.99.0"], Path()))
    out = capsys.readouterr().out
    assert said == [True, False] and "torch 2.99.0: FAILED\nwhy" in out


def failing(base: Path, torch: str, folder: Path) -> str:
    if torch == "2.13.0":
        return "trains"
    raise wheels.Failed("why")


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_types_reach_the_user(
    installed: tuple[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    cache = tmp_path_factory.getbasetemp() / "mypy"
    options = ["--strict", "--cache-dir", cache, "--python-executable", installed[1]]
    done = run(sys.executable, "-m", "mypy", *options, "user.py", cwd=tmp_path)
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_another_torch_is_one_line(installed: tuple[str, Path], tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.99.0'\n")
    done = run(installed[1], "-c", "import fsdp_c\nfsdp_c.fully_shard", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert f"built for torch {MINOR}, but torch 2.99.0 is installed" in lines[-1]
    assert ("pip install 'torch==" in lines[-1]) == (installed[0] == "wheel")
    assert ("pip install --no-deps -e " in lines[-1]) == (installed[0] == "editable")
    assert sum("  File " in line for line in lines) <= 2


def test_torch_is_found_in_pips_isolation(tmp_path: Path):
    """Which takes the environment's packages off sys.path."""
    code = (
        "import importlib.metadata, site, sys, build_script\n"
        "script = build_script.load()\n"
        "sys.path[:] = [path for path in sys.path if path not in site.getsitepackages()]\n"
        "sys.path_importer_cache.clear()\n"
        "print(script.Torch.installed().version)"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT / "tests" / "support"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [importlib.metadata.version("torch")]


@pytest.fixture(name="backend")
def loaded_backend() -> Any:
    spec = importlib.util.spec_from_file_location("fsdp_c_backend", ROOT / "build_backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_old_setuptools_is_one_line(backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    for hook in ("prepare_metadata_for_build_wheel", "build_wheel", "build_editable"):
        with pytest.raises(SystemExit, match="77 or newer, and here is 65.5.0: .*pip install"):
            getattr(backend, hook)(str(tmp_path))
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(SystemExit, match="none is installed here"):
        backend.build_sdist(str(tmp_path))


def test_missing_and_old_torch_are_one_line(monkeypatch: pytest.MonkeyPatch):
    script = build_script.load()
    monkeypatch.setattr(script.importlib.metadata, "distributions", lambda **_: iter([Old()]))
    with pytest.raises(SystemExit, match="needs torch 2.11 or newer, and here is 2.9.1"):
        script.Torch.installed()
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(script.PathFinder, "find_spec", lambda *_: None)
    with pytest.raises(SystemExit, match="none is found from here: install torch first"):
        script.Torch.installed()


def test_missing_compiler_and_headers_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = build_script.load()
    with pytest.raises(SystemExit, match="compiled with nowhere/g[+][+], which is not installed"):
        script.make(tmp_path / "out.o", ["nowhere/g++", "-c", "in.c"])
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="has no Python.h: install them"):
        script.Torch.installed().compile_flags()


class Old:
    version = "2.9.1"
