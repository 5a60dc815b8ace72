"""Set-up that cannot work: no process group, foreign mesh, ranks that disagree, system limits."""

import os
import re
import resource
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, Snapshot, batch, check_trains
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


# --- process group and mesh ---


def shard_without_group(rank: int, n_ranks: int) -> None:
    dist.destroy_process_group()
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    net = Net()
    before = Snapshot(net)
    with pytest.raises((ValueError, RuntimeError), match="init_process_group|torchrun"):
        implementation().fully_shard(net)
    before.check()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    implementation().fully_shard(net)
    check_trains(net, Net())


def shard_with_variables_only(rank: int, n_ranks: int) -> bool:
    dist.destroy_process_group()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    net = Net()
    implementation().fully_shard(net)
    check_trains(net, Net())
    return dist.is_initialized()


def shard_on_foreign_mesh(rank: int, n_ranks: int) -> None:
    mesh = DeviceMesh("cpu", [0])
    net = Net()
    before = Snapshot(net)
    if rank == 0:
        implementation().fully_shard(net, mesh=mesh)
        net(batch(0)).sum().backward()
    else:
        with pytest.raises((ValueError, RuntimeError), match="(?s)mesh.*rank|rank.*mesh"):
            implementation().fully_shard(net, mesh=mesh)
        before.check()


def check_fresh(fn: Callable, n_ranks: int, *args: object, timeout: float = 60) -> list:
    """Runs in processes of its own and expects every rank to end well."""
    outcomes = run_ranks(fn, n_ranks, *args, fresh=True, timeout=timeout)
    bad = [f"rank {o.rank}: {o.error or o.exit_code}\n{o.output}" for o in outcomes if not o.ok]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in outcomes]


def test_no_process_group() -> None:
    check_fresh(shard_without_group, 1)


def test_process_group_from_environment() -> None:
    assert check_fresh(shard_with_variables_only, 1) == [True]


def test_mesh_without_this_rank() -> None:
    check_fresh(shard_on_foreign_mesh, 2)


# --- ranks that disagree ---


def build(kind: str, wrong: bool) -> nn.Module:
    """A sharded `Net`; with `wrong` one that differs from the others' in `kind`."""
    api = implementation()
    net = Net(width=7 if wrong and kind == "width" else 5)
    if wrong and kind == "dtype":
        net.double()
    if wrong and kind == "order":
        net.first.register_parameter("weight", net.first._parameters.pop("weight"))
    policy = api.MixedPrecisionPolicy()
    if wrong and kind == "policy":
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = cached_mesh((dist.get_world_size(),))
    if not (wrong and kind == "units"):
        api.fully_shard(net.first, mesh=mesh, mp_policy=policy)
    api.fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def disagree(rank: int, n_ranks: int, kind: str) -> tuple[str, str, float]:
    """The last rank's model differs; returns the error's type, its text and how long it took."""
    wrong = rank == n_ranks - 1
    net = build(kind, wrong)
    before = [(p, p.to_local().clone()) for p in net.parameters()]
    x = batch(rank).to(next(net.parameters()).dtype)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        net(x).sum().backward()
    seconds = time.monotonic() - start
    for param, (old, values) in zip(net.parameters(), before, strict=True):
        assert param is old and isinstance(param, DTensor)
        assert torch.equal(param.to_local(), values)
        assert param.grad is None
    check_trains(build(kind, False), Net())
    return caught.type.__name__, str(caught.value), seconds


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["width", "dtype", "units", "order", "policy"])
def test_ranks_with_different_models(kind: str, n_ranks: int) -> None:
    for rank, (cls, text, seconds) in enumerate(run_ranks(disagree, n_ranks, kind)):
        print(f"{kind}, rank {rank}, {seconds:.3f} s: {text}")
        assert cls == "RuntimeError"
        named = {int(found) for found in re.findall(r"rank (\d+)", text)}
        assert n_ranks - 1 in named, text
        assert len(named) > 1, text


# --- limits of the system ---


def lowest_free_descriptor() -> int:
    """As a limit it lets nothing be opened, whatever gaps there are above."""
    fd = os.dup(0)
    os.close(fd)
    return fd


def address_space() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


LIMITS: dict[str, tuple[int, Callable[[], int]]] = {
    "memory": (resource.RLIMIT_FSIZE, lambda: 1 << 16),
    "address_space": (resource.RLIMIT_AS, lambda: address_space() + (1 << 20)),
    "descriptors": (resource.RLIMIT_NOFILE, lowest_free_descriptor),
}


def train_under_limit(rank: int, n_ranks: int, kind: str, limited: list[int]) -> str:
    """Meets a limit in the first forward, then trains the same model without it."""
    api = implementation()
    # Late imports would fail for want of descriptors, so another group does everything once.
    warm = Net()
    group = dist.new_group(list(range(n_ranks)))
    api.fully_shard(warm, mesh=DeviceMesh.from_group(group, "cpu"))
    warm(batch(rank)).sum().backward()
    dist.barrier()

    net, reference = Net(width=200_000), Net(width=200_000)
    api.fully_shard(net.first, mesh=cached_mesh((n_ranks,)))
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)))
    number, value = LIMITS[kind]
    old = resource.getrlimit(number)
    text = ""
    if rank in limited:
        resource.setrlimit(number, (value(), old[1]))
    try:
        net(batch(rank)).sum().backward()
    except (OSError, RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(number, old)
    # All ranks are past their limits before anyone tries again.
    dist.barrier()
    net.reset_iter_state()
    # A small rate: the output moves by 200,000 times as much.
    check_trains(net, reference, lr=1e-7)
    return text


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("limited", [[0], [1], [0, 1]])
def test_limit_in_the_first_forward(kind: str, limited: list[int]) -> None:
    texts = check_fresh(train_under_limit, 2, kind, limited)
    print(*texts, sep="\n")
    if limited == [0, 1]:
        assert all(texts), "nobody noticed the limit"
    # One rank alone may not need what is limited, but the ranks agree whether it worked.
    assert all(texts) or not any(texts), texts
    for text in filter(None, texts):
        assert any(re.search(rf"rank {rank}\b", text) for rank in limited), text
