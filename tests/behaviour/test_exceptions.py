"""X: exceptions in a step, reset_iter_state, and contexts shared by several roots."""

from typing import Any

import torch
from models import Branches, data
from parity import on_ranks, total
from torch import Tensor, nn

from behaviour.pairs import (
    agree,
    backward,
    chain,
    features,
    gradients,
    raised,
    registered,
    sharded,
    shards,
)


def fail_once(unit: nn.Module) -> None:
    """The unit's next forward raises after its parameters were gathered."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        raise ValueError("on purpose")

    handle = unit.up.register_forward_hook(hook)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


def fail_backward(model: nn.Module, x: Tensor) -> bool:
    """A backward that fails between the second and the first block, or because a peer's did."""
    handle = model.blocks[0].register_forward_hook(
        lambda module, args, output: FailsInBackward.apply(output)
    )
    try:
        return raised(lambda: backward(model, x)) != "nothing"
    finally:
        handle.remove()


@on_ranks(2)
def test_x1_gradients_are_right_after_a_failed_forward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        backward(model, data(rank))
        fail_once(model.blocks[1])
        kind = raised(lambda: model(data(rank)), "on purpose")
        for parameter in parameters.values():
            parameter.grad = None
        backward(model, data(rank, 1))
        return kind, gradients(parameters)

    kind, grads = agree(see)
    assert kind == "ValueError" and None not in grads.values()


@on_ranks(2)
def test_x1_units_unsharded_by_hand_stay_so(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp, Branches)
        parameters = shards(model)
        backward(model, data(rank))
        for parameter in parameters.values():
            parameter.grad = None
        model.blocks[2].unshard()
        with torch.no_grad():
            model.blocks[2].up.bias.fill_(3.0)  # lasts until the unit is resharded
        fail_once(model.blocks[1])
        kind = raised(lambda: model(data(rank)), "on purpose")
        output = model(data(rank, 1), use=(0, 1))
        kept = registered(model)[-1], model.blocks[2].up.bias.max().item()
        total(output).backward()
        return kind, *kept, gradients(parameters)

    kind, state, value, grads = agree(see)
    assert (kind, state, value) == ("ValueError", "unsharded", 3.0)
    assert grads["blocks.2.up.weight"] is None and grads["blocks.1.up.weight"] is not None


@on_ranks(2)
def test_x3_callbacks_of_a_failed_backward_do_not_run(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        backward(model, data(rank))
        for parameter in parameters.values():
            parameter.grad = None
        failed = fail_backward(model, data(rank))
        return failed, parameters["stem.weight"].grad

    # The root's own parameters are reduced by the final callback.
    assert agree(see) == (True, None)


@on_ranks(2)
def test_x4_reset_after_a_failed_backward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        backward(model, data(rank))
        failed = fail_backward(model, data(rank))
        model.reset_iter_state()
        after = registered(model)
        states = [unit._get_fsdp_state()._training_state.name for unit in (model, *model.blocks)]
        for parameter in parameters.values():
            parameter.grad = None
        backward(model, data(rank, 1))
        # Torch keeps what the failed backward left on the root's own unsharded parameters.
        kept = {name: p for name, p in parameters.items() if name.startswith("blocks")}
        return failed, after, states, gradients(kept)

    failed, after, states, grads = agree(see)
    assert failed and after == ["sharded"] * 4 and states == ["IDLE"] * 4
    assert None not in grads.values()


@on_ranks(2)
def test_x7_gradients_of_earlier_backwards_and_reset(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        parameters = shards(model)
        backward(model, data(rank))
        model.reset_iter_state()
        return gradients(parameters)

    kept = agree(see)["stem.weight"] is not None
    assert kept != features.grad_dtype


@on_ranks(2)
def test_x8_share_comm_ctx_takes_the_listed_units(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        first, second = chain(fsdp), chain(fsdp)
        parameters = {**shards(first), **{f"b.{k}": p for k, p in shards(second).items()}}
        for model in (first, second):
            backward(model, torch.ones(2, 4))
        fsdp.share_comm_ctx([])
        kind = raised(lambda: fsdp.share_comm_ctx([first, nn.Linear(1, 1)]), "FSDPModule")
        fsdp.share_comm_ctx([first, second])
        contexts = [module._get_fsdp_state()._comm_ctx for module in (first, second, second[0])]
        for model in (second, first):
            total(model(torch.ones(2, 4))).backward()
        same = [context is contexts[0] for context in contexts]
        return kind, same, gradients(parameters)

    kind, same, _ = agree(see)
    assert kind == "ValueError" and same == [True, True, False]
