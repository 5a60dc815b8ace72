"""Units on a device whose gradients are of several dtypes, beside torch's fully_shard."""

from typing import Any

import pytest
import torch
from harness import cached_mesh
from models import Net, data
from parity import Pair, Tolerance, on_ranks
from test_device_schedule import is_on_device, shard_blocks
from torch import nn

import fsdp_c
from fsdp_c._comm import _device
from fsdp_c._compat import _versions


class Types(nn.Module):
    """Parameters of four dtypes side by side; each call trains those that it names."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32)
        self.parts = nn.ModuleList(nn.Linear(6, 7, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2, 3, 4)) -> torch.Tensor:
        outs = [part(x.to(part.weight.dtype)).double() for part in self.parts]
        return sum(out if i in used else out.detach() for i, out in enumerate(outs))


def shard_types(model: Types, fsdp: Any, **options: Any) -> None:
    """In one unit; torch, which refuses that, gets one for each dtype."""
    if fsdp is not fsdp_c:
        for part in ([model.parts[0]], [model.parts[2]], [model.parts[3]]):
            fsdp.fully_shard(part, **options, reshard_after_forward=False)
    fsdp.fully_shard(model, **options)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(1, 2, 4)
def test_gradients_of_several_dtypes(rank: int, n_ranks: int, by_torch: bool) -> None:
    """A reduction for each, with replicas and held gradients; ranks may use other parameters."""

    def sync(is_synced: bool) -> Any:
        return lambda side: side.model.set_requires_gradient_sync(is_synced)

    mesh = cached_mesh((2, 2), ("replicate", "shard")) if n_ranks == 4 else cached_mesh((n_ranks,))
    with _device.on_cpu(by_torch):
        tolerance = Tolerance() if n_ranks < 4 else Tolerance.of(n_ranks, torch.bfloat16)
        pair = Pair(Types, lambda *args: shard_types(*args, mesh=mesh), tolerance=tolerance)
        for step, used in enumerate([(0, 1, 2, 3, 4), (1, 2), (0, 3)]):
            pair.do(sync(False), "no sync")
            pair.forward(data(rank, 10 + step))
            pair.backward()
            pair.do(sync(True), "sync")
            pair.step(data(rank, step), used)
        assert is_on_device(pair)
        (row,) = fsdp_c.explain(pair.ours.model).units
        assert row.road.startswith("core, on streams of cpu")
        model = pair.ours.model
        model.set_reduce_scatter_unused_params(True)
        model(data(rank), used=(rank % 5,)).sum().backward()
        weight = model.parts[rank % 5].weight
        assert weight.dtype is weight.grad.dtype
        own = weight.grad._local_tensor.double()
        whole = data(rank).to(weight.dtype).sum(0).double() / n_ranks
        torch.testing.assert_close(own, whole.expand_as(own), rtol=0.02, atol=0.02)


@on_ranks(2)
def test_gradient_dtypes_of_parameters(rank: int, n_ranks: int) -> None:
    """Summed in one dtype, and left to each shard in its own."""
    if not _versions.HAS_GRAD_DTYPE:
        pytest.skip("this torch has none")

    def build() -> nn.Module:
        model = Net()
        model.blocks[0].up.weight.grad_dtype = torch.float64
        model.blocks[0].up.bias.grad_dtype = torch.bfloat16
        model.blocks[1].up.weight.grad_dtype = torch.bfloat16
        return model

    with _device.on_cpu():
        pair = Pair(build, shard_blocks())
        for step in range(2):
            pair.step(data(rank, step))
        assert is_on_device(pair)
