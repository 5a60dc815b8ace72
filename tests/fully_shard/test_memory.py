"""Memory of parameters and gradients: released, guarded after that, never changed under a user."""

import copy
import ctypes
import platform
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from models import function_replaced
from snapshots import Net, batch, check_gradients
from torch.distributed.tensor import DTensor

MIB = 1 << 20


class KeepingNet(Net):
    """Keeps what it sees of its own weights in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.kept = self.first.seen
        return self.second(torch.tanh(hidden)) + self.offset


class KeepingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"parameter": self.weight, "view": self.weight.detach()[1:]}
        return super().forward(x)


def keeping_net() -> KeepingNet:
    net = KeepingNet()
    linear = KeepingLinear(4, 5)
    linear.load_state_dict(net.first.state_dict())
    net.first = linear
    return net


def sharded(net: Net | None = None) -> Net:
    net = net or Net()
    api, mesh = implementation(), cached_mesh((dist.get_world_size(),))
    api.fully_shard(net.first, mesh=mesh)
    return api.fully_shard(net, mesh=mesh)


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "tolist": lambda t: t.tolist(),
    "write": lambda t: t.detach().zero_(),
    "matmul": lambda t: t @ torch.ones(4),
}


def read_late(rank: int, n_ranks: int) -> None:
    net, reference = sharded(keeping_net()), Net()
    for _ in range(2):
        net.zero_grad()
        net(batch(rank)).square().sum().backward()
        for what, kept in net.kept.items():
            assert kept.untyped_storage().nbytes() == 0, what
            for read in READS.values():
                with pytest.raises(RuntimeError, match=r"(?s)first.*unshard"):
                    read(kept)
        # The refused reads did no harm.
        check_gradients(net, reference, n_ranks)
    # The same objects work again while the unit is unsharded.
    net.first.unshard()
    assert net.first.weight is net.kept["parameter"]
    assert torch.equal(net.kept["parameter"], reference.first.weight)
    assert torch.equal(net.kept["view"], reference.first.weight[1:])
    net.first.reshard()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_late_reads_are_refused(n_ranks: int) -> None:
    run_ranks(read_late, n_ranks)


def use_outside_forward(rank: int, n_ranks: int) -> None:
    net = sharded()
    net(batch(rank)).sum().backward()
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        net.first.weight @ torch.ones(4)


def read_numpy(rank: int, n_ranks: int) -> None:
    net = sharded()
    views = [shard.to_local().detach().numpy() for shard in net.parameters()]
    before = [view.copy() for view in views]
    for _ in range(2):
        net(batch(rank)).square().sum().backward()
    for view, value in zip(views, before, strict=True):
        assert (view == value).all()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_memory_of_shards_stays_for_who_has_its_address(n_ranks: int) -> None:
    """They move into memory that ranks share with the first forward."""
    run_ranks(read_numpy, n_ranks)


def test_sharded_weight_outside_forward() -> None:
    run_ranks(use_outside_forward, 2)


# --- gradients ---

HOLDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradient": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "local": lambda grad: grad.to_local(),
    "view": lambda grad: grad.to_local()[:1],
    "flat": lambda grad: grad.to_local().view(-1)[1:],
}


def keep_gradients(rank: int, n_ranks: int, holder: str) -> None:
    net, reference = sharded(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def values(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()

    for step in range(5):
        optimizer.zero_grad()
        assert all(param.grad is None for param in net.parameters())
        net(batch(rank, step)).square().sum().backward()
        optimizer.step()
        check_gradients(net, reference, n_ranks, step)
        # Steps without a holder in between, so that memory may be used again.
        if step % 2 == 0:
            for param in net.parameters():
                kept = HOLDERS[holder](param.grad)
                held.append((kept, values(kept)))
        for kept, expected in held:
            assert torch.equal(values(kept), expected)


@pytest.mark.parametrize("holder", HOLDERS)
def test_kept_gradients_do_not_change(holder: str) -> None:
    run_ranks(keep_gradients, 2, holder)


def keep_gradients_alone(rank: int, n_ranks: int) -> None:
    """As above on one rank, where shards and gathered parameters may share memory."""
    for holder in HOLDERS:
        keep_gradients(rank, n_ranks, holder)


def test_kept_gradients_do_not_change_on_one_rank() -> None:
    run_ranks(keep_gradients_alone, 1)


def zero_in_place(rank: int, n_ranks: int) -> None:
    net, reference = sharded(), Net()
    net(batch(rank)).square().sum().backward()
    objects = [(param.grad, param.grad.to_local().data_ptr()) for param in net.parameters()]
    for step in range(1, 4):
        # Through the shards: an unsharded root does not show their gradients.
        torch.optim.SGD(net.parameters(), lr=0.1).zero_grad(set_to_none=False)
        assert not any(param.grad.full_tensor().any() for param in net.parameters())
        net(batch(rank, step)).square().sum().backward()
        check_gradients(net, reference, n_ranks, step)
        for param, (grad, pointer) in zip(net.parameters(), objects, strict=True):
            assert param.grad is grad and grad.to_local().data_ptr() == pointer


def accumulate(rank: int, n_ranks: int) -> None:
    net = sharded()
    net(batch(rank)).square().sum().backward()
    objects = [param.grad for param in net.parameters()]
    once = [grad.to_local().clone() for grad in objects]
    net(batch(rank)).square().sum().backward()
    for param, grad, before in zip(net.parameters(), objects, once, strict=True):
        assert param.grad is grad
        torch.testing.assert_close(grad.to_local(), 2 * before)


def copy_gradients(rank: int, n_ranks: int) -> None:
    """Copies are whole, of gradients that lie behind others in memory, too."""
    net, reference = sharded(), Net()
    net(batch(rank)).square().sum().backward()
    twin = copy.deepcopy(dict(net.named_parameters()))
    with torch.no_grad():
        for name, param in net.named_parameters():
            assert torch.equal(twin[name].grad.to_local(), param.grad.to_local())
            twin[name].grad.to_local().zero_()
    check_gradients(net, reference, n_ranks)


def compile_gradients(rank: int, n_ranks: int) -> None:
    """What torch.compile makes of a function of one, as of an optimizer's step."""
    net = sharded()
    net(batch(rank)).square().sum().backward()
    for param in net.parameters():
        torch._dynamo.reset()
        twice = torch.compile(lambda grad: (grad * 2).to_local(), backend="eager", fullgraph=True)
        assert torch.equal(twice(param.grad), param.grad.to_local() * 2)


def move_gradients(rank: int, n_ranks: int) -> None:
    """A gradient whose memory the user moves, to share it, stays one that backward adds to."""
    net, reference = sharded(), Net()
    net(batch(rank)).square().sum().backward()
    moved = net.second.weight.grad.to_local().share_memory_()
    for step in range(3):
        torch.optim.SGD(net.parameters(), lr=0.1).zero_grad(set_to_none=step < 2)
        net(batch(rank, step)).square().sum().backward()
        check_gradients(net, reference, n_ranks, step)
    assert moved.is_shared()


def hold_one_gradient(rank: int, n_ranks: int) -> None:
    """It costs the next step other memory, and no step after that."""
    net, reference = sharded(), Net()
    net(batch(rank)).square().sum().backward()
    held = net.first.weight.grad
    places = []
    for step in range(1, 5):
        torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
        net(batch(rank, step)).square().sum().backward()
        check_gradients(net, reference, n_ranks, step)
        places.append([param.grad.to_local().data_ptr() for param in net.parameters()])
    assert held is not net.first.weight.grad
    assert places[1] == places[2] == places[3]


def assign_gradients(rank: int, n_ranks: int) -> None:
    """Gradients that the user made are added to, in the user's own object."""
    net, reference = sharded(), Net()
    mine = {}
    for name, param in net.named_parameters():
        param.grad = mine[name] = torch.ones_like(param)
    net(batch(rank)).square().sum().backward()
    for name, param in net.named_parameters():
        assert param.grad is mine[name]
        param.grad.to_local().sub_(1)
    check_gradients(net, reference, n_ranks, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "fn",
    [
        zero_in_place,
        accumulate,
        copy_gradients,
        compile_gradients,
        move_gradients,
        hold_one_gradient,
        assign_gradients,
    ],
)
def test_gradient_objects(fn: Callable, n_ranks: int) -> None:
    run_ranks(fn, n_ranks)


# --- how much ---


# Large blocks go back to the system when they are freed, so that what counts is what is in use.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def resident() -> int:
    """Bytes of this process, shared pages counted by the part that is its own."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))


def measure_depth(rank: int, n_ranks: int, depth: int, side: int) -> int:
    api, mesh = implementation(), cached_mesh((n_ranks,))
    peak = 0

    def watch(module: nn.Module, args: object) -> None:
        nonlocal peak
        # Nobody is ahead: shared pages are a part of each rank's, and of nobody's twice.
        dist.barrier()
        peak = max(peak, resident())
        dist.barrier()

    warm = api.fully_shard(nn.Linear(side, side, bias=False), mesh=mesh)
    warm(torch.ones(1, side)).sum().backward()
    before = resident()
    net = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(depth)])
    for layer in net:
        layer.register_forward_pre_hook(watch)
        layer.register_full_backward_pre_hook(lambda module, grad: watch(module, grad))
        api.fully_shard(layer, mesh=mesh)
    api.fully_shard(net, mesh=mesh)
    peak = 0
    for _ in range(2):
        net.zero_grad()
        net(torch.ones(1, side)).sum().backward()
        watch(net, None)
    return peak - before


def test_memory_is_flat_in_depth() -> None:
    """Twice the units may cost twice the shards and gradients, and nothing else."""
    side, n_ranks = 1024, 2
    unit = side * side * 4
    peaks = {}
    for depth in (8, 16):
        outcomes = run_ranks(measure_depth, n_ranks, depth, side, fresh=True, env=RETURN_MEMORY)
        assert all(outcome.ok for outcome in outcomes), outcomes[0].error
        peaks[depth] = sum(outcome.value for outcome in outcomes)
    print({depth: f"{peak / MIB:.1f} MiB" for depth, peak in peaks.items()})
    shards_and_gradients = 8 * unit * 2
    # One unit's worth of slack for what allocators keep.
    assert peaks[16] - peaks[8] <= shards_and_gradients + 2 * unit


def is_off_heap(n_bytes: int, kept: list[torch.Tensor]) -> bool:
    """Whether malloc maps a tensor of this size instead of taking it from its heap."""
    ctypes.CDLL(None).malloc_trim(0)
    # A hole that is large enough is taken, whatever the thresholds: by the first one. Both are
    # kept, so that they leave no hole.
    kept += [torch.empty(n_bytes, dtype=torch.uint8) for _ in range(2)]
    # The word before a block of glibc holds its size and flags, of which 2 says that it is mapped.
    header = ctypes.c_size_t.from_address(kept[-1].data_ptr() - ctypes.sizeof(ctypes.c_size_t))
    return bool(header.value & 2)


def heap_by_implementation(rank: int, n_ranks: int) -> list[tuple[bool, bool]]:
    """Of 20 and 40 MiB: before, after set-up, after a tree of torch's own and one on the core."""
    kept: list[torch.Tensor] = []

    def look() -> tuple[bool, ...]:
        return tuple(is_off_heap(n_bytes, kept) for n_bytes in (20 * MIB, 40 * MIB))

    torch.empty(30 * MIB, dtype=torch.uint8)  # frees it: glibc's threshold rises
    seen = [look()]
    api = implementation()
    on_torch, on_core = (nn.Linear(4, 4) for _ in range(2))
    api.fully_shard(on_torch)
    seen.append(look())
    with function_replaced():
        on_torch(torch.ones(1, 4)).sum().backward()
    seen.append(look())
    api.fully_shard(on_core)
    for net in (on_core, on_torch):
        net(torch.ones(1, 4)).sum().backward()
        seen.append(look())
    return seen


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators have no heap to tune"
)
def test_large_tensors_are_off_the_heap_unless_torch_allocates_them() -> None:
    for outcome in run_ranks(heap_by_implementation, 2, fresh=True):
        assert outcome.ok, outcome.error
        before, set_up, torchs, core, both = outcome.value
        assert before == (False, True)
        assert set_up == (True, True)
        assert torchs == (False, True)
        assert core == both == (True, True)
