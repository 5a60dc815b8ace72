"""One program under several implementations in one process, and what each of them leaves.

A program gets a side and trains with it; what it notes is compared between the sides, bit for bit
unless the program names a tolerance. Nothing here waits for the GPU before all of it is noted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

WIDTH = 20
CYCLES = 1 << 21  # of the GPU's clock, about a millisecond


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("on purpose")


class Block(nn.Module):
    """Its hidden size is odd in some: no two ranks divide it, and rows are not aligned."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise ValueError("on purpose")
        if self.fails_in == "backward":
            x = Failing.apply(x)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (33, 48, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.uses = [0, 1, 2]
        self.run: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.uses:
            x = self.run(self.blocks[index], x)
        return self.head(x)


@functools.cache
def mesh_of(device_type: str, shape: tuple[int, ...]) -> Any:
    names = {1: ("shard",), 2: ("replicate", "shard")}[len(shape)]
    return dist.init_device_mesh(device_type, shape, mesh_dim_names=names)


@functools.cache
@torch.inference_mode(False)
def data_of(device: torch.device, step: int, rank: int) -> Tensor:
    """Kept: a copy to the GPU would wait for all that it has to do."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(7, WIDTH, generator=generator).to(device)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


class Side:
    """An implementation of fully_shard; `api` None is the bare model with the inputs of all ranks,
    for what torch's own does not do right."""

    def __init__(self, name: str, api: Any, device: torch.device) -> None:
        self.name, self.api, self.device = name, api, device
        self.is_ours = name == "fsdp_c"
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        self.by_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        self.models: list[Any] = []
        self.notes: list[tuple[str, Tensor | None]] = []

    # ---- models ----

    def net(self, build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
        torch.manual_seed(7)
        return self.shard(build().to(self.device), **options)

    def shard(self, model: Any, **options: Any) -> Any:
        """A unit per block, and the root."""
        for block in model.blocks:
            self.unit(block, **options)
        return self.root(model, **options)

    def root(self, model: Any, **options: Any) -> Any:
        self.unit(model, **options)
        self.models.append(model)
        if self.api is torch_fsdp and self.n_ranks > 1 and not self.by_nccl:
            for unit in self.units(model):
                # gloo has no averages of what is on a GPU.
                unit.set_force_sum_reduction_for_comms(True)
        return model

    def unit(self, module: Any, shape: tuple[int, ...] | None = None, **options: Any) -> None:
        if self.api is not None:
            mesh = mesh_of(self.device.type, shape or (self.n_ranks,))
            self.api.fully_shard(module, mesh=mesh, **options)

    def units(self, model: nn.Module) -> list[Any]:
        return [m for m in model.modules() if isinstance(m, torch_fsdp.FSDPModule)]

    def fill(self, model: nn.Module) -> None:
        """Shards of numbers that do not depend on the memory's content."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                whole = torch.randn(param.shape, generator=generator) / 5
                local(param).copy_(self.part(whole))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows."""
        parts = whole.chunk(self.n_ranks)
        return parts[self.rank] if self.rank < len(parts) else whole[:0]

    # ---- steps ----

    def data(self, step: int, rank: int | None = None) -> Tensor:
        return data_of(self.device, step, self.rank if rank is None else rank)

    def loss(self, model: Any, step: int, rank: int | None = None) -> Tensor:
        return model(self.data(step, rank)).float().square().mean()

    def backward(self, model: Any, step: int) -> None:
        """Forward and backward; of the bare model for each rank."""
        ranks = range(self.n_ranks) if self.api is None else [self.rank]
        for rank in ranks:
            loss = self.loss(model, step, rank)
            (loss / len(ranks)).backward()
            if rank == self.rank:
                self.note(f"loss {step}", loss)

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        first: int = 0,
        n_steps: int = 3,
    ) -> None:
        optimizer = optimizer or self.sgd(model)
        for step in range(first, first + n_steps):
            self.backward(model, step)
            self.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        self.note_parameters(model)

    def lag(self) -> None:
        """What is asked of the current stream from now on waits for a while."""
        if self.device.type == "cuda":
            torch.cuda._sleep(CYCLES)

    @contextlib.contextmanager
    def clipping(self, waits: bool) -> Iterator[None]:
        """torch's functions of clipping are its own but for fsdp_c; which does not wait for the
        GPU unless it `waits`."""
        from fsdp_c._optim import _clip_grad_norm

        (_clip_grad_norm.install if self.is_ours else _clip_grad_norm.uninstall)()
        is_watched = self.is_ours and self.device.type == "cuda" and not waits
        try:
            if is_watched:
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            if is_watched:
                torch.cuda.set_sync_debug_mode("default")
            _clip_grad_norm.install()

    # ---- notes ----

    def note(self, what: str, value: Tensor | None) -> None:
        if value is not None:
            value = local(value).clone()
        self.notes.append((what, value))

    def note_all(self, what: str, values: Any) -> None:
        for index, value in enumerate(values):
            self.note(f"{what} {index}", value)

    def note_parameters(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.note(name, self._own(param))

    def note_gradients(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            grad = param.grad
            self.note(f"gradient of {name}", None if grad is None else self._own(grad))

    def _own(self, tensor: Tensor) -> Tensor:
        return self.part(tensor) if self.api is None else tensor


@dataclass(frozen=True)
class Program:
    name: str
    run: Callable[[Side], None]
    beside: str  # "torch", or "bare" where torch's own does not do right
    tolerance: float  # of a tensor's largest number
    gathers: bool  # DTensor's own collectives, which crash over gloo on a GPU
    ranks: tuple[int, ...]
    on_core: bool  # whether the stream schedule has to run it
    gpu_ulps: int  # on a GPU so many eps of a tensor's type are allowed, too
    of_three: float  # the tolerance of three ranks, where sums or divisions round otherwise

    def tolerance_of(self, n_ranks: int) -> float:
        return max(self.tolerance, self.of_three if n_ranks > 2 else 0.0)


PROGRAMS: dict[str, Program] = {}


def program(
    name: str,
    *,
    beside: str = "torch",
    tolerance: float = 0.0,
    gathers: bool = False,
    ranks: tuple[int, ...] = (1, 2),
    on_three: bool = False,
    on_core: bool = True,
    gpu_ulps: int = 0,
    of_three: float = 0.0,
) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    def decorate(run: Callable[[Side], None]) -> Callable[[Side], None]:
        assert name not in PROGRAMS, name
        on = (*ranks, 3) if on_three else ranks
        PROGRAMS[name] = Program(
            name, run, beside, tolerance, gathers, on, on_core, gpu_ulps, of_three
        )
        return run

    return decorate


def compare(found: Side, expected: Side, tolerance: float, ulps: int = 0) -> None:
    """AssertionError unless both have noted the same; names what is farthest off. `ulps`: eps of a
    tensor's type that are allowed beside the tolerance."""
    whats = [what for what, _ in expected.notes]
    assert [what for what, _ in found.notes] == whats, "different notes"
    off: list[tuple[float, str]] = []
    for (what, ours), (_, theirs) in zip(found.notes, expected.notes, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, f"{what} is {ours} for {theirs}"
            continue
        kinds = [(t.dtype, tuple(t.shape), t.device.type) for t in (ours, theirs)]
        assert kinds[0] == kinds[1], f"{what} is {kinds[0]} for {kinds[1]}"
        allowed = max(tolerance, ulps * _eps(theirs))
        if (distance := _distance(ours, theirs)) > allowed:
            off.append((distance, what))
    assert not off, (
        f"{max(off)[1]} is off by {max(off)[0]:.2g} of its largest number; allowed {tolerance:g}"
        f"{f' or {ulps} ulps' * (ulps > 0)};"
        f" {off[0][1]} is the first of {len(off)} in {len(whats)}"
    )


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference in terms of the largest number."""
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    difference, scale = (float(t.abs().max()) for t in (ours - theirs, theirs))
    if difference == 0.0:
        return 0.0  # but for the sign of a zero, or there was no number
    return difference / scale if scale > 0 else float("inf")
