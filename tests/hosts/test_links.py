"""What is sent between hosts: counted by link, equal to theory and to `estimate`."""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hosts import run_hosts
from torch import nn

WIDTH, N_UNITS = 256, 3
UNIT_BYTES = 4 * WIDTH**2
# Beside parameters and gradients ranks tell each other what they are about to do.
WORDS = 2 << 10


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_UNITS)])


def count(rank: int, n_ranks: int, strategy: str) -> dict[str, int]:
    import fsdp_c

    model = fsdp_c.shard(net(), strategy, units=[nn.Linear])
    for _ in range(2):  # the first step sets up
        before = {link.host: link for link in fsdp_c.stats(model).links}
        model(torch.ones(2, WIDTH)).sum().backward()
    after = fsdp_c.stats(model)
    assert all(f"to host {host}" in str(after) for host in before)
    assert all(link.messages > before[link.host].messages for link in after.links)
    return {link.host: (link - before[link.host]).bytes for link in after.links}


def estimated(hosts: tuple[int, ...], strategy: str) -> int:
    import fsdp_c

    x = torch.ones(2, WIDTH)
    found = fsdp_c.estimate(
        net(),
        world_size=sum(hosts),
        strategy=strategy,
        hardware="here",
        precision="fp32",
        inputs=x,
        units=[nn.Linear],
        ranks_per_host=hosts[0],
    )
    sent = sum(row.sent for row in found.traffic)
    assert "to other hosts" in str(found)
    slow = fsdp_c.estimate(
        net(),
        world_size=sum(hosts),
        strategy=strategy,
        hardware=replace(found.setting.hardware, network=1e6),
        precision="fp32",
        inputs=x,
        units=[nn.Linear],
        ranks_per_host=hosts[0],
    )
    assert slow.times.communication >= sent / 1e6
    return sent


@pytest.mark.parametrize(
    ("strategy", "hosts", "n_times"),
    [
        ("zero3", (1, 1), 3),  # two all-gathers and a reduce-scatter
        ("zero3", (2, 2), 3),
        ("zero3", (1, 1, 1, 1), 3),
        ("zero2", (2, 2), 2),
        ("hybrid", (2, 2), 2),  # to and fro, half of a rank's part each
        ("ddp", (2, 2), 2),
    ],
)
def test_bytes_by_link(strategy: str, hosts: tuple[int, ...], n_times: int) -> None:
    n_hosts, n_ranks = len(hosts), sum(hosts)
    of_all = N_UNITS * UNIT_BYTES * n_times // n_ranks
    found = run_hosts(count, hosts, strategy)
    for rank, sent in enumerate(found):
        own = rank // hosts[0]
        assert set(sent) == {f"host{h}" for h in range(n_hosts) if h != own}
        assert all(0 <= n - of_all < WORDS for n in sent.values()), (found, of_all)
    assert estimated(hosts, strategy) == (n_hosts - 1) * of_all


def gather_from_two(rank: int, n_ranks: int) -> tuple[int, list[str]]:
    """What is sent between hosts by the last step, and the process group's own collectives."""
    import fsdp_c
    from fsdp_c._comm import _transport

    torch.manual_seed(0)
    whole = net()
    model = copy.deepcopy(whole)
    for module in model:
        fsdp_c.fully_shard(module, reshard_after_forward=2)
    fsdp_c.fully_shard(model)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
    called: list[str] = []
    sent = 0
    for _ in range(3):
        before = sum(link.bytes for link in fsdp_c.stats(model).links)
        called.clear()
        with contextlib.ExitStack() as stack:
            for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
                stack.enter_context(
                    mock.patch.object(
                        _transport.Messages, name, lambda *_, n=name, **__: called.append(n)
                    )
                )
            model.zero_grad()
            loss = model(x).square().mean()
            assert {p.to_local().shape[0] for p in model.parameters()} == {WIDTH // 2}
            loss.backward()
        sent = sum(link.bytes for link in fsdp_c.stats(model).links) - before
        whole.zero_grad()
        whole(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(theirs.grad, op=dist.ReduceOp.SUM)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad / n_ranks)
            with torch.no_grad():
                ours -= 0.5 * ours.grad
                theirs -= 0.5 * theirs.grad / n_ranks
    return sent, called


@pytest.mark.parametrize(
    ("hosts", "parts"),
    [
        ((2, 2), 2),  # forward's gather and the sums
        ((1, 1, 1, 1), 3 * 2 + 2),  # and to the other half of the ranks twice a part
    ],
)
def test_backward_gathers_from_fewer_ranks(hosts: tuple[int, ...], parts: int) -> None:
    of_all = N_UNITS * UNIT_BYTES // 4 * parts
    for sent, called in run_hosts(gather_from_two, hosts):
        assert 0 <= sent - of_all < len(hosts) * WORDS and called == []


def count_alone(rank: int, n_ranks: int) -> int:
    import fsdp_c

    model = fsdp_c.shard(net())
    model(torch.ones(2, WIDTH)).sum().backward()
    return len(fsdp_c.stats(model).links)


def test_ranks_of_one_host_have_no_links() -> None:
    assert run_hosts(count_alone, (2,)) == [0, 0]
