"""Communicator against torch.distributed's own collectives (gloo), over both kinds of transport."""

import gc
import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

KINDS = ["shm", "callback"]
NUMELS = [0, 1, 7, 1000, 100_003]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]


def make_communicator(kind, group=None):
    from fsdp_c._comm._communicator import Communicator

    os.environ["FSDP_C_TRANSPORT"] = kind
    try:
        # A group of its own: the transport of a group is made once.
        return Communicator(group or dist.new_group(list(range(dist.get_world_size()))))
    finally:
        del os.environ["FSDP_C_TRANSPORT"]


def values(numel, dtype, rank):
    """Small even integers: sums and halves are exact in every type."""
    return ((torch.arange(numel) * 7 + rank * 5) % 13 * 2).to(dtype)


def check_collectives(rank, n_ranks, kind):
    with make_communicator(kind) as comm:
        assert comm.transport == kind
        for dtype in DTYPES:
            for numel in NUMELS:
                check_one(comm, rank, n_ranks, numel, dtype)
        for against in (None, 0, n_ranks - 1):
            assert comm.all_agree(rank != against) == (against is None)
        comm.barrier()


def check_one(comm, rank, n_ranks, numel, dtype):
    divisor = 2.0 if dtype.is_floating_point else 1.0
    part = values(numel, dtype, rank)
    gathered = torch.full((n_ranks * numel,), 3, dtype=dtype)
    comm.all_gather(gathered, part)
    expected = torch.cat([values(numel, dtype, r) for r in range(n_ranks)])
    assert torch.equal(gathered, expected)

    whole = values(n_ranks * numel, dtype, rank)
    before = whole.clone()
    reduced = torch.full((numel,), 3, dtype=dtype)
    comm.reduce_scatter(reduced, whole, divisor)
    assert torch.equal(whole, before)
    total = before.clone()
    dist.all_reduce(total)
    total = (total / divisor).to(dtype)
    assert torch.equal(reduced, total.view(n_ranks, numel)[rank])

    comm.reduce_scatter(whole.view(n_ranks, numel)[rank], whole, divisor)
    assert torch.equal(whole.view(n_ranks, numel)[rank], reduced)

    counts = [[numel + 3 * s + r if s != r else 0 for r in range(n_ranks)] for s in range(n_ranks)]
    sent = torch.cat([values(counts[rank][r], dtype, rank + r) for r in range(n_ranks)])
    received = torch.full((sum(row[rank] for row in counts),), 3, dtype=dtype)
    comm.all_to_all(received, sent, counts)
    expected = [values(counts[s][rank], dtype, s + rank) for s in range(n_ranks)]
    assert torch.equal(received, torch.cat(expected))

    comm.all_reduce(before, divisor)
    assert torch.equal(before, total)
    for src in range(n_ranks):
        data = values(numel, dtype, rank)
        comm.broadcast(data, src)
        assert torch.equal(data, values(numel, dtype, src))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_collectives(kind, n_ranks):
    run_ranks(check_collectives, n_ranks, kind)


def check_shapes(rank, n_ranks):
    """Any shape, bool and complex for what only moves bytes, in place, and version counters."""
    with make_communicator("shm") as comm:
        output = torch.zeros(n_ranks, 2, 3, dtype=torch.complex64)
        output[rank] = rank + 1j
        version = output._version
        comm.all_gather(output, output[rank])
        assert output._version > version
        expected = torch.arange(n_ranks) + 1j
        assert torch.equal(output, expected.to(torch.complex64).view(-1, 1, 1).expand(-1, 2, 3))
        flags = torch.tensor([rank == 0])
        comm.broadcast(flags, 0)
        assert flags.item()


def test_shapes():
    run_ranks(check_shapes, 2)


def check_lists(rank, n_ranks):
    """Lists of tensors of any strides: rows, columns, every other, transposed, none, one number."""

    def parts(base):
        return [base[0, :2], base[1, :, 1:3], base[:, ::2, 1], base[1].T, base[:0], base[0, 0, 0]]

    n_sent = sum(part.numel() for part in parts(torch.empty(2, 4, 3)))
    for kind in ("shm", "callback"):
        with make_communicator(kind) as comm:
            wholes = [
                torch.arange(24.0).view(2, 4, 3) + 100 * rank + 10 * r for r in range(n_ranks)
            ]
            targets = [torch.full((2, 4, 3), -1.0) for _ in range(n_ranks)]
            flat = [torch.empty(n_sent) for _ in range(n_ranks)]
            counts = [[n_sent] * n_ranks] * n_ranks
            comm.exchange([[f[:7], f[7:]] for f in flat], [parts(w) for w in wholes], counts, 4)
            for r, received in enumerate(flat):
                sent = torch.arange(24.0).view(2, 4, 3) + 100 * r + 10 * rank
                assert torch.equal(received, torch.cat([part.flatten() for part in parts(sent)]))
            versions = [target._version for target in targets]
            comm.exchange([parts(t) for t in targets], [[f] for f in flat], counts, 4)
            for r, target in enumerate(targets):
                assert target._version > versions[r]
                written = torch.full((2, 4, 3), -1.0)  # what went to rank r comes back
                for to, part in zip(parts(written), parts(wholes[r]), strict=True):
                    to.copy_(part)
                assert torch.equal(target, written)
            for lists, text in [
                ([[]], "2 lists of tensors"),
                ([1, 2], "list of lists"),
                ([[torch.ones(3, device="meta")], []], "CPU tensor"),
                ([[torch.ones(3)], []], "12 bytes to rank 0 and 12 from it, by the table"),
            ]:
                with pytest.raises(ValueError, match=text):
                    comm.exchange(lists, lists, [[2, 0], [0, 0]], 4)
            comm.barrier()


def test_lists():
    run_ranks(check_lists, 2)


def check_arguments(rank, n_ranks):
    with make_communicator("shm") as comm:
        good = torch.zeros(4 * n_ranks)
        part = torch.zeros(4)
        for output, input, text in [
            (torch.zeros(4 * n_ranks + 1), part, "elements of input"),
            (good.double(), part, "same dtype"),
            (torch.zeros(4 * n_ranks, 2)[:, 0], part, "contiguous"),
            (good.to_sparse(), part, "contiguous"),
            (torch.zeros(4 * n_ranks, device="meta"), part, "CPU"),
            (good, good[1:5], "overlaps"),
        ]:
            with pytest.raises(ValueError, match=text):
                comm.all_gather(output, input)
        with pytest.raises(TypeError, match="tensor"):
            comm.all_gather([1.0], part)
        with pytest.raises(ValueError, match="elements of output"):
            comm.reduce_scatter(good, part)
        with pytest.raises(ValueError, match="cannot be added"):
            comm.all_reduce(torch.zeros(4, dtype=torch.complex64))
        with pytest.raises(ValueError, match="divisor"):
            comm.all_reduce(torch.zeros(4, dtype=torch.int32), 2.0)
        table = [[2, 2], [2, 2]]
        for output, input, counts, text in [
            (good[:4], part[:3], table, "row of counts"),
            (good[:3], part, table, "column"),
            (good[:4].double(), part, table, "one dtype"),
            (good[:4], good[2:6], table, "overlaps"),
            (good[:4], part, [[2, 2]], "2 rows of 2"),
            (good[:4], part, [[2], [2]], "2 rows of 2"),
        ]:
            with pytest.raises(ValueError, match=text):
                comm.all_to_all(output, input, counts)
        with pytest.raises(ValueError, match="root 9"):
            comm.broadcast(part, 9)
        assert not good.any()
        comm.barrier()
    with pytest.raises(RuntimeError, match="closed"):
        comm.barrier()


def test_arguments():
    run_ranks(check_arguments, 2)


def check_groups(rank, n_ranks):
    """Rows, columns and the whole of a 2 x 2 grid, in turn."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    whole = make_communicator("auto")
    row = make_communicator("auto", rows[rank // 2])
    column = make_communicator("auto", columns[rank % 2])
    assert {whole.transport, row.transport, column.transport} == {"shm"}
    for step in range(20):
        a, b, c = (torch.full((50,), float(rank + step)) for _ in range(3))
        row.all_reduce(a)
        column.all_reduce(b)
        whole.all_reduce(c)
        first = rank // 2 * 2
        assert torch.equal(a, torch.full((50,), 2.0 * first + 1 + 2 * step))
        assert torch.equal(b, torch.full((50,), 2.0 * (rank % 2) + 2 + 2 * step))
        assert torch.equal(c, torch.full((50,), 6.0 + 4 * step))


def test_groups():
    run_ranks(check_groups, 4)


def check_cache(rank, n_ranks):
    """One transport per group, which goes when its group goes; nothing stays in the store."""
    from fsdp_c._comm._transport import transport_for

    before = count_resources()
    group = dist.new_group(list(range(n_ranks)))
    transport = transport_for(group)
    assert transport_for(group) is transport
    assert (transport.kind, transport.rank) == ("shm", rank)
    assert repr(transport).endswith(f", rank {rank} of {n_ranks}>")
    transport.check()
    dist.barrier()
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    if rank == 0:
        # Which process a rank is stays known; what was exchanged does not stay.
        left = [key for key in store.list_keys() if "fsdp_c" in key]
        assert not [key for key in left if "fsdp_c/process/" not in key]
    alive = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group, transport
    gc.collect()
    assert alive() is None
    assert count_resources() == before


def count_resources():
    """Mapped segments and descriptors of transports of this process."""
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:fsdp_c" in line for line in maps)
    links = [read_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return segments, sum("memfd:fsdp_c" in link or "pidfd" in link for link in links)


def read_link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_cache(n_ranks):
    run_ranks(check_cache, n_ranks)


def check_settings_differ(rank, n_ranks):
    from fsdp_c._comm._transport import transport_for

    group = dist.new_group(list(range(n_ranks)))
    os.environ["FSDP_C_TRANSPORT"] = "callback" if rank else "shm"
    try:
        with pytest.raises(RuntimeError, match="FSDP_C_TRANSPORT must be the same.*'callback'"):
            transport_for(group)
        del os.environ["FSDP_C_TRANSPORT"]
        assert transport_for(group).kind == "shm"
    finally:
        os.environ.pop("FSDP_C_TRANSPORT", None)


def test_settings_differ():
    run_ranks(check_settings_differ, 2)


def check_fake(rank, n_ranks):
    """Ranks that exist in name only: never shared memory, and no waiting for them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    comm = make_communicator("auto", dist.group.WORLD)
    assert comm.transport == "callback"
    comm.all_reduce(torch.ones(4))
    comm.barrier()
    from fsdp_c._comm._transport import transport_for

    os.environ["FSDP_C_TRANSPORT"] = "shm"
    with pytest.raises(NotImplementedError, match="not processes"):
        transport_for(dist.new_group([0, 1]))


def test_fake():
    assert all(outcome.ok for outcome in run_ranks(check_fake, 1, fresh=True))


def check_threads(rank, n_ranks):
    """Ranks that are threads of one process."""
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    dist.destroy_process_group()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()
    done = []

    def thread(rank):
        dist.init_process_group("threaded", rank=rank, world_size=3, store=store)
        try:
            check_thread(rank)
            done.append(rank)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(3)]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    _uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    # The harness leaves a world at the end.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert sorted(done) == [0, 1, 2]


def check_thread(rank):
    from fsdp_c._comm._communicator import Communicator

    comm = Communicator()
    assert comm.transport == "callback"
    data = torch.full((5,), float(rank))
    comm.all_reduce(data)
    assert torch.equal(data, torch.full((5,), 3.0))
    output = torch.zeros(3)
    comm.all_gather(output, torch.tensor([float(rank)]))
    assert torch.equal(output, torch.arange(3.0))
    reduced = torch.zeros(2)
    comm.reduce_scatter(reduced, torch.arange(6.0), 3.0)
    assert torch.equal(reduced, torch.arange(6.0).view(3, 2)[rank])


def test_threads():
    outcomes = run_ranks(check_threads, 1, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes


def check_init_again(rank, n_ranks):
    """The world is destroyed and made again: a new transport."""
    from fsdp_c._comm._communicator import Communicator

    for again in range(3):
        comm = Communicator()
        data = torch.ones(10)
        comm.all_reduce(data)
        assert torch.equal(data, torch.full((10,), float(n_ranks)))
        del comm
        store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
        fresh = dist.PrefixStore(f"again {again}", store._underlying_non_prefix_store)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=n_ranks, store=fresh)


def test_init_again():
    outcomes = run_ranks(check_init_again, 2, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
