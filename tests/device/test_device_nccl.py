"""Units on a device whose collectives NCCL does: a stand-in for it that moves host memory."""

import datetime
import functools
import os
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh, run_ranks
from models import Net, data
from nccl_stand_in import Control, built, chosen, control_of
from parity import Pair, Tolerance, on_ranks
from test_device_dtypes import Types
from test_device_schedule import is_on_device, shard_blocks
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from fsdp_c._comm import _device, _nccl, _process_group

BLOCKS = 3  # of Net, which is a unit, too
OVER_NCCL = "core, on streams of cpu, over NCCL"
STAGED = f"{OVER_NCCL}, gathered and copied out (a parameter is not sharded evenly on dim 0)"


@pytest.fixture
def path() -> str:
    return built()


def own_mesh(n_ranks: int, seconds: float = 20) -> DeviceMesh:
    """Over a process group that nobody else has, so that its communicators may fail."""
    timeout = datetime.timedelta(seconds=seconds)
    return DeviceMesh.from_group(dist.new_group(list(range(n_ranks)), timeout=timeout), "cpu")


def sharded(mesh: DeviceMesh, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    shard_blocks(mesh=mesh, **options)(model, fsdp_c)
    return model


def train(model: torch.nn.Module, rank: int) -> None:
    model(data(rank)).sum().backward()


def implementations(model: torch.nn.Module) -> set[str]:
    return {row.road for row in fsdp_c.explain(model).units}


# --- what works -----------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_steps_are_counted(rank: int, n_ranks: int, path: str) -> None:
    with chosen(path) as control:
        pair = Pair(Net, shard_blocks())
        for step in range(3):
            before = control.n_collectives
            pair.step(data(rank, step))
            # Blocks are gathered twice, the root once if nothing has kept it; each is reduced.
            expected = 3 * BLOCKS + 2 - (step > 0)
            assert control.n_collectives == before + expected
            pair.eval_forward(data(rank, 10 + step))
            assert control.n_collectives == before + expected + BLOCKS + 1
        assert is_on_device(pair)
        assert all(
            implementation.startswith(f"{OVER_NCCL}, gathered")
            for implementation in implementations(pair.ours.model)
        )
        assert f"runs on the C core over NCCL between {n_ranks} ranks" in str(fsdp_c.status())


@on_ranks(2)
def test_mixed_precision_and_other_dims(rank: int, n_ranks: int, path: str) -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def placement(param: torch.nn.Parameter) -> Any:
        return torch.distributed.tensor.Shard(1 if param.ndim == 2 and param.size(1) == 6 else 0)

    with chosen(path):
        sharding = shard_blocks(mp_policy=policy, shard_placement_fn=placement)
        pair = Pair(Net, sharding, tolerance=Tolerance.of(n_ranks, torch.bfloat16))
        for step in range(2):
            pair.step(data(rank, step))
        assert is_on_device(pair)


@on_ranks(2)
def test_a_reduction_for_each_dtype(rank: int, n_ranks: int, path: str) -> None:
    """All of them, in one order, though ranks have gradients of others: zeros stand for these."""
    with chosen(path) as control:
        torch.manual_seed(0)
        model = fsdp_c.fully_shard(Types(), reshard_after_forward=False)
        model.set_reduce_scatter_unused_params(True)
        for _ in range(2):
            before = control.n_collectives
            model(data(rank), used=(rank,)).sum().backward()
            assert control.n_collectives == before + 1 + 4
        assert implementations(model) == {STAGED}


@on_ranks(2, apart=True)  # the process group's NCCL is no good afterwards
def test_gradients_of_different_parameters(rank: int, n_ranks: int, path: str) -> None:
    """Whose shard gets one is decided before the sums are there: the ranks have to agree."""
    with chosen(path):
        torch.manual_seed(0)
        model = fsdp_c.fully_shard(Types(), reshard_after_forward=False)
        with pytest.raises(RuntimeError, match=r"\(root\).*gradients of different parameters"):
            model(data(rank), used=(rank,)).sum().backward()


@on_ranks(4)
def test_replicas_and_accumulation(rank: int, n_ranks: int, path: str) -> None:
    def switch(name: str, is_on: bool) -> Callable[[Any], None]:
        return lambda side: getattr(side.model, name)(is_on)

    with chosen(path) as control:
        mesh = cached_mesh((2, 2), ("replicate", "shard"))
        pair = Pair(Net, shard_blocks(mesh=mesh))
        for name in ("set_requires_all_reduce", "set_requires_gradient_sync"):
            pair.do(switch(name, False), name)
            pair.forward(data(rank))
            pair.backward()
            pair.do(switch(name, True), name)
            before = control.n_collectives
            pair.step(data(rank, 5))
            assert control.n_collectives == before + 4 * BLOCKS + 3
        assert is_on_device(pair)
        assert implementations(pair.ours.model) == {STAGED}


# --- averages -------------------------------------------------------------------------------------


def mean_gradient(rank: int, n_ranks: int, set_up: Callable[[Any], None], **options: Any) -> Any:
    """Of a row of the weight on this rank, all of which are the sum of the ranks' data."""
    model = fsdp_c.fully_shard(torch.nn.Linear(WIDTH, n_ranks, bias=False), **options)
    set_up(model)
    model(row(rank)[None]).sum().backward()
    return model.weight.grad.to_local()[0]


WIDTH = 64


def row(rank: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank))


def added(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks."""
    return functools.reduce(torch.add, rows)


def as_it_is(model: Any) -> None:
    """Nothing is set."""


def force_sums(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)


def set_factor(model: Any, factor: float) -> None:
    model.set_gradient_divide_factor(factor)


@on_ranks(3)
def test_an_nccl_group_divides_before_it_adds(rank: int, n_ranks: int, path: str) -> None:
    """As torch's fully_shard asks it to: three thirds have other bits than a third of three."""
    rows = [row(rank) for rank in range(n_ranks)]
    before, after = added(row / n_ranks for row in rows), added(rows) / n_ranks
    assert not torch.equal(before, after)
    fifth = functools.partial(set_factor, factor=5.0)  # for which it has no operation
    narrow = fsdp_c.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    replicas = cached_mesh((n_ranks, 1), ("replicate", "shard"))
    with chosen(path), mock.patch.object(_process_group, "scales", lambda *_: False):
        assert torch.equal(mean_gradient(rank, n_ranks, as_it_is, mesh=own_mesh(n_ranks)), after)
    with chosen(path), mock.patch.object(_process_group, "scales", lambda *_: True):
        mesh = own_mesh(n_ranks)
        assert torch.equal(mean_gradient(rank, n_ranks, as_it_is, mesh=mesh), before)
        assert torch.equal(mean_gradient(rank, n_ranks, force_sums, mesh=mesh), after)
        assert torch.equal(mean_gradient(rank, n_ranks, fifth, mesh=mesh), added(rows) / 5)
        assert torch.equal(mean_gradient(rank, n_ranks, as_it_is, mesh=mesh), before)
        rounded = mean_gradient(rank, n_ranks, as_it_is, mesh=mesh, mp_policy=narrow)
        torch.testing.assert_close(rounded, after, atol=1e-2, rtol=1e-2)
        assert torch.equal(mean_gradient(rank, n_ranks, as_it_is, mesh=replicas), before)


@on_ranks(3)
def test_a_process_group_is_asked_for_averages(rank: int, n_ranks: int) -> None:
    """gloo has these, and says that it has no sums of what was scaled."""
    mesh, total = own_mesh(n_ranks), added(map(row, range(n_ranks)))
    with _device.on_cpu(), mock.patch.object(_process_group, "scales", lambda *_: True):
        found = mean_gradient(rank, n_ranks, as_it_is, mesh=mesh)
        torch.testing.assert_close(found, total / n_ranks)
        fifth = functools.partial(set_factor, factor=5.0)
        with pytest.raises(OSError, match=r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"):
            mean_gradient(rank, n_ranks, fifth, mesh=mesh)
        found = mean_gradient(rank, n_ranks, force_sums, mesh=mesh)
        torch.testing.assert_close(found, total / n_ranks)


# --- who has no NCCL ------------------------------------------------------------------------------


def check_messages(rank: int, n_ranks: int, reason: str) -> None:
    model = sharded(own_mesh(n_ranks, 1))
    train(model, rank)
    (implementation,) = implementations(model)
    assert re.search(rf"over messages \(.*{reason}", implementation), implementation
    assert re.search(reason, str(fsdp_c.status()))
    assert "over the process group's collectives" in str(fsdp_c.status())


@on_ranks(2)
def test_one_rank_without_it_is_all_without(rank: int, n_ranks: int, path: str) -> None:
    with chosen("/nowhere/libnccl.so.2" if rank == 1 else path):
        check_messages(rank, n_ranks, "rank 1 cannot use NCCL: NCCL cannot be opened")
    other = path.replace("in.so", "in_old.so")
    control_of(other).version = 21805
    with chosen(other if rank == 1 else path):
        check_messages(rank, n_ranks, "rank 1 has NCCL 21805, rank 0 has 23007")
    with chosen(path) as control:
        live = control.n_live
        os.environ["FSDP_C_TRANSPORT"] = "callback" if rank == 0 else "auto"
        check_messages(rank, n_ranks, "rank 0 cannot use NCCL: FSDP_C_TRANSPORT=callback asks")
        del os.environ["FSDP_C_TRANSPORT"]
        control.hangs_in_init = True
        check_messages(rank, n_ranks, "cannot use NCCL: .*nothing came of it within 1 s")
        control.hangs_in_init = False
        assert control.n_live == live


# --- what fails -----------------------------------------------------------------------------------


def other_order(rank: int, n_ranks: int, control: Control) -> str:
    model = sharded(own_mesh(n_ranks))
    train(model, rank)
    with pytest.raises((OSError, RuntimeError)) as caught:
        model.blocks[rank].unshard()
        torch.distributed.barrier()
        train(model, rank)
    return str(caught.value)


def hang(rank: int, n_ranks: int, control: Control) -> str:
    model = sharded(own_mesh(n_ranks, 0.5))
    train(model, rank)
    control.hangs = True
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(model, rank)
    control.hangs = False
    return str(caught.value)


def late(rank: int, n_ranks: int, control: Control) -> str:
    model = sharded(own_mesh(n_ranks, 0.5))
    train(model, rank)
    if rank == 1:
        dist.barrier()
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(model, rank)
    if rank == 0:
        dist.barrier()
    return str(caught.value)


def library_error(rank: int, n_ranks: int, control: Control) -> str:
    model = sharded(own_mesh(n_ranks))
    train(model, rank)
    if rank == 1:
        control.error, control.error_at = 2, control.n_collectives + 4
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(model, rank)
        train(model, rank)
    control.error_at = 0
    return str(caught.value)


def call_fails(rank: int, n_ranks: int, control: Control) -> str:
    model = sharded(own_mesh(n_ranks))
    train(model, rank)
    control.fail_calls = 3 if rank == 0 else 0
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(model, rank)
    control.fail_calls = 0
    return str(caught.value)


def gives_up(rank: int, n_ranks: int, control: Control) -> str:
    """One of a rank's two groups fails: the other one ends, too, for those beyond."""
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh)
    train(model, rank)
    if rank == 0:
        _nccl.find(mesh["shard"].get_group()).abort("the loss is not a number")
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(model, rank)
        train(model, rank)
    return str(caught.value)


FAILURES: dict[str, tuple[Callable[..., str], int, list[str]]] = {
    "other order": (
        other_order,
        2,
        [r"all-gather of unit 'blocks\.0'|blocks\.1", r"all-gather"],
    ),
    "hang": (hang, 2, ["within 0.5 s|rank [01] failed"] * 2),
    "late": (late, 2, [r"within 0.5 s: rank 1 called \d+, last", "rank 0 failed"]),
    "library": (library_error, 2, ["rank 1 failed", "NCCL reports 'unhandled system error'"]),
    "call": (call_fails, 2, ["NCCL reports 'internal error'", "rank 0 failed"]),
    "neighbours": (gives_up, 4, ["the loss is not a number"] * 4),
}


def run_failure(rank: int, n_ranks: int, path: str, name: str) -> str:
    with chosen(path) as control:
        return FAILURES[name][0](rank, n_ranks, control)


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_told_on_all_ranks(path: str, name: str) -> None:
    _, n_ranks, patterns = FAILURES[name]
    texts = run_ranks(run_failure, n_ranks, path, name)
    for text, pattern in zip(texts, patterns, strict=True):
        assert re.search(pattern, text), text


def lose_a_rank(rank: int, n_ranks: int, path: str, store: str) -> str:
    """The others go on without it, in the same processes."""
    with chosen(path):
        model = sharded(own_mesh(n_ranks))
        train(model, rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises((OSError, RuntimeError)) as caught:
            train(model, rank)
        dist.destroy_process_group()
        place = dict(rank=rank // 2, world_size=n_ranks - 1)
        dist.init_process_group("gloo", init_method=f"file://{store}", **place)
        again = sharded(own_mesh(n_ranks - 1))
        train(again, rank)
        assert implementations(again) == {STAGED}
        with pytest.raises(RuntimeError, match="rank 1"):
            train(model, rank)
        return str(caught.value)


def test_ranks_go_on_after_a_death(path: str, tmp_path: Any) -> None:
    outcomes = run_ranks(lose_a_rank, 3, path, str(tmp_path / "store"), fresh=True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        lost = r"rank 1 \(pid \d+\) was killed, or left by os\._exit; rank \d was in"
        assert re.search(lost, outcome.value)


# --- the end --------------------------------------------------------------------------------------


def end_in_order(rank: int, n_ranks: int, path: str) -> None:
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"  # then there are two
    with chosen(path) as control:
        model = sharded(own_mesh(n_ranks))
        train(model, rank)
        assert control.n_live == 2
        pid = os.fork()
        if pid == 0:  # a child has no part in them, and leaves them alone at its end
            is_refused = False
            try:
                train(model, rank)
            except RuntimeError:
                is_refused = True
            _nccl.leave()
            os._exit(0 if is_refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        train(model, rank)
        dist.destroy_process_group()
        assert (control.n_live, control.n_aborts, control.n_destroyed) == (0, 0, 2)
        with pytest.raises(RuntimeError, match="is closed"):
            train(model, rank)


def test_communicators_end_with_the_process_groups(path: str) -> None:
    for outcome in run_ranks(end_in_order, 2, path, fresh=True):
        assert outcome.ok, outcome.error or outcome.output
