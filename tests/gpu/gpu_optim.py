"""Optimizer steps and clipping over 600 small sharded parameters on a GPU, beside plain tensors.

`python gpu_optim.py RANK RANKS STORE DEVICE ROWS` is the process that measures.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from gpu_rows import Rows
from torch import nn, optim

TABLE = "600 small parameters: ms of a step, one rank"
N_UNITS, WIDTH, N_SAMPLES = 300, 32, 15

Step = Callable[[nn.Module], Callable[[], object]]


def step_of(cls: type[optim.Optimizer], **options: Any) -> Step:
    return lambda model: cls(model.parameters(), lr=1e-3, **options).step


def clip(**options: Any) -> Step:
    def step(model: nn.Module) -> Callable[[], object]:
        parameters = list(model.parameters())
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0, **options)

    return step


STEPS: dict[str, Step] = {
    "AdamW": step_of(optim.AdamW),
    "AdamW, foreach": step_of(optim.AdamW, foreach=True),
    "AdamW, fused": step_of(optim.AdamW, fused=True),
    "SGD, momentum": step_of(optim.SGD, momentum=0.9),
    "clip_grad_norm_": clip(),
    "clip_grad_norm_, finite": clip(error_if_nonfinite=True),
    "clip_grad_norm_, inf": clip(norm_type=math.inf),
}


def side_of(api: Any, device: torch.device, n_units: int) -> nn.Module:
    """With gradients; `api`: whose fully_shard is applied, None: plain parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n_units))).to(device)
    if api is not None:
        mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
        for unit in model:
            api.fully_shard(unit, mesh=mesh)
        api.fully_shard(model, mesh=mesh)
    model(torch.randn(4, WIDTH, device=device)).square().mean().backward()
    return model


def use_clipping_of(name: str) -> None:
    """torch's functions as they are, or as fsdp_c changes them for everyone."""
    from fsdp_c._optim import _clip_grad_norm

    (_clip_grad_norm.install if name == "fsdp_c" else _clip_grad_norm.uninstall)()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(rows: Rows, device: torch.device, n_units: int) -> None:
    """The three sides in turn; medians."""
    import fsdp_c

    models = {
        name: side_of(api, device, n_units)
        for name, api in (("plain", None), ("torch", torch_fsdp), ("fsdp_c", fsdp_c))
    }
    for what, make in STEPS.items():
        runs = {name: make(model) for name, model in models.items()}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for sample in range(N_SAMPLES + 3):
            for name, run in runs.items():
                use_clipping_of(name)
                settle(device)
                begun = time.perf_counter()
                run()
                settle(device)
                if sample >= 3:
                    taken[name].append(time.perf_counter() - begun)
        ms = {name: statistics.median(found) * 1e3 for name, found in taken.items()}
        rows.figure(TABLE, step=what, **ms, of_plain=ms["fsdp_c"] / ms["plain"])


def run(rows: Rows, device_type: str) -> None:
    """As a part of gpu-check."""
    words = [device_type, str(rows.path)]
    env = gpu_ranks.environment(device_type, 1)
    rows.check("optimizers", lambda: gpu_ranks.run(__file__, 1, *words, env=env))


def run_rank(rank: int, n_ranks: int, store: str, device_type: str, file: str) -> None:
    device = gpu_ranks.begin(rank, n_ranks, store, device_type)
    time_steps(Rows(Path(file), "optimizers"), device, N_UNITS if device_type == "cuda" else 8)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
