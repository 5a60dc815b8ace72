"""MixedPrecisionPolicy beside torch: dtype combinations, casts, parameters of many dtypes."""

from typing import Any

import models
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import implementation
from models import WIDTH, Block, Net, data
from parity import EXACT, Pair, Side, Tolerance, on_ranks
from torch import Tensor, nn

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# Original, param_dtype, reduce_dtype.
COMBINATIONS = [
    (F32, None, None),
    (F32, BF16, None),
    (F32, BF16, BF16),
    (F32, BF16, F32),
    (F32, BF16, F64),
    (F32, None, BF16),
    (F32, F16, None),
    (F32, F16, F32),
    (F32, F64, None),
    (F32, F64, F32),
    (BF16, F32, None),
    (BF16, None, F32),
    (BF16, None, None),
    (F64, None, None),
    (F64, F32, None),
]


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


def tolerance_of(n_ranks: int, *dtypes: torch.dtype | None) -> Tolerance:
    """That of the narrowest dtype which gradients or parameters pass through."""
    if n_ranks == 1:
        return EXACT
    if F64 in dtypes and F32 in dtypes:
        # Torch rounds the sum to float32; the tested one may write it to float64 as it is.
        return Tolerance.of(n_ranks, F64)
    narrow = next((dtype for dtype in (BF16, F16) if dtype in dtypes), F32)
    return Tolerance.of(n_ranks, narrow)


@pytest.mark.parametrize("original, param, reduce", COMBINATIONS, ids=name_of)
@on_ranks(1, 2, 3)
def test_dtypes(
    rank: int,
    n_ranks: int,
    original: torch.dtype,
    param: torch.dtype | None,
    reduce: torch.dtype | None,
) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        models.shard_blocks(model, fsdp, mp_policy=policy)

    # `None` is param_dtype up to torch 2.14 and the original dtype from then: both are covered.
    reduces = (reduce,) if reduce else (param, original)
    pair = Pair(
        lambda: Net().to(original), shard, tolerance=tolerance_of(n_ranks, original, *reduces)
    )
    for step in range(3):
        pair.step(data(rank, step, dtype=param or original))
    pair.eval_forward(data(rank, 3, dtype=param or original))
    pair.check_state_dict()


@pytest.mark.parametrize("cast_inputs", [True, False])
@pytest.mark.parametrize("output", [None, F32, BF16, F64], ids=name_of)
@on_ranks(1, 2)
def test_casts(rank: int, n_ranks: int, output: torch.dtype | None, cast_inputs: bool) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(BF16, F32, output, cast_inputs)
        models.shard_blocks(model, fsdp, mp_policy=policy)

    pair = Pair(lambda: Net(own=False), shard)
    if not cast_inputs:
        with pytest.raises(RuntimeError):
            pair.ours.model(data(rank))
        pair.ours.model.reset_iter_state()
    # With output_dtype each block hands over another dtype than the next one computes in.
    if cast_inputs or output in (None, BF16):
        for step in range(2):
            pair.step(data(rank, step, dtype=F32 if cast_inputs else BF16))


@on_ranks(1, 2)
def test_policies_differ_by_unit(rank: int, n_ranks: int) -> None:
    def shard(model: Net, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy
        fsdp.fully_shard(model.blocks[0], mp_policy=policy(param_dtype=F64, reduce_dtype=F32))
        fsdp.fully_shard(model.blocks[1], mp_policy=policy(param_dtype=BF16, reduce_dtype=F32))
        fsdp.fully_shard(model.blocks[2], mp_policy=policy(param_dtype=F32, reduce_dtype=F64))
        fsdp.fully_shard(model)

    class Casting(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.stem(x.float()) * self.scale.sum() + self.offset

    pair = Pair(Casting, shard)
    for step in range(3):
        pair.step(data(rank, step))


class Inputs(nn.Module):
    """Says which dtypes reached it; integers, bools and complex numbers are never cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, others: list[Tensor], *, more: dict[str, Tensor]) -> Any:
        seen = [tensor.dtype for tensor in [x, *others, *more.values()]]
        return self.linear(x), others, more, seen


@on_ranks(1, 2)
def test_which_inputs_are_cast(rank: int, n_ranks: int) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32)
        fsdp.fully_shard(model, mp_policy=policy)

    pair = Pair(Inputs, shard)
    plain = torch.ones(2)
    others = [plain.to(dtype) for dtype in (F64, F16, torch.int64, torch.bool, torch.complex64)]
    pair.step(data(rank), others, more={"half": plain.half(), "same": plain.to(BF16)})
    assert pair.ours.kept[3][:3] == [BF16, BF16, BF16]


@pytest.mark.parametrize("param", [None, BF16], ids=name_of)
@on_ranks(1, 2, 3)
def test_many_dtypes_in_a_unit(rank: int, n_ranks: int, param: torch.dtype | None) -> None:
    """Frozen parameters of other dtypes and sizes travel with the trainable ones."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(5, dtype=torch.int32), requires_grad=False)
            self.inner = Block()
            self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
            self.bytes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
            self.wide = nn.Parameter(torch.rand(3, dtype=F64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            extra = self.table.sum() * self.wide.sum() + self.mask.sum() + self.bytes.sum()
            return self.inner(x) + extra.to(x.dtype)

    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=F32)
        fsdp.fully_shard(model, mp_policy=policy)

    pair = Pair(Odd, shard)
    for step in range(2):
        pair.step(data(rank, step))
    pair.check_state_dict()


@on_ranks(1, 2)
def test_autocast(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)

    def forward(side: Side) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            side.kept = side.model(data(rank))
        return side.kept

    for _ in range(2):
        pair.both(forward)
        pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_unsharded_by_hand(rank: int, n_ranks: int) -> None:
    """Parameters that `unshard` shows are in param_dtype, before the first forward too."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
        models.shard_blocks(model, fsdp, mp_policy=policy)

    pair = Pair(Net, shard)
    for step in range(2):
        pair.do(lambda side: side.model.blocks[0].unshard(), "unshard")
        assert pair.ours.model.blocks[0].up.weight.dtype is BF16
        pair.both(lambda side: side.model.blocks[0].reshard(), "reshard")
        pair.step(data(rank, step))


@pytest.mark.parametrize("reduce", [None, F32], ids=name_of)
@on_ranks(1, 2)
def test_all_frozen_at_first(rank: int, n_ranks: int, reduce: torch.dtype | None) -> None:
    """The first forward has nothing to train; training later is as if it had not been."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
        models.shard_blocks(model, fsdp, mp_policy=policy)

    pair = Pair(Net, shard, tolerance=tolerance_of(n_ranks, reduce or BF16))
    pair.skip_if_same()
    pair.ours.model.requires_grad_(False)
    pair.ours.model(data(rank))
    pair.ours.model.reshard()
    pair.ours.model.requires_grad_(True)
    for step in range(2):
        pair.step(data(rank, step))


@on_ranks(1, 2)
def test_conversion_before_first_forward(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, optimizer=None, tolerance=tolerance_of(n_ranks, BF16))
    pair.do(lambda side: side.model.to(BF16), "to bf16")
    for step in range(2):
        pair.forward(data(rank, step, dtype=BF16))
        pair.backward()


@pytest.mark.parametrize("original", [F32, BF16], ids=name_of)
@on_ranks(2, 3)
def test_sums_in_bf16_are_rounded_once(rank: int, n_ranks: int, original: torch.dtype) -> None:
    """Torch rounds to `reduce_dtype` after each addition; here sums are rounded at their end."""

    def gradient(fsdp: Any) -> Tensor:
        model = nn.Linear(256, n_ranks, bias=False, dtype=original)
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(BF16, BF16))
        model(inputs[rank]).sum().backward()
        return model.weight.grad.to_local()

    inputs = [data(r, 0, 1, 256, dtype=BF16) for r in range(n_ranks)]
    exact = torch.cat(inputs).to(F64).sum(0, keepdim=True) / n_ranks
    theirs, ours = gradient(torch_fsdp), gradient(implementation())
    assert ours.dtype is theirs.dtype is original
    their_error, our_error = ((grad.to(F64) - exact).abs() for grad in (theirs, ours))
    assert torch.equal(ours, exact.to(BF16).to(original))
    if n_ranks == 2:
        assert torch.equal(ours, theirs)
    else:
        assert our_error.sum() < their_error.sum()
