"""Long runs and many models leave no objects, descriptors, mappings, memory or cycles behind."""

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, batch
from torch.distributed.device_mesh import DeviceMesh

MIB = 1 << 20
# What Python's allocator and malloc may keep of freed small blocks.
RSS_SLACK = 6 * MIB


def usage() -> dict[str, int]:
    """Counts of what can leak, after a full collection."""
    gc.collect()
    with open("/proc/self/maps") as f:
        mappings = sum(1 for _ in f)
    with open("/proc/self/statm") as f:
        pages = int(f.read().split()[1])
    return {
        "objects": len(gc.get_objects()),
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def assert_back(
    before: dict[str, int], after: dict[str, int], objects: int = 20, mappings: int = 4
) -> None:
    """Nothing may grow by one thing per round; caches and malloc's arenas move a little."""
    print(before, after, sep="\n")
    assert after["objects"] <= before["objects"] + objects
    assert after["tensors"] <= before["tensors"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["mappings"] <= before["mappings"] + mappings
    assert after["rss"] <= before["rss"] + RSS_SLACK


def sharded(net: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    api, mesh = implementation(), mesh or cached_mesh((dist.get_world_size(),))
    api.fully_shard(net.first, mesh=mesh)
    return api.fully_shard(net, mesh=mesh)


def repeat(work: Callable[[int], None], warm: int, n_times: int, **slack: int) -> None:
    for step in range(warm):
        work(step)
    before = usage()
    for step in range(n_times):
        work(step)
    assert_back(before, usage(), **slack)


def train_long(rank: int, n_ranks: int) -> None:
    net = sharded(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=index % 2 == 0)
        net(batch(rank, index)).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if index % 10 == 0:
            net.state_dict()
            with torch.no_grad():
                net(batch(rank))

    repeat(step, 20, 200)


def make_many(rank: int, n_ranks: int) -> None:
    def step(index: int) -> None:
        net = sharded(Net(width=64))
        net(batch(rank)).sum().backward()
        if index % 2:
            net.unshard()
            net.state_dict()
        alive = weakref.ref(net)
        param = weakref.ref(net.first.weight)
        del net
        gc.collect()
        assert alive() is None and param() is None

    repeat(step, 10, 40, objects=200)


def fail_often(rank: int, n_ranks: int) -> None:
    net = sharded(Net())

    def stop(grad: torch.Tensor) -> None:
        raise KeyError

    def step(index: int) -> None:
        out = net(batch(rank).requires_grad_())
        out.register_hook(stop)
        with pytest.raises(KeyError):
            out.sum().backward()
        net.reset_iter_state()
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 9))
        net.reset_iter_state()

    repeat(step, 10, 60)


def refuse_often(rank: int, n_ranks: int) -> None:
    """Calls of `fully_shard` that fail."""

    def step(index: int) -> None:
        with pytest.raises(ValueError):
            implementation().fully_shard(
                Net(), mesh=cached_mesh((n_ranks,)), reshard_after_forward="x"
            )

    repeat(step, 5, 50)


def evaluate_long(rank: int, n_ranks: int) -> None:
    """Forwards without backward, with and without gradients."""
    net = sharded(Net())

    def step(index: int) -> None:
        with torch.set_grad_enabled(index % 2 == 0):
            net(batch(rank))

    repeat(step, 20, 200)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("fn", [train_long, make_many, fail_often, refuse_often, evaluate_long])
def test_counts_come_back(fn: Callable, n_ranks: int) -> None:
    run_ranks(fn, n_ranks)


def train_without_collector(rank: int, n_ranks: int) -> None:
    net = sharded(Net())

    def step(index: int) -> None:
        for param in net.parameters():
            param.grad = None
        net(batch(rank, index)).square().sum().backward()

    for index in range(20):
        step(index)
    gc.collect()
    gc.disable()
    try:
        for index in range(200):
            step(index)
        # A cycle per step would be 200 at least.
        assert gc.collect() < 20
    finally:
        gc.enable()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_no_reference_cycles(n_ranks: int) -> None:
    run_ranks(train_without_collector, n_ranks)


def use_many_groups(rank: int, n_ranks: int) -> None:
    def step(index: int) -> None:
        group = dist.new_group(list(range(n_ranks)))
        net = sharded(Net(width=64), DeviceMesh.from_group(group, "cpu"))
        net(batch(rank)).sum().backward()
        del net
        gc.collect()
        dist.destroy_process_group(group)

    # c10d itself keeps some bookkeeping of groups that are gone.
    repeat(step, 5, 10, objects=600)


def test_process_groups_that_end() -> None:
    outcomes = run_ranks(use_many_groups, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].error + outcomes[1].error
