"""Collectives over rails between hosts, against sums and copies of whole tensors."""

import os
from typing import Any

import pytest
from hosts import run_hosts

HOSTS = [(1, 1), (2, 2), (2, 1, 1)]


def collectives(rank: int, n_ranks: int) -> str:
    import torch

    from fsdp_c import Communicator

    def of(r: int, n: int) -> Any:
        return torch.randn(n, generator=torch.Generator().manual_seed(r * 1000 + n % 1000))

    with Communicator() as comm:
        for n in (0, 1, 5, 1000, 300_001):
            out = torch.empty(n_ranks * n)
            comm.all_gather(out, of(rank, n))
            assert torch.equal(out, torch.cat([of(r, n) for r in range(n_ranks)]))
            total = sum(of(r, n * n_ranks) for r in range(n_ranks))
            part = torch.empty(n)
            comm.reduce_scatter(part, of(rank, n * n_ranks))
            torch.testing.assert_close(part, total[rank * n : (rank + 1) * n])
            first = torch.empty(n)
            comm.reduce_scatter(first, of(rank, n * n_ranks))
            assert torch.equal(first, part)  # the same bits
            data = of(rank, n)
            comm.all_reduce(data)
            torch.testing.assert_close(data, sum(of(r, n) for r in range(n_ranks)))
            data = of(rank, n)
            comm.broadcast(data, n_ranks - 1)
            assert torch.equal(data, of(n_ranks - 1, n))
        comm.barrier()
        assert comm.all_agree(True) and not comm.all_agree(rank > 0)
        counts = [[s + r + 1 for r in range(n_ranks)] for s in range(n_ranks)]
        sent = torch.cat([torch.full((n,), rank) for n in counts[rank]])
        got = torch.empty(sum(counts[s][rank] for s in range(n_ranks)), dtype=torch.int64)
        comm.all_to_all(got, sent, counts)
        assert got.tolist() == [s for s in range(n_ranks) for _ in range(counts[s][rank])]
        return comm.transport


@pytest.mark.parametrize("hosts", HOSTS)
def test_collectives(hosts: tuple[int, ...]) -> None:
    assert set(run_hosts(collectives, hosts)) == {"rails"}


def transports(rank: int, n_ranks: int) -> list[str]:
    import torch.distributed as dist

    from fsdp_c._comm._transport import transport_for

    found = []
    for kind in ("callback", "rails", "auto"):
        os.environ["FSDP_C_TRANSPORT"] = kind
        found.append(transport_for(dist.new_group()).kind)
    os.environ["FSDP_C_TRANSPORT"] = "shm"
    with pytest.raises(NotImplementedError, match="cannot see each other's processes"):
        transport_for(dist.new_group())
    del os.environ["FSDP_C_TRANSPORT"]
    local = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return [*found, transport_for(local).kind]


def test_choice_of_transport() -> None:
    for found in run_hosts(transports, (2, 2)):
        assert found == ["callback", "rails", "rails", "shm"]


def differ(rank: int, n_ranks: int) -> str:
    import torch

    from fsdp_c import Communicator

    comm = Communicator()
    comm.barrier()
    own = torch.ones(2000 if rank == n_ranks - 1 else 1000)
    try:
        comm.all_gather(torch.empty(n_ranks * own.numel()), own)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2)])
def test_ranks_that_differ(hosts: tuple[int, ...]) -> None:
    """Each hears who differs, also who waits for a rank that has given up."""
    outcomes = run_hosts(differ, hosts, timeout=40, fresh=True)
    for outcome in outcomes:
        assert "call different collectives: rank" in outcome.value, outcomes
