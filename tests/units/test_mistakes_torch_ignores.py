"""Mistakes that torch passes over in silence, or answers oddly, and that fsdp_c names.

Each body runs under fsdp_c and, expected to fail, under torch: a torch that does better is noticed.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, failure_of, run_ranks
from parity import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_c


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def sharded(fsdp: Any, n_ranks: int, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Net()
    fsdp.fully_shard(model.up, mesh=cached_mesh((n_ranks,)), **options)
    return fsdp.fully_shard(model, mesh=cached_mesh((n_ranks,)), **options)


def train(model: Any, optimizer: Any = None) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


def i37_optimizer_of_the_originals(fsdp: Any, rank: int, n_ranks: int) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp.fully_shard(model, mesh=cached_mesh((n_ranks,)))
    with pytest.raises(RuntimeError, match=r"AdamW holds parameter 'weight'.*after fully_shard"):
        train(model, optimizer)
    # What accelerate does: the optimizer is given the shards.
    model.zero_grad()
    for group in optimizer.param_groups:
        group["params"] = list(model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    before = full(model.up.weight)
    train(model, optimizer)
    assert not torch.equal(full(model.up.weight), before)


def i37_optimizer_of_unsharded_parameters(fsdp: Any, rank: int, n_ranks: int) -> None:
    model = sharded(fsdp, n_ranks)
    model(torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"'down\.weight'.*unsharded copy"):
        train(model, optimizer)


def y13_optimizer_of_shards_that_were_replaced(fsdp: Any, rank: int, n_ranks: int) -> None:
    model = sharded(fsdp, n_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    optimizer.zero_grad()
    model.load_state_dict(
        {k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True
    )
    with pytest.raises(RuntimeError, match=r"SGD holds parameter 'up\.weight'.*assign=True"):
        train(model, optimizer)


def y14_assignment_of_another_layout(fsdp: Any, rank: int, n_ranks: int) -> None:
    for make in (
        lambda p: torch.zeros(p.shape),
        lambda p: distribute_tensor(torch.zeros(p.shape), p.device_mesh, [Replicate()]),
    ):
        model = sharded(fsdp, n_ranks)
        state = model.state_dict()
        state["up.weight"] = make(model.up.weight)
        with pytest.raises(ValueError, match=r"'(up\.)?weight' was replaced by a.*Shard\(dim=0\)"):
            model.load_state_dict(state, assign=True)
    model = sharded(fsdp, n_ranks)
    nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(ValueError, match=r"'weight' .*is no parameter of its .*Lin"):
        train(model)
    model = sharded(fsdp, n_ranks)
    train(model)
    model.up.weight = None
    with pytest.raises(
        ValueError, match=r"'up\.weight' .* any more: it was deleted or set to None"
    ):
        train(model)


def y14_assignment_between_forward_and_backward(fsdp: Any, rank: int, n_ranks: int) -> None:
    """The graph is of what was there before; what was assigned stays."""
    model = sharded(fsdp, n_ranks)
    train(model)
    loss = model(torch.ones(2, 4)).square().sum()
    zeros = {name: torch.zeros_like(shard) for name, shard in model.state_dict().items()}
    model.load_state_dict(zeros, assign=True)
    with pytest.raises(RuntimeError, match=r"parameters were replaced.*call forward again"):
        loss.backward()
    assert not model(torch.ones(2, 4)).any()


def y16_shards_replaced_between_steps(fsdp: Any, rank: int, n_ranks: int) -> None:
    """They count."""
    model = sharded(fsdp, n_ranks)
    train(model)
    model.reshard()
    spec = model.up.weight
    zeros = distribute_tensor(torch.zeros(6, 4), spec.device_mesh, [Shard(0)])
    model.up.weight = nn.Parameter(zeros)
    output = model(torch.ones(2, 4))
    model.reshard()
    expected = torch.tanh(full(model.up.bias)) @ full(model.down.weight).t() + full(model.down.bias)
    torch.testing.assert_close(output, expected.expand(2, 4))
    model.up.weight._local_tensor = torch.ones_like(model.up.weight._local_tensor)
    again = model(torch.ones(2, 4))
    assert not torch.equal(again, output)
    model.reshard()
    assert torch.equal(full(model.up.weight), torch.ones(6, 4))


def y26_share_memory(fsdp: Any, rank: int, n_ranks: int) -> None:
    model = sharded(fsdp, n_ranks)
    for module in (model, nn.Sequential(model)):
        with pytest.raises(RuntimeError, match="share_memory"):
            module.share_memory()
    train(model)


def i29_shallow_copy(fsdp: Any, rank: int, n_ranks: int) -> None:
    model = sharded(fsdp, n_ranks)
    with pytest.raises(TypeError, match=r"FSDPNet does not support copy\.copy"):
        copy.copy(model)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)


def i21_buffers_after_to_empty(fsdp: Any, rank: int, n_ranks: int) -> None:
    for write in (False, True):
        with torch.device("meta"):
            model = Net()
        fsdp.fully_shard(model, mesh=cached_mesh((n_ranks,)))
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.ones_(param)
        if write:
            model.scale.fill_(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model)
            train(model)
        texts = [str(item.message) for item in caught if "to_empty" in str(item.message)]
        assert len(texts) == (not write) and all("scale" in text for text in texts)


def m27_set_below_the_root_before_the_first_forward(fsdp: Any, rank: int, n_ranks: int) -> None:
    model = sharded(fsdp, n_ranks)
    model.up.set_is_last_backward(False)
    train(model)
    context = model._get_fsdp_state()._state_ctx
    assert context is model.up._get_fsdp_state()._state_ctx and not context.is_last_backward


def df28_equal_mesh_infos_are_one(fsdp: Any, rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((n_ranks,))
    model = Net()
    fsdp.fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: (
            ShardPlacementResult(None, FSDPMeshInfo(mesh, 0)) if p.ndim > 1 else None
        ),
    )
    train(model)
    assert len(model._get_fsdp_state()._fsdp_param_groups) == 1


def df28_replicated_info_for_a_parameter(fsdp: Any, rank: int, n_ranks: int) -> None:
    info = DDPMeshInfo(cached_mesh((n_ranks,)), replicate_mesh_dim=0)
    with pytest.raises(ValueError, match=r"not a DDPMeshInfo.*\(6, 4\)"):
        sharded(fsdp, n_ranks, shard_placement_fn=lambda p: ShardPlacementResult(None, info))


def df28_meshes_that_overlap(fsdp: Any, rank: int, n_ranks: int) -> None:
    named = cached_mesh((n_ranks,), ("tp",))
    for mesh in (named, cached_mesh((n_ranks,))):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="'weight' is a DTensor on .* need dim names"):
            fsdp.fully_shard(model, mesh=named)


def spmd(whole: Any) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(model.weight.detach(), whole, [Replicate()] * whole.ndim)
    model.weight = nn.Parameter(weight)
    return model


def df28_dims_that_are_no_neighbours(fsdp: Any, rank: int, n_ranks: int) -> None:
    whole = cached_mesh((n_ranks, 1, 1), ("dp", "tp", "cp"))
    dims = fsdp.DataParallelMeshDims(shard=("dp", "cp"))
    with pytest.raises(ValueError, match="must be neighbours"):
        fsdp.fully_shard(spmd(whole), mesh=whole, dp_mesh_dims=dims)


def df28_equal_mesh_made_again(fsdp: Any, rank: int, n_ranks: int) -> None:
    names = ("dp", "tp")
    first, second = (init_device_mesh("cpu", (n_ranks, 1), mesh_dim_names=names) for _ in "ab")
    assert first is not second
    model = spmd(first)
    fsdp.fully_shard(model, mesh=second, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    inputs = distribute_tensor(torch.ones(2, 4), second, [Replicate()] * 2)
    model(inputs).sum().backward()
    assert full(model.weight.grad).shape == (4, 4)


def split_backward(model: Any, x: Tensor) -> None:
    """As schedules of torch.distributed.pipelining do that delay the gradients of weights."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    output = model(x)
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()


def pp7_split_backward_of_resharded_units(fsdp: Any, rank: int, n_ranks: int) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    model = sharded(fsdp, n_ranks)
    with pytest.warns(UserWarning, match=r"unit 'up', but none of its parameters"):
        split_backward(model, x)
    model = sharded(fsdp, n_ranks, reshard_after_forward=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_backward(model, x)
    torch.manual_seed(1)
    plain = Net()
    plain(x).sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), param.grad, msg=name)


BODIES = [
    pp7_split_backward_of_resharded_units,
    df28_equal_mesh_infos_are_one,
    df28_replicated_info_for_a_parameter,
    df28_meshes_that_overlap,
    df28_dims_that_are_no_neighbours,
    df28_equal_mesh_made_again,
    i37_optimizer_of_the_originals,
    i37_optimizer_of_unsharded_parameters,
    y13_optimizer_of_shards_that_were_replaced,
    y14_assignment_of_another_layout,
    y14_assignment_between_forward_and_backward,
    y16_shards_replaced_between_steps,
    y26_share_memory,
    i29_shallow_copy,
    i21_buffers_after_to_empty,
    m27_set_below_the_root_before_the_first_forward,
]


def run_ours(rank: int, n_ranks: int, name: str) -> str:
    return failure_of(globals()[name], fsdp_c, rank, n_ranks)


def run_torch(rank: int, n_ranks: int) -> dict[str, str]:
    return {
        body.__name__: failure_of(body, torch_fsdp, rank, n_ranks)
        for body in BODIES
        if body is not y26_share_memory  # ends the process
    }


@pytest.mark.parametrize("name", [body.__name__ for body in BODIES])
def test_is_named(name: str) -> None:
    errors = run_ranks(run_ours, 2, name)
    assert not any(errors), "\n".join(errors)


def test_torch_does_not() -> None:
    for outcome in run_ranks(run_torch, 2, fresh=True):
        assert outcome.ok, outcome
        assert [name for name, error in outcome.value.items() if not error] == []
