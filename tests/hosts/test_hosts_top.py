"""`top` and `trace` on a host whose ranks wait for one of another host: its name, its host, where
it is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import models
import torch.distributed as dist
from hosts import run_hosts

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own, as a person would run them: the ranks that it looks at wait.
LOOK = """
import json, subprocess, sys, time
from pathlib import Path
from fsdp_c._window import _lines, _processes, _ranks

folder, pids = Path(sys.argv[1]), [int(pid) for pid in sys.argv[2:]]
seen = _processes.Seen()
for _ in range(600):
    found = _ranks.look(seen)
    host = _ranks.Host(tuple(rank for rank in found.ranks if rank.pid in pids), {})
    waits = {rank.rank: rank.waits for rank in host.ranks if rank.waits is not None}
    remote = [one for one in waits.values() if one.for_host and "it is at" in one.where]
    if len(waits) == 2 and remote and all(one.seconds > 1.2 for one in waits.values()):
        break
    time.sleep(0.05)
(folder / "host.json").write_text(json.dumps(host.as_json()))
(folder / "lines.txt").write_text("\\n".join(_lines.lines_of(host)))
trace = [sys.executable, "-m", "fsdp_c", "trace", "--output", str(folder / "trace.json")]
subprocess.run(trace, check=True, timeout=60)
(folder / "is seen").touch()
"""


def wait_for_the_other_host(rank: int, n_ranks: int, folder: str) -> None:
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    model(models.data(rank, 0)).square().mean().backward()
    pids = [0] * n_ranks
    dist.all_gather_object(pids, os.getpid())
    looking = None
    if rank == 0:
        command = [sys.executable, "-c", LOOK, folder, *map(str, pids[:-1])]
        looking = subprocess.Popen(command, cwd=ROOT)
    if rank == n_ranks - 1:
        stay_away(Path(folder, "is seen"))
    model(models.data(rank, 0)).square().mean().backward()
    if looking is not None:
        assert looking.wait(60) == 0


def stay_away(until: Path) -> None:
    deadline = time.monotonic() + 50
    while not until.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_rank_of_another_host_is_named(tmp_path: Path) -> None:
    run_hosts(
        wait_for_the_other_host, (2, 1), str(tmp_path), env={"FSDP_C_TRACE": "1"}, timeout=110
    )
    ranks = json.loads((tmp_path / "host.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]  # those of this host
    remote = [rank["waits"] for rank in ranks if rank["waits"]["for_rank"] == 2]
    assert remote, ranks
    for waits in remote:
        assert waits["for_host"] == "host1" and waits["operation"] == "all-gather", ranks
        assert waits["unit"], ranks
    assert any("in stay_away" in waits["where"] for waits in remote), ranks
    # Or it waits for the other one here, who waits for rank 2.
    assert all(rank["waits"]["for_rank"] in (0, 1, 2) for rank in ranks), ranks
    text = (tmp_path / "lines.txt").read_text()
    sentence = next(line for line in text.splitlines() if "for rank 2 on host host1, for" in line)
    assert sentence.startswith("ranks 0, 1 wait for rank 2"), text
    assert "top shows there what it does; it is at " in sentence, text
    assert any("rank 2 on host1, " in line for line in text.splitlines()), text
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = {span["name"] for span in spans if span.get("tid") == 3 and span["ph"] == "X"}
    assert "for rank 2: all-gather" in waits, waits
    assert "for rank 2: reduce-scatter" in waits, waits  # of the step before
