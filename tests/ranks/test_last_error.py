"""What a script that fails says of a rank that left it: how that one ended, and what all must call.

Processes as a launcher starts them, since what counts is how Python itself ends.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
GLOOS = re.compile(
    r"RuntimeError: \[.*/gloo/transport/tcp/pair\.cc:\d+\] .*(Connection \w+ by peer)"
)
TIMEOUT_S = 120
pytestmark = pytest.mark.usefixtures("quick_scripts")

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
import fsdp_c

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fsdp_c.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
model(torch.randn(4, 8)).sum().backward()
call, end = sys.argv[1:]
if dist.get_rank() == 1:
    if end == "raises":
        raise ValueError("of rank 1")
    if end == "_exit":
        os._exit(0)
    if end == "destroys":
        dist.destroy_process_group()
elif call == "gather":
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
elif call == "save":
    dcp.save(model.state_dict(), checkpoint_id="never")
elif call == "save_shards":
    fsdp_c.save_shards(model, "never")
elif call == "barrier":
    dist.barrier()
else:
    model(torch.randn(4, 8))
"""

SAVES = "; is it saving alone? Only writing a file of full parameters is for one rank"


def outputs(folder: Path, *arguments: str) -> list[str]:
    """What each of two ranks says on stderr."""
    (folder / "script.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=folder,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 1, said[0]
    return said


@pytest.mark.parametrize(
    ("call", "inside", "end", "how"),
    [
        ("gather", "get_model_state_dict", "returns", "ended its script"),
        ("gather", "get_model_state_dict", "destroys", "ended its script"),
        ("save", "save", "_exit", "was killed, or left by os._exit"),
        ("barrier", "torch.distributed's barrier", "raises", "ended its script by an exception"),
        ("save_shards", "save_shards", "returns", "ended its script"),
    ],
)
def test_a_collective_of_one_rank(
    call: str, inside: str, end: str, how: str, tmp_path: Path
) -> None:
    said, _ = outputs(tmp_path, call, end)
    last = said.splitlines()[-1]
    saves = "" if call == "barrier" else SAVES
    expected = (
        f"[fsdp_c] rank 0 failed in {inside}, a collective: all ranks of its process group must"
        f" call it, and rank 1 (pid N) {how}{saves}"
    )
    assert re.sub(r"pid \d+", "pid N", last) == expected, said
    if call == "save_shards":  # it is ours
        assert f"{how} while rank 0 waited for it" in said
    else:
        found = GLOOS.search(said)
        assert found and f"\n- `{found[1]}`<br>" in PAGE.read_text(), said


@pytest.mark.parametrize(
    ("end", "how"),
    [("returns", "ended its script"), ("raises", "ended its script by an exception")],
)
def test_a_forward_of_one_rank(end: str, how: str, tmp_path: Path) -> None:
    said, of_other = outputs(tmp_path, "forward", end)
    assert re.search(rf"Error: rank 1 \(pid \d+\) {how} while rank 0 waited for it in", said), said
    assert "[fsdp_c] rank 0 failed in" not in said
    assert ("ValueError: of rank 1" in of_other) == (end == "raises")
    assert "[fsdp_c] rank 1 failed" not in of_other
