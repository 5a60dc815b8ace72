"""The commands of docs/launching.md for Slurm and MPI, with stand-ins for the launchers.

A stand-in starts processes with the variables that the launcher's manual promises, and nothing else
of it: who reads another variable, or lets the wrong shell read it, trains with the wrong ranks.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_scripts")
COMMANDS = re.findall(
    r"^```\n((?:#[^\n]*\n|export [^\n]*\n)*(?:srun|mpirun|mpiexec) .*?)^```",
    (ROOT / "docs/launching.md").read_text(),
    re.MULTILINE | re.DOTALL,
)

LAUNCHER = """
import os, subprocess, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
given, sizes = {}, {}
while words[0].startswith("-"):
    option = words.pop(0)
    if option == "-x":  # Open MPI
        key, _, value = words.pop(0).partition("=")
        given[key] = value
    elif option == "-genv":  # MPICH
        key = words.pop(0)
        given[key] = words.pop(0)
    else:
        sizes[option] = int(words.pop(0))
nodes = int(os.environ["SLURM_NNODES"]) if name == "srun" else 1
local = int(os.environ["SLURM_NTASKS_PER_NODE"]) if name == "srun" else sizes["-n"]
n = nodes * local

def variables(rank):
    node, at = divmod(rank, local)
    if name == "srun":
        return {"SLURM_PROCID": rank, "SLURM_NTASKS": n, "SLURM_LOCALID": at, "SLURM_NNODES": nodes,
                "SLURM_NODEID": node, "SLURM_NTASKS_PER_NODE": local}
    if name == "mpirun":
        return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": n,
                "OMPI_COMM_WORLD_LOCAL_RANK": at, "OMPI_COMM_WORLD_LOCAL_SIZE": local}
    return {"PMI_RANK": rank, "PMI_SIZE": n, "MPI_LOCALRANKID": at, "MPI_LOCALNRANKS": local}

def environment(rank):
    own = {name: str(value) for name, value in variables(rank).items()}
    return {**os.environ, **given, **own}

started = [subprocess.Popen(words, env=environment(rank)) for rank in range(n)]
sys.exit(max(abs(process.wait()) for process in started))
"""

TRAIN = """
import json, os
import torch
import torch.distributed as dist
from torch import nn
import fsdp_c

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fsdp_c.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
model(torch.randn(4, 8)).square().mean().backward()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
facts = {name: os.environ.get(name) for name in names}
facts["road"] = fsdp_c.explain(model).units[0].road
with open(f"of_rank_{dist.get_rank()}.json", "w") as file:
    json.dump(facts, file)
dist.destroy_process_group()
"""


def make_tools(folder: Path) -> None:
    """What the commands call: launchers that are none, and this Python by its short names."""
    folder.mkdir()
    programs = {name: f"#!{sys.executable}\n{LAUNCHER}" for name in ("srun", "mpirun", "mpiexec")}
    programs["scontrol"] = (
        "#!/bin/sh\ntest \"$*\" = 'show hostnames nodes[1-2]' && echo 127.0.0.1\n"
    )
    programs["python"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    programs["torchrun"] = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def on_this_host(command: str) -> tuple[str, int]:
    """The command with two ranks of this host, and how many share a torchrun or the launcher."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    text = command.replace("first-host", "127.0.0.1").replace("29500", str(port))
    if "torchrun" in text:  # of each of two nodes
        return text.replace("--nproc_per_node 8", "--nproc_per_node 1"), 1
    return text.replace("--nodes 2 --ntasks-per-node 8", "--nodes 1 --ntasks-per-node 2"), 2


def of_batch(text: str) -> dict[str, str]:
    """What sbatch tells a script, and srun asks it for, of the options in its second line."""
    (line,) = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE) or [""]
    names = {"nodes": "NNODES", "ntasks-per-node": "NTASKS_PER_NODE"}
    options = dict(re.findall(r"--([\w-]+) (\d+)", line))
    return {f"SLURM_{names[key]}": options[key] for key in names if key in options}


def test_commands_are_there() -> None:
    assert [re.search(r"srun|mpirun|mpiexec", command)[0] for command in COMMANDS] == [
        *("srun", "srun", "mpirun", "mpiexec")
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=["slurm-torchrun", "slurm", "openmpi", "mpich"])
def test_command_trains_on_two_ranks(command: str, tmp_path: Path) -> None:
    make_tools(tmp_path / "tools")
    (tmp_path / "train.py").write_text(TRAIN)
    text, n_local = on_this_host(command)
    outer = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "OMP_", "SLURM_", "PMI_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    env |= {"PATH": f"{tmp_path / 'tools'}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodes[1-2]"}  # of an allocation
    env |= of_batch(text)
    done = subprocess.run(
        ["bash", "-ec", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"of_rank_{rank}.json").read_text())
        assert facts == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank % n_local),
            "LOCAL_WORLD_SIZE": str(n_local),
            # torchrun leaves it to torch where it starts one rank.
            "OMP_NUM_THREADS": None if "torchrun" in command else "1",
            "road": "core over shared memory",
        }
