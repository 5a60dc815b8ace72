"""Training on a GPU: units of the stream schedule beside torch's fully_shard, and their speed.

Ranks are processes; `python gpu_train.py RANK RANKS STORE DEVICE WHAT [ROWS]` is one. On the device
"cpu" the same runs over host memory. Needs a build of the extension.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from gpu_rows import Rows
from torch import Tensor, nn

BF16 = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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


def data(device: torch.device, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=generator).to(device)


def train(model: nn.Module, inputs: Callable[[int], Tensor]) -> list[float]:
    """Losses; the optimizer is torch's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _pre_gather(
    self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[Tensor], None]:
    return (self.to(torch.bfloat16),), None


def _post_gather(
    self: Tensor, gathered: tuple[Tensor], _: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    if out is None:
        whole = gathered[0].to(dtype)
        return whole, (whole,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered[0])
    return None


def extend(model: nn.Module) -> None:
    """Shards travel as bfloat16, by the protocol of all-gather extensions."""
    for parameter in model.parameters():
        local: Any = parameter._local_tensor  # type: ignore[attr-defined]
        local.fsdp_pre_all_gather = MethodType(_pre_gather, local)
        local.fsdp_post_all_gather = MethodType(_post_gather, local)


# What is passed to fully_shard, the largest relative difference of losses, and whether the stream
# schedule has to run it.
CASES: dict[str, tuple[dict[str, Any], float, bool]] = {
    "fp32": ({}, 1e-6, True),
    "bf16": ({"mp_policy": BF16}, 2e-3, True),
    "kept after forward": ({"reshard_after_forward": False}, 1e-6, True),
    "offload": ({"offload_policy": torch_fsdp.CPUOffloadPolicy()}, 1e-6, True),
    "extension": ({}, 1e-6, False),
}


def sharded(api: Any, device: torch.device, name: str) -> nn.Module:
    options = dict(CASES[name][0])
    if name == "offload" and not torch.cuda.is_available():
        options["offload_policy"] = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    model = build(device)
    for block in model:
        api.fully_shard(block, mesh=mesh, **options)
    api.fully_shard(model, mesh=mesh, **options)
    if name == "extension":
        extend(model)
    return model


def whole_of(tensor: Any) -> Tensor:
    """Of shards on dim 0. By way of the host: torch 2.11's own gathers crash over gloo on a GPU."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.detach().to_local().cpu())
    return torch.cat(parts).to(tensor.device)


def whole(model: nn.Module) -> list[Tensor]:
    return [whole_of(p).float().cpu() for p in model.parameters()]


def compare(name: str, device: torch.device, rank: int) -> None:
    import fsdp_c
    from fsdp_c import _device

    _, tolerance, is_scheduled = CASES[name]
    model = sharded(fsdp_c, device, name)
    losses = train(model, lambda step: data(device, rank, step))
    taken = _device.is_taken(model[0]._get_fsdp_state()._fsdp_param_groups[0])
    assert taken == is_scheduled, f"{name}: {fsdp_c.status()}"
    reference = sharded(torch_fsdp, device, name)
    expected = train(reference, lambda step: data(device, rank, step))
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(whole(model), whole(reference), rtol=10 * tolerance, atol=1e-2)


def compare_ranks(device: torch.device, rank: int, n_ranks: int) -> None:
    """Several ranks beside one process with all of their inputs."""
    import fsdp_c

    model = sharded(fsdp_c, device, "fp32")
    losses = torch.tensor(train(model, lambda step: data(device, rank, step)))
    one = build(device)
    expected = train(one, lambda step: torch.cat([data(device, r, step) for r in range(n_ranks)]))
    dist.all_reduce(losses)
    torch.testing.assert_close((losses / n_ranks).tolist(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(whole(model), whole(one), rtol=1e-4, atol=1e-3)


def compare_captured(device: torch.device) -> None:
    """A step in a CUDA graph, replayed over other inputs, beside one that is not."""
    import fsdp_c

    model = sharded(fsdp_c, device, "fp32")
    x = data(device, 0, 0)

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
    x.copy_(data(device, 0, 1))
    graph.replay()
    torch.cuda.synchronize()
    loss, found = captured.clone(), [whole_of(gradient).clone() for gradient in gradients]
    model.zero_grad()
    torch.testing.assert_close(step(), loss, rtol=1e-6, atol=0)
    expected = [whole_of(parameter.grad) for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def check_memory(device: torch.device) -> None:
    """Units take no memory of the GPU that torch's allocator does not know, and pin host memory
    once."""
    import fsdp_c

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        pinned = int(torch.cuda.host_memory_stats()["num_host_alloc"])
        return total - free - torch.cuda.memory_reserved(device), pinned

    def step_of(number: int) -> Tensor:
        return data(device, 0, number)

    offloaded = sharded(fsdp_c, device, "offload")
    train(offloaded, step_of)  # kernels are loaded, and there is all that steps use again
    beside, pinned = taken()
    train(offloaded, step_of)
    models = [sharded(fsdp_c, device, "fp32") for _ in range(40)]  # 8 MiB of parameters
    for model in models:
        train(model, step_of)
    beside, pinned = (now - before for now, before in zip(taken(), (beside, pinned), strict=True))
    assert pinned == 0, f"{pinned} more pinned blocks"
    assert beside < 4 << 20, f"{beside} bytes more that torch does not know"


# ---- figures ----


def gpt(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    """20 blocks of 50M parameters in bfloat16; 4 x 1024 positions. Tiny on a host."""
    n, width, heads, positions = (20, 2048, 16, 1024) if device.type == "cuda" else (2, 32, 2, 8)
    with device:
        blocks = [
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(n)
        ]
    model = nn.Sequential(*blocks).bfloat16()
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

    def run(self) -> None:
        is_cuda = self.x.is_cuda
        if is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.calls.append(time.perf_counter() - begun)
        if is_cuda:
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - begun)
        self.model.zero_grad()

    def forget(self) -> None:
        self.steps.clear()
        self.calls.clear()


def side_of(build_model: Any, api: Any, device: torch.device) -> Timed:
    """`api`: whose fully_shard is applied; None: the bare model."""
    model, x = build_model(device)
    if api is not None:
        mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
        for unit in model:
            api.fully_shard(unit, mesh=mesh)
        api.fully_shard(model, mesh=mesh)
    return Timed(model, x)


def peak_mib(build_model: Any, api: Any, device: torch.device) -> float:
    """Of all that a model and a step of it allocate."""
    if device.type != "cuda":
        return 0.0
    before = torch.cuda.memory_allocated()
    side = side_of(build_model, api, device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        side.run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def figures(rows: Rows, device: torch.device, build_model: Any, n_samples: int) -> None:
    """Forward and backward without an optimizer, the three in turn; medians."""
    import fsdp_c

    apis = {"bare": None, "torch": torch_fsdp, "fsdp_c": fsdp_c}
    peaks = {name: peak_mib(build_model, api, device) for name, api in apis.items()}
    sides = {name: side_of(build_model, api, device) for name, api in apis.items()}
    for sample in range(n_samples + 3):
        for side in sides.values():
            side.run()
            if sample < 3:
                side.forget()
    bare, n_units = sides["bare"], len(sides["bare"].model)
    host = {
        name: (statistics.median(side.calls) - statistics.median(bare.calls)) / n_units * 1e6
        for name, side in sides.items()
    }
    for name, side in sides.items():
        step = statistics.median(side.steps)
        rows.figure(
            f"{build_model.__name__}: forward and backward, one rank, {n_units} units",
            side=name,
            ms=step * 1e3,
            of_bare=step / statistics.median(bare.steps),
            host_us_per_unit=host[name],
            host_of_torch=host[name] / host["torch"] if host["torch"] > 0 else 0.0,
            peak_mib=peaks[name],
        )


# ---- processes ----


def run_rank(
    rank: int, n_ranks: int, store: str, device_type: str, what: str, file: str = ""
) -> None:
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    is_nccl = device_type == "cuda" and n_ranks == 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_nccl else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n_ranks,
    )
    if what in FIGURES:
        model, n_samples = FIGURES[what]
        figures(Rows(Path(file), "steps"), device, model, n_samples)
    elif what == "ranks":
        compare_ranks(device, rank, n_ranks)
    elif what == "captured":
        compare_captured(device)
    elif what == "memory":
        check_memory(device)
    else:
        compare(what, device, rank)
    dist.destroy_process_group()


FIGURES = {"small units": (small_units, 50), "GPT": (gpt, 10)}


def environment(device_type: str, n_ranks: int) -> dict[str, str]:
    env = {"FSDP_C_DEVICES": device_type, "FSDP_C_QUIET": "1", "OMP_NUM_THREADS": "1"}
    return env | (gpu_ranks.TWO_RANKS if n_ranks > 1 else {})


def start(device_type: str, n_ranks: int, *words: str) -> None:
    env = environment(device_type, n_ranks)
    gpu_ranks.run(__file__, n_ranks, device_type, *words, env=env)


def run_cases(rows: Rows, device_type: str) -> None:
    for what in CASES:
        rows.check(f"{what}, 1 rank", lambda what=what: start(device_type, 1, what))
    rows.check("fp32, 2 ranks", lambda: start(device_type, 2, "ranks"))
    for name, what in (
        ("a step in a CUDA graph", "captured"),
        ("memory beside torch's allocators", "memory"),
    ):
        if device_type == "cuda":
            rows.check(name, lambda what=what: start(device_type, 1, what))
        else:
            rows.left_out(name, "there is no GPU")


def run_figures(rows: Rows, device_type: str) -> None:
    for what in FIGURES:
        rows.check(what, lambda what=what: start(device_type, 1, what, str(rows.path)))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
