"""What stands for hosts is as apart as hosts are."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest
from hosts import require_hosts, run_hosts


def look_around(rank: int, n_ranks: int) -> tuple[str, str, str, int, list[str]]:
    import torch
    import torch.distributed as dist

    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones.tolist() == [n_ranks] * 4
    Path(f"/dev/shm/of_rank_{rank}").touch()
    dist.barrier()
    files = sorted(path.name for path in Path("/dev/shm").glob("of_rank_*"))
    dist.barrier()
    Path(f"/dev/shm/of_rank_{rank}").unlink()
    space = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), space, os.environ["LOCAL_RANK"], os.getpid(), files


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (2, 1, 1)])
def test_ranks_of_a_host_share_it_and_no_other(hosts: tuple[int, ...]) -> None:
    found = run_hosts(look_around, hosts)
    of_ranks = [host for host, n in enumerate(hosts) for _ in range(n)]
    assert [name for name, *_ in found] == [f"host{host}" for host in of_ranks]
    assert len({space for _, space, *_ in found}) == len(hosts)
    for host, n in enumerate(hosts):
        ranks = [rank for rank, of in enumerate(of_ranks) if of == host]
        assert [found[rank][2] for rank in ranks] == [str(local) for local in range(n)]
        assert all(found[rank][4] == [f"of_rank_{r}" for r in ranks] for rank in ranks)


def kind_of_transport(rank: int, n_ranks: int) -> str:
    from fsdp_c._comm._transport import transport_for

    return transport_for().kind


def test_ranks_of_two_hosts_do_not_share_memory() -> None:
    assert "shm" not in run_hosts(kind_of_transport, (1, 1))


KEEPS_HOSTS = """
import namespaces, time
if namespaces.fork_network() == 0:
    if namespaces.fork_host(0) == 0:
        print("up", flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_nothing_is_left_of_hosts_whose_maker_was_killed() -> None:
    require_hosts()
    reader, writer = os.pipe()  # all of them hold the end that is written to
    environment = dict(os.environ, PYTHONPATH=str(Path(namespaces.__file__).parent))
    command = [sys.executable, "-c", KEEPS_HOSTS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, pass_fds=[writer]
    ) as maker:
        os.close(writer)
        assert maker.stdout is not None and maker.stdout.readline() == b"up\n"
        maker.kill()
    assert os.read(reader, 1) == b""
    os.close(reader)
