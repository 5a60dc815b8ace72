"""install(), uninstall(), `python -m fsdp_c` and status(): scripts that know torch only."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, run_ranks
from models import function_replaced
from torch import nn
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_module

import fsdp_c
from fsdp_c._compat import _redirection
from fsdp_c._install import _install

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
SCRIPT = SCRIPTS / "unmodified.py"
KINDS = ("script", "module", "folder")
ENDING = """import json, sys
print(json.dumps([sys.argv[1:], sys.path[0], __name__, __file__, sorted(globals())]))
if sys.argv[1] == "raise":
    raise ValueError("text")
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
raise KeyboardInterrupt
"""


def start(
    *arguments: Any, cwd: Path = ROOT, launcher: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {**os.environ, **one_rank, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def facts_of(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_script_trains_with_fsdp_c() -> None:
    plain = facts_of(start(SCRIPT, "a", "-m"))
    ours = facts_of(start("-m", "fsdp_c", SCRIPT, "a", "-m"))
    assert set(plain.pop("implementations").values()) == {"torch"}
    assert set(ours.pop("implementations").values()) == {"fsdp_c"}
    assert ours == plain
    assert not ours["is_torch_loaded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fate", [("raise",), ("exit", "7"), ("interrupt",)])
def test_runs_and_ends_as_python_does(kind: str, fate: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("script.py", "module_form.py", "package/__main__.py"):
        (tmp_path / name).write_text(ENDING)
    target = {"script": ["script.py"], "module": ["-m", "module_form"], "folder": ["package"]}[kind]
    plain = start(*target, *fate, cwd=tmp_path)
    ours = start("-m", "fsdp_c", *target, *fate, cwd=tmp_path)
    assert plain.returncode != 0
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("arguments", [("missing.py",), ("-m", "missing_module"), ("bad.py",)])
def test_cannot_start_as_python_cannot(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    plain, ours = (start(*before, *arguments, cwd=tmp_path) for before in ((), ("-m", "fsdp_c")))
    assert plain.returncode != 0
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


def test_usage() -> None:
    assert start("-m", "fsdp_c", "--help").stdout.startswith(
        "usage: python -m fsdp_c [--fsdp1] SCRIPT"
    )
    for arguments in ((), ("-m",)):
        done = start("-m", "fsdp_c", *arguments)
        assert done.returncode == 2 and "usage: " in done.stderr


@pytest.mark.usefixtures("quick_scripts")
def test_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    facts = facts_of(start("-m", "fsdp_c", SCRIPT, "x", launcher=launcher))
    assert set(facts["implementations"].values()) == {"fsdp_c"} and facts["argv"][1:] == ["x"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.usefixtures("quick_scripts")
def test_children(method: str) -> None:
    script = SCRIPTS / "spawning.py"
    done = start("-m", "fsdp_c", script, method)
    assert facts_of(done) == ["fsdp_c", "fsdp_c"] and "nothing was sharded" not in done.stderr


IDLE = {
    "": "torchrun --nproc-per-node N",
    "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
    "import torch.distributed as dist, torch\n"
    "dist.init_process_group('gloo'); model = F(torch.nn.Linear(2, 2), device_id="
    "torch.device('cpu'))": "write -m fsdp_c --fsdp1",
    "import sys; sys.modules['transformers'] = sys": "fsdp= and fsdp_config= of TrainingArguments",
    "import sys; sys.modules['lightning'] = sys; sys.exit()": "ModelParallelStrategy",
    "import os, torch.distributed.run; del os.environ['RANK']": "torchrun -m fsdp_c SCRIPT",
}


@pytest.mark.parametrize("code", IDLE)
def test_nothing_was_sharded(code: str, tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text(code)
    done = start("-m", "fsdp_c", script)
    lines = [line for line in done.stderr.splitlines() if line.startswith("[fsdp_c]")]
    assert done.returncode == 0 and len(lines) == 1, done.stderr
    assert "nothing was sharded" in lines[0] and IDLE[code] in lines[0]


def test_says_nothing_of_scripts_that_fail_or_shard(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    for code in ("raise ValueError", "import sys; sys.exit(3)", "import os; os._exit(0)"):
        script.write_text(code)
        assert "nothing was sharded" not in start("-m", "fsdp_c", script).stderr
    for arguments in ([SCRIPT, "a"], ["estimate", "--help"], ["--help"]):
        done = start("-m", "fsdp_c", *arguments)
        assert done.returncode == 0 and "nothing was sharded" not in done.stderr


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, fsdp_c; fsdp_c.__version__; assert 'torch' not in sys.modules"
    done = start("-c", code + "; from fsdp_c import *; fully_shard, Communicator, status")
    assert done.returncode == 0, done.stderr


def test_public_names_alone_are_shown() -> None:
    code = "import json, fsdp_c; print(json.dumps([dir(fsdp_c), fsdp_c.__all__]))"
    shown, public = facts_of(start("-c", code))
    assert shown == sorted([*public, "__version__"])
    assert not [name for name in public if name.startswith("_")]
    done = start("-c", "import fsdp_c; fsdp_c.fuly_shard")
    assert "has no attribute 'fuly_shard'" in done.stderr.splitlines()[-1]


def test_version_without_torch() -> None:
    code = (
        "import sys; from fsdp_c._install import _launch; _launch.main(['--version'])\n"
        "assert 'torch' not in sys.modules"
    )
    minor = ".".join(torch.__version__.split(".")[:2])
    for done in (start("-c", code), start("-m", "fsdp_c", "--version")):
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        assert line.startswith(f"fsdp_c {fsdp_c.__version__}, built for torch ")
        assert minor in line and line.endswith(f"; torch {metadata.version('torch')} is installed")


# --- install() in a running program ---

HELD = torch_fsdp.fully_shard


def hold(shard: Any = torch_fsdp.fully_shard) -> Any:
    return shard


def implementation_of(shard: Any) -> str:
    model = nn.Linear(3, 5)
    assert shard(model, mesh=cached_mesh((2,))) is model
    assert shard.state(model) is model._get_fsdp_state()
    return type(model._get_fsdp_state()).__module__.split(".")[0]


def install_and_back(rank: int, n_ranks: int) -> None:
    torchs, original = HELD, torch_fsdp.fully_shard.state
    before = nn.Linear(3, 5)
    torchs(before, mesh=cached_mesh((2,)))
    for _ in range(2):
        fsdp_c.install()
        fsdp_c.install()
        assert HELD is torch_fsdp.fully_shard is torch_module.fully_shard is fsdp_c.fully_shard
        for shard in (torchs, hold(), partial(hold()).func, HELD):
            assert implementation_of(shard) == "fsdp_c"
        assert torchs.state(before) is HELD.state(before) is before._get_fsdp_state()
        with pytest.raises(AssertionError, match="can only be applied to a module once"):
            torchs(before)
        refuse_and_repeat(torchs)
        fsdp_c.uninstall()
        fsdp_c.uninstall()
        assert HELD is torch_fsdp.fully_shard is torch_module.fully_shard is torchs
        assert torchs.state is original
        assert implementation_of(torchs) == implementation_of(hold()) == "torch"
        assert implementation_of(fsdp_c.fully_shard) == "fsdp_c"
        assert fsdp_c.fully_shard.state(before) is before._get_fsdp_state()


def refuse_and_repeat(shard: Any) -> None:
    """A call that fails leaves no mark on the module."""
    model = nn.Linear(3, 5)
    fields = set(model.__dict__)
    with pytest.raises(TypeError, match="mp_policy must be"):
        shard(model, mp_policy=1)
    assert set(model.__dict__) == fields
    shard(model, mesh=cached_mesh((2,)))


def test_install_and_uninstall() -> None:
    run_ranks(install_and_back, 2)


def test_torchs_state_finds_our_trees() -> None:
    """Pipelining asks torch's function, also where nothing was installed."""
    run_ranks(ask_torchs_function, 2)


def ask_torchs_function(rank: int, n_ranks: int) -> None:
    model = nn.Linear(3, 5)
    assert torch_fsdp.fully_shard.state(model) is None
    harness.implementation().fully_shard(model, mesh=cached_mesh((2,)))
    assert torch_fsdp.fully_shard.state(model) is model._get_fsdp_state()


def test_decorators_built_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are replaced where torch's function itself cannot be told."""
    monkeypatch.setattr(_redirection, "decorated", lambda function: None)
    try:
        fsdp_c.install()
        assert torch_fsdp.fully_shard is fsdp_c.fully_shard
    finally:
        fsdp_c.uninstall()
    assert torch_fsdp.fully_shard is _install._TORCHS


# --- status() ---


def look_at_status(rank: int, n_ranks: int) -> None:
    api, mesh = harness.implementation(), cached_mesh((n_ranks,))
    core, other = (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)) for _ in range(2))
    for model in (core, other):
        api.fully_shard(model[0], mesh=mesh)
        api.fully_shard(model, mesh=mesh)
    before = len(api.status().trees)
    core(torch.ones(2, 3)).sum().backward()
    with function_replaced():
        other(torch.ones(2, 3))
    ours, torchs = api.status().trees[before:]
    assert (ours.root, ours.n_units, ours.runs_on, ours.reason) == ("Sequential", 2, "core", "")
    assert ours.transports == ("shm",) and ours.n_ranks == n_ranks
    replaced = "FSDPParamGroup._record_post_forward was replaced"
    assert (torchs.n_units, torchs.runs_on, torchs.reason) == (2, "torch", replaced)
    core.reshard()
    with function_replaced():
        core(torch.ones(2, 3))
    assert [tree.runs_on for tree in api.status().trees[before:]] == ["torch", "torch"]
    assert torch.__version__ in str(api.status())
    built_for = ".".join(torch.__version__.split(".")[:2])
    assert (api.status().version, api.status().built_for) == (fsdp_c.__version__, built_for)
    assert str(api.status()).startswith(f"fsdp_c {fsdp_c.__version__} built for torch {built_for}")
    del core, other, model


@pytest.mark.parametrize("quiet", ["0", "1"])
def test_status(quiet: str) -> None:
    outcomes = run_ranks(look_at_status, 2, fresh=True, env={"FSDP_C_QUIET": quiet})
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        told = [line for line in outcome.output.splitlines() if line.startswith("[fsdp_c]")]
        assert bool(told) == (quiet == "0" and outcome.rank == 0)
        if told:
            assert told[0] == (
                "[fsdp_c] Sequential (2 units) runs on the C core over shared memory between 2"
                " ranks"
            )
            assert len(told) == 2  # what is handed over is told once
