"""Training on a GPU: programs beside torch's, captured steps, memory, and how fast steps are.

What is captured, measured or timed has a process of its own: `python gpu_train.py RANK RANKS STORE
DEVICE WHAT [ROWS]`. On the device "cpu" figures run over host memory. Needs a build of the
extension.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gpu_beside
import gpu_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from gpu_rows import Rows
from torch import Tensor, nn

STEPS = 4
WIDTH = 64


class Block(nn.Module):
    """Two linear layers; an odd hidden size is one that no two ranks divide evenly."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(7)
    hidden = (2 * WIDTH + 1, 2 * WIDTH, 2 * WIDTH)
    return nn.Sequential(*(Block(h) for h in hidden)).to(device)


def data(device: torch.device, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, WIDTH, generator=generator).to(device)


def train(model: nn.Module, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(data(device, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(device: torch.device, **options: Any) -> nn.Module:
    import fsdp_c

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model = build(device)
    for block in model:
        fsdp_c.fully_shard(block, mesh=mesh, **options)
    fsdp_c.fully_shard(model, mesh=mesh, **options)
    return model


def compare_captured(device: torch.device) -> None:
    """A step in a CUDA graph, replayed over other inputs, beside one that is not."""
    model = sharded(device)
    x = data(device, 0)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gradients = [parameter.grad for parameter in model.parameters()]
    x.copy_(data(device, 1))
    graph.replay()
    torch.cuda.synchronize()
    loss, found = captured.clone(), [gradient.to_local().clone() for gradient in gradients]
    model.zero_grad()
    torch.testing.assert_close(step(), loss, rtol=1e-6, atol=0)
    expected = [parameter.grad.to_local() for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def check_memory(device: torch.device) -> None:
    """Units take no memory of the GPU that torch's allocator does not know, and pin host memory
    once."""

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        pinned = int(torch.cuda.host_memory_stats()["num_host_alloc"])
        return total - free - torch.cuda.memory_reserved(device), pinned

    offloaded = sharded(device, offload_policy=torch_fsdp.CPUOffloadPolicy())
    train(offloaded, device)  # kernels are loaded, and there is all that steps use again
    beside, pinned = taken()
    train(offloaded, device)
    models = [sharded(device) for _ in range(40)]  # 8 MiB of parameters
    for model in models:
        train(model, device)
    beside, pinned = (now - before for now, before in zip(taken(), (beside, pinned), strict=True))
    assert pinned == 0, f"{pinned} more pinned blocks"
    assert beside < 4 << 20, f"{beside} bytes more that torch does not know"


# ---- figures ----


def gpt(
    device: torch.device, n_blocks: int = 20, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Sequential, Tensor]:
    """Blocks of 50M parameters; 4 x 1024 positions in bfloat16. Tiny on a host."""
    is_large = device.type == "cuda"
    n, width, heads, positions = (n_blocks, 2048, 16, 1024) if is_large else (2, 32, 2, 8)
    with device:
        blocks = [
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(n)
        ]
    model = nn.Sequential(*blocks).to(dtype)
    return model, torch.randn(4, positions, width, device=device, dtype=torch.bfloat16)


def small_units(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))).to(device)
    return model, torch.randn(4, 16, device=device)


class Timed:
    """One side: seconds of a step, and of the calls alone, before the GPU is done with them."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.steps: list[float] = []
        self.calls: list[float] = []

    def step(self) -> None:
        self.model(self.x).square().mean().backward()

    def run(self) -> None:
        is_cuda = self.x.is_cuda
        if is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        self.step()
        self.calls.append(time.perf_counter() - begun)
        if is_cuda:
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - begun)
        self.model.zero_grad()

    def forget(self) -> None:
        self.steps.clear()
        self.calls.clear()


class Captured(Timed):
    """The step is a CUDA graph that is replayed; it writes the same gradients again."""

    def __init__(self, side: Timed) -> None:
        super().__init__(side.model, side.x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                side.step()
                side.model.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            side.step()

    def step(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class Figure:
    name: str
    build: Callable[[torch.device], tuple[nn.Sequential, Tensor]]
    n_samples: int
    options: dict[str, Any] = field(default_factory=dict)  # of fully_shard


def side_of(figure: Figure, api: Any, device: torch.device) -> Timed:
    """`api`: whose fully_shard is applied; None: the bare model, in the type of its input."""
    model, x = figure.build(device)
    if api is None:
        return Timed(model.to(x.dtype), x)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    for unit in model:
        api.fully_shard(unit, mesh=mesh, **figure.options)
    api.fully_shard(model, mesh=mesh, **figure.options)
    return Timed(model, x)


def peak_mib(figure: Figure, api: Any, device: torch.device) -> float:
    """Of all that a model and a step of it allocate."""
    if device.type != "cuda":
        return 0.0
    before = torch.cuda.memory_allocated()
    side = side_of(figure, api, device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        side.run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def figures(rows: Rows, device: torch.device, figure: Figure) -> None:
    """Forward and backward without an optimizer, the three in turn; medians."""
    import fsdp_c

    apis = {"bare": None, "torch": torch_fsdp, "fsdp_c": fsdp_c}
    peaks = {name: peak_mib(figure, api, device) for name, api in apis.items()}
    sides = {name: side_of(figure, api, device) for name, api in apis.items()}
    time_in_turn(sides, figure.n_samples)
    bare, n_units = sides["bare"], len(sides["bare"].model)
    host = {
        name: (statistics.median(side.calls) - statistics.median(bare.calls)) / n_units * 1e6
        for name, side in sides.items()
    }
    for name, side in sides.items():
        step = statistics.median(side.steps)
        rows.figure(
            f"{figure.name}: forward and backward, one rank, {n_units} units",
            side=name,
            ms=step * 1e3,
            of_bare=step / statistics.median(bare.steps),
            host_us_per_unit=host[name],
            host_of_torch=host[name] / host["torch"] if host["torch"] > 0 else 0.0,
            peak_mib=peaks[name],
        )


def captured_figures(rows: Rows, device: torch.device, figure: Figure) -> None:
    """Steps as they are called beside steps in a CUDA graph, in turn; medians."""
    import fsdp_c

    apis = {"bare": None, "fsdp_c": fsdp_c}
    sides = {name: side_of(figure, api, device) for name, api in apis.items()}
    for name, api in apis.items():
        sides[f"{name}, captured"] = Captured(side_of(figure, api, device))
    time_in_turn(sides, figure.n_samples)
    steps = {name: statistics.median(side.steps) for name, side in sides.items()}
    for name, step in steps.items():
        rows.figure(
            f"{figure.name}: forward and backward in a CUDA graph, one rank",
            side=name,
            ms=step * 1e3,
            of_bare=step / steps["bare"],
            of_bare_captured=step / steps["bare, captured"],
        )


def time_in_turn(sides: dict[str, Timed], n_samples: int) -> None:
    for sample in range(n_samples + 3):
        for side in sides.values():
            side.run()
            if sample < 3:
                side.forget()


# ---- processes ----


CHECKS = {"captured": compare_captured, "memory": check_memory}
BF16 = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = torch_fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
FIGURES = {
    figure.name: figure
    for figure in (
        Figure("small units", small_units, 50),
        Figure("GPT", gpt, 10),
        Figure("GPT, float32 shards", partial(gpt, dtype=torch.float32), 10, {"mp_policy": BF16}),
        Figure("GPT, offloaded", partial(gpt, n_blocks=8), 5, {"offload_policy": OFFLOAD}),
    )
}


CAPTURED = {f"{name}, captured": FIGURES[name] for name in ("small units", "GPT")}


def run_rank(
    rank: int, n_ranks: int, store: str, device_type: str, what: str, file: str = ""
) -> None:
    device = gpu_ranks.begin(rank, n_ranks, store, device_type)
    if what in FIGURES:
        figures(Rows(Path(file), "steps"), device, FIGURES[what])
    elif what in CAPTURED:
        captured_figures(Rows(Path(file), "steps"), device, CAPTURED[what])
    else:
        CHECKS[what](device)
    dist.destroy_process_group()


def start(device_type: str, *words: str) -> None:
    env = gpu_ranks.environment(device_type, 1)
    gpu_ranks.run(__file__, 1, device_type, *words, env=env)


def run_checks(rows: Rows, device_type: str) -> None:
    gpu_beside.run_programs(rows, device_type)
    for name, what in (
        ("a step in a CUDA graph", "captured"),
        ("memory beside torch's allocators", "memory"),
    ):
        if device_type == "cuda":
            rows.check(name, lambda what=what: start(device_type, what))
        else:
            rows.left_out(name, "there is no GPU")


def run_figures(rows: Rows, device_type: str) -> None:
    for what in FIGURES:
        rows.check(what, lambda what=what: start(device_type, what, str(rows.path)))
    for what in CAPTURED:
        if device_type == "cuda":
            rows.check(what, lambda what=what: start(device_type, what, str(rows.path)))
        else:
            rows.left_out(what, "there is no GPU")


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
