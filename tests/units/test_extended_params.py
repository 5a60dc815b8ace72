"""Extensions and shards without memory on the core: the unsharded model is the judge."""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import models
import pytest
import torch
from differential.feature_nets import PRESERVING, Wrapped, convert, padded
from models import data
from parity import Plain, Side, Tolerance, on_ranks, sgd
from test_inner_losses import (
    Net,
    beside,
    each_apart,
    forgetting,
    inner,
    inner_last,
    two_forwards,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_c

PRESERVING.add(torch.ops.aten.add.Tensor)
CLOSE = Tolerance(relative=1e-5, scaled=1e-5, absolute=1e-7)
MESSAGES = {"FSDP_C_TRANSPORT": "callback"}


class Summands(Wrapped):
    """Travels as a coarse and a fine part of other types, and comes out in memory of its own. The
    fine one is a view that shows its memory negated."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = padded(self.inner, math.ceil(outer_size[0] / mesh.size()))
        coarse = rows.to(torch.bfloat16)
        return (coarse, torch._neg_view(coarse - rows)), "summands"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "summands"
        whole = (outputs[0] + outputs[1]).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[: out.size(0)])
        return None


class Aliased(Wrapped):
    """What was gathered is the parameter."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return [padded(self.inner, math.ceil(outer_size[0] / mesh.size()))], None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert out is None or out.data_ptr() == outputs[0].data_ptr()
        return outputs[0], outputs


KINDS = {"summands": Summands, "aliased": Aliased, "without memory": Wrapped}


def unwrapped(tensor: Any) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.inner if isinstance(local, Wrapped) else tensor


class Judge(Plain):
    @staticmethod
    def check_part(shard: Tensor, whole: Tensor, tolerance: Tolerance, name: str) -> None:
        part = getattr(shard, "_local_tensor", shard)
        if isinstance(part, Wrapped):
            shard = type(shard)(part.inner, shard._spec, requires_grad=False)
        Plain.check_part(shard, whole, tolerance, name)


def side_of(kind: str, shard: Callable[..., None], build: Any = Net, **options: Any) -> Side:
    def convert_and_shard(model: nn.Module, fsdp: Any) -> None:
        convert(model, KINDS[kind])
        shard(model, fsdp, **options)

    return Side("tested", fsdp_c, build, convert_and_shard, sgd)


def assert_on_core(model: nn.Module) -> None:
    states = model._get_fsdp_state()._state_ctx.all_states
    groups = [group for state in states for group in state._fsdp_param_groups]
    assert groups and all(group._is_bound for group in groups), groups[0].why_torchs


def output(model: nn.Module, x: Tensor, scale: float) -> None:
    (model(x).square().sum() * scale).backward()


@forgetting
def train(
    rank: int,
    n_ranks: int,
    kind: str,
    shard: Callable[..., None] = models.shard_blocks,
    backward: Any = output,
    build: Any = Net,
    **options: Any,
) -> Side:
    side, plain = side_of(kind, shard, build, **options), Judge(build)
    for step in range(3):
        for r in range(n_ranks):
            backward(plain.model, data(r, step), 1 / n_ranks)
        backward(side.model, data(rank, step), 1)
        assert_on_core(side.model)
        plain.check(side, CLOSE)
        for optimizer in (side.optimizer, plain.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        plain.check(side, CLOSE)
    return side


def train_all(rank: int, n_ranks: int) -> None:
    for kind in KINDS:
        for shard in (models.shard_blocks, models.shard_root, models.shard_grouped):
            train(rank, n_ranks, kind, shard)
        train(rank, n_ranks, kind, reshard_after_forward=False)


@on_ranks(1, 2, 3)
def test_trains(rank: int, n_ranks: int) -> None:
    train_all(rank, n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_trains_over_messages(n_ranks: int) -> None:
    harness.run_ranks(train_all, n_ranks, env=MESSAGES)


@on_ranks(4)
def test_replicas(rank: int, n_ranks: int) -> None:
    mesh = harness.cached_mesh((2, 2), ("replicate", "shard"))
    for kind in KINDS:
        train(rank, n_ranks, kind, mesh=mesh)


class Twice(Net):
    """Each block runs twice in a row, and once in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, block(block(x)), use_reentrant=False)
        return x


@on_ranks(2)
def test_gathered_again(rank: int, n_ranks: int) -> None:
    for kind in KINDS:
        train(rank, n_ranks, kind, build=Twice)


def from_inside(rank: int, n_ranks: int) -> None:
    for kind in KINDS:
        for backward in (inner, beside, inner_last, two_forwards):
            train(rank, n_ranks, kind, models.shard_blocks, backward)


@pytest.mark.parametrize("env", [None, MESSAGES])
def test_losses_inside_of_a_unit(env: dict[str, str] | None) -> None:
    harness.run_ranks(from_inside, 2, env=env)


@on_ranks(2)
def test_named_where_weights_are_gone(rank: int, n_ranks: int) -> None:
    """As over messages: what is made of a gather is there while the unit is unsharded."""
    train(rank, n_ranks, "without memory", models.shard_blocks, each_apart)
    for kind in ("summands", "aliased"):
        with pytest.raises(RuntimeError, match="is sharded now|storage of size 0"):
            train(rank, n_ranks, kind, models.shard_blocks, each_apart)


@on_ranks(2)
@forgetting
def test_accumulation(rank: int, n_ranks: int) -> None:
    """Micro-batches without synchronisation, between which units stay unsharded or not."""
    for kind in KINDS:
        for stays in (False, True):
            side, plain = side_of(kind, models.shard_blocks), Judge(Net)
            side.model.set_reshard_after_backward(not stays)
            for step in range(6):
                is_last = step % 3 == 2
                side.model.set_requires_gradient_sync(is_last)
                output(side.model, data(rank, step), 1)
                for r in range(n_ranks):
                    output(plain.model, data(r, step), 1 / n_ranks)
                if is_last:
                    plain.check(side, CLOSE)
                    for optimizer in (side.optimizer, plain.optimizer):
                        optimizer.step()
                        optimizer.zero_grad()


@on_ranks(2)
@forgetting
def test_written_between_and_in_forwards(rank: int, n_ranks: int) -> None:
    """Writes to the whole parameter last until reshard; those to shards are gathered."""
    for kind in KINDS:
        side = side_of(kind, models.shard_blocks)
        block = side.model.blocks[0]
        x = data(rank)
        with torch.no_grad():
            first = side.model(x)
            block.unshard()
            block.up.weight.zero_()
            block.reshard()
            assert torch.equal(side.model(x), first)
            unwrapped(block.up.weight).mul_(2)
            second = side.model(x)
            assert not torch.equal(second, first)
            unwrapped(block.up.weight).div_(2)
            assert torch.equal(side.model(x), first)


@on_ranks(2)
@forgetting
def test_memory_is_given_back(rank: int, n_ranks: int) -> None:
    side = side_of("summands", models.shard_blocks)
    output(side.model, data(rank), 1)
    for param in side.model.blocks[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params:
        tensors = [*param.all_gather_outputs, *param._unsharded_inner_tensors]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        if param.inputs:
            assert len(tensors) == 3
            with pytest.raises(RuntimeError, match="is sharded now"):
                param.all_gather_outputs[0].sum()


@on_ranks(2)
@forgetting
def test_first_forward_in_inference_mode(rank: int, n_ranks: int) -> None:
    for kind in KINDS:
        side = side_of(kind, models.shard_root)
        with torch.inference_mode():
            side.model(data(rank))
        plain = Judge(Net)
        for r in range(n_ranks):
            output(plain.model, data(r), 1 / n_ranks)
        output(side.model, data(rank), 1)
        plain.check(side, CLOSE)


@on_ranks(2)
@forgetting
def test_shards_that_are_replaced_or_cast(rank: int, n_ranks: int) -> None:
    for kind in KINDS:
        side = train(rank, n_ranks, kind)
        state = {name: value.clone() for name, value in side.model.state_dict().items()}
        before = side.model(data(rank))
        side.model.load_state_dict(state, assign=True)
        assert torch.equal(side.model(data(rank)), before)
        side.model.to(torch.float64)
        after = side.model(data(rank).double())
        torch.testing.assert_close(after, before.double(), rtol=1e-5, atol=1e-5)
        assert_on_core(side.model)


@on_ranks(2, 3)
@forgetting
def test_loaded_then_frozen(rank: int, n_ranks: int) -> None:
    """Of three ranks the last is padded: torch replaces its shards of a wrapper at each load."""
    for kind in KINDS:
        side, plain = side_of(kind, models.shard_blocks), Judge(Net)
        side.model(data(rank))
        side.model.reshard()
        state = {name: value.clone() for name, value in side.model.state_dict().items()}
        for trained in (False, True):
            side.model.load_state_dict(state)
            for model in (side.model, plain.model):
                for name, parameter in model.named_parameters():
                    if name.startswith("blocks.0."):
                        parameter.requires_grad_(trained)
                model.zero_grad()
            for r in range(n_ranks):
                output(plain.model, data(r), 1 / n_ranks)
            output(side.model, data(rank), 1)
            plain.check(side, CLOSE)


@on_ranks(2)
@forgetting
def test_mixed_precision(rank: int, n_ranks: int) -> None:
    """The gradients of a plain model with the same policy, to the bit."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain = Side(
        "plain", fsdp_c, Net, lambda m, f: models.shard_blocks(m, f, mp_policy=policy), sgd
    )
    sides = [plain, side_of("without memory", models.shard_blocks, mp_policy=policy)]
    sides.append(side_of("summands", models.shard_blocks, mp_policy=policy))
    for side in sides:
        output(side.model, data(rank), 1)
    for name, shard in plain.shards.items():
        for side in sides[1:]:
            grad = side.shards[name].grad
            if shard.grad is None:
                assert grad is None
                continue
            assert type(grad._local_tensor) is Tensor
            assert torch.equal(grad._local_tensor, shard.grad._local_tensor), name


# ---- mistakes ----


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclasses.dataclass
class Fault:
    method: str
    step: int
    rank: int


@contextlib.contextmanager
def failing(fault: Fault, rank: int, step: int):
    """One rank's method fails in one step."""
    method = getattr(Summands, fault.method)

    @functools.wraps(method)  # its signature, too
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"the {fault.method} of rank {rank}")

    if (rank, step) == (fault.rank, fault.step):
        setattr(Summands, fault.method, fail)
    try:
        yield
    finally:
        setattr(Summands, fault.method, method)


def fail_on_one(rank: int, n_ranks: int, fault: Fault, goes_on: bool) -> None:
    """Prints what this rank gets to hear, and ends."""
    side = side_of("summands", models.shard_blocks)
    for step in range(4):
        with failing(fault, rank, step):
            text = raised_by(lambda step=step: output(side.model, data(rank, step), 1))
        if text and not (goes_on and text.startswith("ValueError")):
            print(text, flush=True)
            os._exit(7)
        side.optimizer.step()
        side.optimizer.zero_grad()


@pytest.mark.parametrize("env", [{}, MESSAGES])
@pytest.mark.parametrize("method", ["pre", "post"])
def test_a_method_that_fails_on_one_rank(env: dict[str, str], method: str) -> None:
    """The other one is told who left, or who went on."""
    for step, goes_on in ((0, False), (2, False), (2, True)):
        fault = Fault(f"fsdp_{method}_all_gather", step, 1)
        theirs, own = harness.run_ranks(fail_on_one, 2, fault, goes_on, env=env, fresh=True)
        assert theirs.exit_code == own.exit_code == 7, (theirs, own)
        assert re.search("rank 1|over those of rank", theirs.output, re.IGNORECASE), theirs
        assert goes_on or f"the {fault.method} of rank 1" in own.output, own


@on_ranks(2)
@forgetting
def test_inputs_that_change(rank: int, n_ranks: int) -> None:
    side = side_of("summands", models.shard_blocks)
    output(side.model, data(rank), 1)
    inner_shard = side.model.blocks[1].up.weight._local_tensor
    inner_shard.fsdp_pre_all_gather = lambda mesh: ((inner_shard.inner,), None)
    text = raised_by(lambda: side.model(data(rank)))
    assert "'blocks.1.up.weight' must return inputs of the same sizes and dtypes" in text
    inner_shard.fsdp_pre_all_gather = lambda mesh: ((inner_shard.inner.to("meta"),) * 2, None)
    text = raised_by(lambda: side.model(data(rank)))
    assert "'blocks.1.up.weight' returned a tensor on meta" in text
    del inner_shard.fsdp_pre_all_gather
    output(side.model, data(rank), 1)


class Again(Aliased):
    """Gives tensors of its own kind."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows, _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return [Wrapped(rows[0])], None


@on_ranks(2)
def test_inputs_around_other_tensors(rank: int, n_ranks: int) -> None:
    with mock.patch.dict(KINDS, again=Again):
        train(rank, n_ranks, "again")


@on_ranks(2)
@forgetting
def test_attached_late_or_gone(rank: int, n_ranks: int) -> None:
    side = side_of("without memory", models.shard_blocks)
    output(side.model, data(rank), 1)
    inner_shard = side.model.blocks[1].up.weight._local_tensor
    inner_shard.fsdp_pre_all_gather = lambda mesh: ((inner_shard.inner,), None)
    inner_shard.fsdp_post_all_gather = lambda *args, **kwargs: None
    text = raised_by(lambda: side.model(data(rank)))
    assert "'blocks.1.up.weight' has an all-gather extension now" in text
    del inner_shard.fsdp_pre_all_gather, inner_shard.fsdp_post_all_gather
    output(side.model, data(rank), 1)
