"""torchao's own tensors under fully_shard: float8 and int8 training, NF4. Skipped without torchao.

`pip install --no-deps torchao`: the tests have run with 0.18.
"""

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from harness import cached_mesh
from parity import Pair, Side, Tolerance, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
WIDTH, HIDDEN = 32, 64
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32)
NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
ROUGH = Tolerance(scaled=2**-5, realign=True)


class Mlp(nn.Module):
    """With biases, so that a unit's gather is of bytes: gloo has no float8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def shard_layers(model: nn.Module, fsdp: Any, **options: Any) -> None:
    for layer in model.layers:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, WIDTH, generator=generator)


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("gathers_float8", [False, True])
@on_ranks(2, 4)
def test_float8_linear(rank: int, n_ranks: int, gathers_float8: bool) -> None:
    """With scales that are computed ahead for all weights, from the second step on."""
    config = named("torchao.float8.Float8LinearConfig")(
        enable_fsdp_float8_all_gather=gathers_float8, emulate=True
    )
    precompute = named("torchao.float8.precompute_float8_dynamic_scale_for_fsdp")

    def shard(model: nn.Module, fsdp: Any) -> None:
        named("torchao.float8.convert_to_float8_training")(model, config=config)
        shard_layers(model, fsdp)

    pair = Pair(Mlps, shard, tolerance=ROUGH)
    for step in range(3):
        pair.step(inputs(rank, step))
        if gathers_float8:
            pair.do(lambda side: precompute(side.model))
    pair.eval_forward(inputs(rank, 9))


@on_ranks(4)
def test_float8_linear_with_tensor_parallelism(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("dp", "tp"))
    config = named("torchao.float8.Float8LinearConfig")(
        enable_fsdp_float8_all_gather=True, emulate=True
    )
    parallel = importlib.import_module("torchao.float8.float8_tensor_parallel")
    parallelize_module = named("torch.distributed.tensor.parallel.parallelize_module")

    def shard(model: nn.Module, fsdp: Any) -> None:
        named("torchao.float8.convert_to_float8_training")(model, config=config)
        for layer in model.layers:
            plan = {
                "up": parallel.Float8ColwiseParallel(),
                "down": parallel.Float8RowwiseParallel(),
            }
            parallelize_module(layer, mesh["tp"], plan)
        shard_layers(model, fsdp, mesh=mesh["dp"])

    pair = Pair(Mlps, shard, tolerance=ROUGH)
    for step in range(2):
        pair.step(inputs(mesh.get_local_rank("dp"), step))


@pytest.mark.parametrize("is_mixed", [True, False])
@on_ranks(2)
def test_int8_mixed_precision_training(rank: int, n_ranks: int, is_mixed: bool) -> None:
    path = "torchao.prototype.quantized_training.int8_mixed_precision_training"
    quantize = named("torchao.quantization.quantize_")

    def shard(model: nn.Module, fsdp: Any) -> None:
        quantize(model, named(path)())
        # Its weights are gathered in the policy's dtype, and need one.
        shard_layers(model, fsdp, mp_policy=BF16 if is_mixed else FP32)

    pair = Pair(Mlps, shard, tolerance=ROUGH)
    for step in range(2):
        pair.step(inputs(rank, step))


class Lora(nn.Module):
    """As torchtune: the base frozen in NF4, adapters trained."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(64, 64) / 8
        weight = named(f"{NF4}.to_nf4")(base, 64, 4)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + named(f"{NF4}.linear_nf4")(x, self.weight) + self.b(self.a(x))


class Loras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2)
def test_lora_over_nf4(rank: int, n_ranks: int) -> None:
    """Steps are compared by what is trained and by outputs: NF4 has no comparison."""
    results = []
    for side in sides():
        losses = []
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            losses.append(loss.item())
        trained = [p._local_tensor.tolist() for p in side.shards.values() if p.requires_grad]
        results.append((losses, trained))
    assert results[0] == results[1]
    assert results[0][0][0] != results[0][0][1]


def sides() -> tuple[Side, Side]:
    import harness
    import torch.distributed.fsdp as torch_fsdp

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    return tuple(
        Side(name, fsdp, Loras, shard_layers, adamw)
        for name, fsdp in (("torch", torch_fsdp), ("tested", harness.implementation()))
    )
