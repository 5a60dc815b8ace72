"""Training on a GPU: units of the stream schedule beside torch's fully_shard, and their speed.

`check()` starts the ranks as processes; `python gpu_train.py RANK RANKS STORE DEVICE WHAT` is one.
On the device "cpu" the same runs over host memory. Needs a build of the extension.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

BF16 = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 4
WIDTH = 64


class Block(nn.Module):
    """Two linear layers with rows that no two ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(3))).to(device)


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


def whole(model: nn.Module) -> list[Tensor]:
    found = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [tensor.detach().float().cpu() for tensor in found]


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


# ---- figures ----


def gpt(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    """20 blocks of 50M parameters in bfloat16; 4 x 1024 positions."""
    with device:
        blocks = [
            nn.TransformerEncoderLayer(2048, 16, 8192, 0.0, batch_first=True, norm_first=True)
            for _ in range(20)
        ]
    model = nn.Sequential(*blocks).bfloat16()
    return model, torch.randn(4, 1024, 2048, device=device, dtype=torch.bfloat16)


def small_units(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))).to(device)
    return model, torch.randn(4, 16, device=device)


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begun)


def figures(device: torch.device, build_model: Any, n_samples: int, per_unit: bool) -> None:
    """Forward and backward without an optimizer, the three in turn; medians."""
    import fsdp_c

    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    models = {}
    for side, api in (("bare", None), ("torch", torch_fsdp), ("fsdp_c", fsdp_c)):
        model, x = build_model(device)
        if api is not None:
            for unit in model:
                api.fully_shard(unit, mesh=mesh)
            api.fully_shard(model, mesh=mesh)
        models[side] = (model, x, [])
    for sample in range(n_samples + 3):
        for model, x, seconds in models.values():
            with timed(seconds):
                model(x).square().mean().backward()
            model.zero_grad()
            if sample < 3:
                seconds.clear()
    found = {side: statistics.median(seconds) for side, (_, _, seconds) in models.items()}
    bare, n_units = found["bare"], len(models["bare"][0])
    for side in ("torch", "fsdp_c"):
        extra = f", {(found[side] - bare) / n_units * 1e6:.1f} us per unit" if per_unit else ""
        ratio = f"{found[side] / bare:.3f} of the bare module's"
        print(f"  {build_model.__name__}, {side}: {found[side] * 1e3:.3f} ms, {ratio}{extra}")


# ---- processes ----


def run_rank(rank: int, n_ranks: int, store: str, device_type: str, what: str) -> None:
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
    if what == "figures":
        figures(device, small_units, 50, per_unit=True)
        figures(device, gpt, 10, per_unit=False)
    elif what == "ranks":
        compare_ranks(device, rank, n_ranks)
    else:
        compare(what, device, rank)
    dist.destroy_process_group()


def check(device_type: str = "cuda", *, with_figures: bool = True) -> int:
    """How many of the checks failed."""
    failed = 0
    env = {"FSDP_C_DEVICES": device_type, "FSDP_C_QUIET": "1"}
    checks = [(1, what) for what in CASES] + [(2, "ranks")]
    for n_ranks, what in checks + [(1, "figures")] * with_figures:
        name = f"training, {what}, {n_ranks} rank{'s' * (n_ranks > 1)}"
        more = gpu_ranks.TWO_RANKS if n_ranks > 1 else {}
        is_good = gpu_ranks.start(__file__, n_ranks, device_type, what, env={**env, **more})
        failed += not is_good
        print(f"  {'passed' if is_good else 'FAILED'} {name}", flush=True)
    return failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
