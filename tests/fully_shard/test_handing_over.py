"""What stays as it was when a model is handed over to torch's own objects."""

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from models import Net, data
from parity import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import fsdp_c

IS_TORCHS = harness.implementation() is torch_fsdp
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


class Box:
    """Torch finds no tensor in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def sides(**options: Any) -> Iterator[Any]:
    """Torch's model and ours, alike."""
    for fsdp in (torch_fsdp, harness.implementation()):
        harness.seed_everything(1)
        model = Net()
        models.shard_blocks(model, fsdp, **options)
        yield model


def step(model: Any, index: int, rank: int, hands_over: bool = False) -> Any:
    model.zero_grad()
    with models.function_replaced() if hands_over else contextlib.nullcontext():
        out = model(data(rank, index))
    out = getattr(out, "tensor", out)
    out.square().sum().backward()
    return out


def after_handing_over(**options: Any) -> Any:
    """A model that a forward on the core preceded; None where torch itself is tested."""
    if IS_TORCHS:
        return None
    *_, model = sides(**options)
    step(model, 0, 0)
    step(model, 1, 0, hands_over=True)
    assert models.is_torchs(model)
    model.zero_grad()
    return model


@on_ranks(1, 2)
def test_hooks_of_users_stay_behind_fsdps(rank: int, n_ranks: int) -> None:
    """One that hides the output would take FSDP's hook the tensors that lead to backward."""
    for model in sides():
        model.register_forward_hook(lambda module, args, out: Box(out))
        for index in range(3):
            step(model, index, rank, hands_over=index == 1)
            assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(1, 2)
def test_hooks_of_users_see_what_they_saw(rank: int, n_ranks: int) -> None:
    seen: list[list[tuple[Any, ...]]] = []
    for model in sides(mp_policy=BF16):
        seen.append([])
        block, notes = model.blocks[0], seen[-1]
        block.register_forward_hook(lambda module, args, out, to=notes: to.append((out.dtype,)))
        for prepend in (True, False):
            block.register_forward_pre_hook(
                lambda module, args, to=notes: to.append((args[0].dtype, type(module.up.weight))),
                prepend=prepend,
            )
        for index in range(3):
            step(model, index, rank, hands_over=index == 1)
    assert seen[0] == seen[1]
    assert seen[1][:3] == seen[1][3:6] == seen[1][6:]


@on_ranks(1, 2)
def test_hooks_of_unsharded_parameters_are_called(rank: int, n_ranks: int) -> None:
    for model in sides():
        calls: list[str] = []
        model.unshard()
        model.blocks[0].unshard()
        model.blocks[0].up.weight.register_hook(lambda grad, to=calls: to.append("hook"))
        model.stem.weight.register_post_accumulate_grad_hook(lambda p, to=calls: to.append("post"))
        for index in range(3):
            step(model, index, rank, hands_over=index == 1)
        assert sorted(calls) == 3 * ["hook"] + 3 * ["post"]


@on_ranks(1, 2)
def test_written_parameters_keep_their_values(rank: int, n_ranks: int) -> None:
    outs = []
    for model in sides(reshard_after_forward=False):
        step(model, 0, rank)
        with torch.no_grad():
            model(data(rank, 1))
            model.blocks[0].up.weight.mul_(1.5)
            with models.function_replaced():
                outs.append(model(data(rank, 1)))
        model.reshard()
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@on_ranks(1, 2)
def test_parameters_unsharded_by_hand_keep_their_values(rank: int, n_ranks: int) -> None:
    """Before the first forward, and other units are not unsharded."""
    outs = []
    for model in sides():
        model.blocks[1].unshard()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
            with models.function_replaced():
                outs.append(model(data(rank, 1)))
        outs.append(step(model, 2, rank))
    for ours, theirs in zip(outs[:2], outs[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@on_ranks(1, 2)
def test_in_inference_mode(rank: int, n_ranks: int) -> None:
    for model in sides():
        step(model, 0, rank)
        model.reshard()
        with torch.inference_mode(), models.function_replaced():
            model(data(rank, 1))
        model.reshard()
        step(model, 2, rank)


@on_ranks(2)
def test_a_shard_that_was_replaced_counts(rank: int, n_ranks: int) -> None:
    outs = []
    for hands_over in (False, True):
        *_, model = sides()
        if IS_TORCHS:
            return
        step(model, 0, rank)
        model.reshard()
        weight = model.blocks[0].up.weight
        ones = distribute_tensor(torch.ones(weight.shape), weight.device_mesh, weight.placements)
        model.blocks[0].up.weight = nn.Parameter(ones)
        outs.append(step(model, 1, rank, hands_over).detach())
        model.reshard()
        assert model.blocks[0].up.weight.to_local().mean() == 1
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@on_ranks(2)
def test_a_divide_factor_over_gloo_is_kept(rank: int, n_ranks: int) -> None:
    """Torch's own refuses it in backward, over gloo."""
    grads = []
    for hands_over in (False, True):
        *_, model = sides()
        if IS_TORCHS:
            return
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(4.0)
        step(model, 0, rank)
        step(model, 1, rank, hands_over)
        step(model, 2, rank)
        model.reshard()
        grads.append([parameter.grad.to_local() for parameter in model.parameters()])
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second)


@on_ranks(2)
def test_a_shared_context_stays_shared(rank: int, n_ranks: int) -> None:
    found = []
    for fsdp in (torch_fsdp, harness.implementation()):
        first, second = Net(), Net()
        for model in (first, second):
            models.shard_blocks(model, fsdp)
        torch_fsdp.share_comm_ctx([first, second])
        for hands_over in (False, True):
            for model in (first, second):
                step(model, 0, rank, hands_over)
        contexts = [model._get_fsdp_state()._comm_ctx for model in (first, second)]
        groups = [model._get_fsdp_state()._fsdp_param_group for model in (first, second)]
        found.append((contexts[0] is contexts[1], groups[0].comm_ctx is groups[1].comm_ctx))
    assert found == 2 * [(True, True)]


@pytest.mark.skipif(
    not hasattr(torch_fsdp.FSDPModule, "set_manual_backward_finalization"), reason="torch 2.15"
)
@on_ranks(2)
def test_backward_that_is_finalized_by_hand(rank: int, n_ranks: int) -> None:
    for model in sides():
        model.set_manual_backward_finalization(True)
        for index in range(3):
            step(model, index, rank, hands_over=index == 1)
            model.finalize_backward()
        assert model.stem.weight.grad is not None


@pytest.mark.skipif(
    not hasattr(torch_fsdp.FSDPModule, "set_manual_backward_finalization"), reason="torch 2.15"
)
@on_ranks(2)
def test_set_on_the_root_before_a_first_forward_that_failed(rank: int, n_ranks: int) -> None:
    for fsdp in (torch_fsdp, harness.implementation()):
        with torch.device("meta"):
            model = Net()
        models.shard_blocks(model, fsdp)
        model.set_manual_backward_finalization(True)
        with pytest.raises(RuntimeError):
            model(data(rank))
        if fsdp is torch_fsdp:
            continue  # its own is spoilt by that
        model.to_empty(device="cpu")
        for parameter in (*model.parameters(), *model.buffers()):
            nn.init.constant_(parameter, 0.5)
        step(model, 1, rank)
        model.finalize_backward()
        assert model.stem.weight.grad is not None


# ---- what is refused, with the reason ----


@on_ranks(1, 2)
def test_a_replaced_method_of_a_unit_is_refused(rank: int, n_ranks: int) -> None:
    if IS_TORCHS:
        return
    *_, model = sides()
    step(model, 0, rank)
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    group.post_backward = lambda *args, old=group.post_backward: old(*args)
    with pytest.raises(NotImplementedError, match=r"post_backward of FSDP unit 'blocks.0'.*torch"):
        step(model, 1, rank, hands_over=True)
    del group.post_backward
    step(model, 2, rank)
    assert not models.is_torchs(model)


class OfTwoTypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


@on_ranks(2)
def test_types_that_torch_refuses(rank: int, n_ranks: int) -> None:
    if IS_TORCHS:
        return
    model = OfTwoTypes()
    fsdp_c.fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    model.blocks.double()
    with torch.no_grad():
        model(data(rank))
        with (
            models.function_replaced(),
            pytest.raises(AssertionError, match="FSDP unit '.*' is to be.*replaced.*uniform"),
        ):
            model(data(rank))


@on_ranks(1, 2)
def test_what_works_on_the_core_alone_says_why_not(rank: int, n_ranks: int) -> None:
    model = after_handing_over()
    if model is None:
        return
    for function in (
        fsdp_c.clone,
        fsdp_c.offload,
        lambda model: fsdp_c.memory_plan(model, optimizer="SGD"),
    ):
        with pytest.raises(NotImplementedError, match=r"torch's implementation runs.*replaced"):
            function(model)


@on_ranks(1, 2)
def test_units_that_were_handed_over_take_no_settings(rank: int, n_ranks: int) -> None:
    if IS_TORCHS:
        return
    *_, model = sides()
    step(model, 0, rank)
    old = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    step(model, 1, rank, hands_over=True)
    with pytest.raises(RuntimeError, match=r"'blocks.0' was handed over.*ask its module"):
        old.reduce_grads = False
    model.blocks[0]._get_fsdp_state()._fsdp_param_group.reduce_grads = False


@on_ranks(2)
def test_names_of_units_after_a_first_forward_that_failed(rank: int, n_ranks: int) -> None:
    if IS_TORCHS:
        return
    *_, model = sides(offload_policy=CPUOffloadPolicy(pin_memory=False))
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    group.post_backward = lambda *args, old=group.post_backward: old(*args)
    with pytest.raises(NotImplementedError):
        step(model, 0, rank, hands_over=True)
    del group.post_backward
    step(model, 1, rank, hands_over=True)
    names = [module._get_fsdp_state()._fsdp_param_group._module_fqn for module in model.blocks]
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
