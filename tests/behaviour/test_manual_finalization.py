"""T: backwards that the caller ends, from torch 2.15."""

import gc
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import implementation
from models import data
from parity import EXACT, compare, on_ranks, total
from test_surface import kind_of

from behaviour.pairs import (
    CLOSE,
    agree,
    backward,
    chain,
    features,
    gradients,
    hsdp_mesh,
    linear,
    local,
    raised,
    registered,
    sharded,
    shards,
    sum_backward,
)
from behaviour.test_exceptions import fail_backward

pytestmark = pytest.mark.skipif(
    not features.manual_finalization, reason="this version of torch has none of it"
)


def by_hand(fsdp: Any, model: Any) -> Any:
    model.set_manual_backward_finalization(True)
    return model


def train(model: Any, rank: int, steps: int, *, sync: bool = True, n: int = 0) -> None:
    """Backwards without an end; without `sync` all but the last only accumulate."""
    for step in range(steps):
        model.set_requires_gradient_sync(sync or step == steps - 1)
        backward(model, data(rank, step, *((2, n) if n else ())))


@on_ranks(2)
def test_t6_when_the_mode_may_change(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        change = model.set_manual_backward_finalization
        out = model(data(rank))
        seen = [raised(lambda: model.blocks[0].set_manual_backward_finalization(True), "the root")]
        out.register_hook(
            lambda _: seen.append(raised(lambda: change(True), "cannot change mode during")) or None
        )
        total(out).backward()
        model.set_is_last_backward(False)
        backward(model, data(rank))
        seen.append(raised(lambda: change(True), "cannot change mode after backward starts"))
        change(False)
        model.set_is_last_backward(True)
        backward(model, data(rank))
        change(True)
        backward(model, data(rank))
        seen.append(raised(lambda: change(False), "cannot change mode after backward starts"))
        change(True)
        model.finalize_backward()
        change(False)
        return seen

    assert agree(see) == ["RuntimeError"] * 4


@on_ranks(2)
def test_t7_t26_what_is_left_to_finalize(rank: int, n_ranks: int) -> None:
    """Units whose inputs need a gradient are reduced in backward, the others by finalize."""

    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, chain(fsdp))
        parameters = shards(model)
        seen = []
        for needs_grad in (False, True):
            backward(model, data(rank, 0, 2, 4).requires_grad_(needs_grad))
            seen.append((gradients(parameters), registered(model)))
            assert model.finalize_backward() is None
            seen.append((gradients(parameters), registered(model)))
            for parameter in parameters.values():
                parameter.grad = None
        return seen

    (left, states), (after, end), (through, _), (same, _) = agree(see)
    assert left["0.weight"] is None and left["1.weight"] is not None
    assert states == ["nothing", "unsharded", "sharded"] and None not in after.values()
    assert end == ["nothing", "sharded", "sharded"]
    compare(through, same, EXACT, "gradients")


@on_ranks(2)
def test_t8_t30_handles(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, sharded(fsdp))
        parameters = shards(model)
        backward(model, data(rank))
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, fsdp.GradientReductionHandle)
        waiting = "must be waited on"
        seen = [
            raised(lambda: model(data(rank)), waiting, "before forward"),
            raised(lambda: model.blocks[0](data(rank)), waiting),
            raised(model.finalize_backward, waiting),
        ]
        with torch.no_grad():
            seen.append(raised(lambda: model(data(rank)), waiting))
        model.unshard()
        model.reshard()
        assert set(model.state_dict()) == {*parameters, "offset"}
        handle.wait()
        handle.wait()
        backward(model, data(rank, 1))
        model.finalize_backward(async_op=True)  # the handle is lost
        seen += [raised(lambda: model(data(rank)), waiting), raised(model.finalize_backward)]
        model.reset_iter_state()
        dropped = gradients(parameters)
        backward(model, data(rank))
        model.finalize_backward(async_op=True).wait()
        return seen, set(dropped.values()), gradients(parameters)

    seen, dropped, grads = agree(see)
    assert seen == ["RuntimeError"] * 6 and dropped == {None} and None not in grads.values()


@on_ranks(2)
def test_t8_a_reset_invalidates_the_handle(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, sharded(fsdp))
        early = model.finalize_backward(async_op=True)  # before the first forward: nothing to do
        early.wait()
        assert model.finalize_backward() is None
        backward(model, data(rank))
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        return type(early).__name__, raised(handle.wait, "was invalidated")

    assert agree(see)[1] == "RuntimeError"


@on_ranks(2)
def test_t30_roots_that_share_a_context(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        first, second = (by_hand(fsdp, chain(fsdp)) for _ in range(2))
        for model in (first, second):
            model(data(rank, 0, 2, 4))
        fsdp.share_comm_ctx([first, second])
        backward(first, data(rank, 0, 2, 4))
        handle = first.finalize_backward(async_op=True)
        seen = [
            raised(lambda: second(data(rank, 0, 2, 4)), "must be waited on before forward"),
            raised(second.reset_iter_state, "owned by another FSDP root"),
            raised(second.finalize_backward, "sharing this communication context"),
        ]
        handle.wait()
        backward(second, data(rank, 0, 2, 4))
        second.finalize_backward()
        return seen, gradients(shards(second))

    seen, grads = agree(see)
    assert seen == ["RuntimeError"] * 3 and None not in grads.values()


@on_ranks(2)
def test_t9_a_child_is_told_at_the_first_forward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        model[0].set_manual_backward_finalization(True)
        text = "must be called on the root FSDP module"
        kinds = [raised(lambda: model(data(rank, 0, 2, 4)), text)]
        if fsdp is not torch_fsdp:  # torch's state stays as if in forward
            kinds.append(raised(lambda: model(data(rank, 0, 2, 4)), text))
        return kinds[-1]

    assert agree(see) == "RuntimeError"


@on_ranks(2)
def test_t27_t29_sums_are_those_of_automatic_ends(rank: int, n_ranks: int) -> None:
    """Whether micro-batches are reduced each or at the end, and however often one finalizes."""

    def see(fsdp: Any, manual: bool = True) -> Any:
        seen = []
        for sync in (True, False):
            model = sharded(fsdp)
            parameters = shards(model)
            if manual:
                by_hand(fsdp, model)
            train(model, rank, 3, sync=sync)  # the first two ends are forgotten
            for _ in range(2 * manual):
                model.finalize_backward()
            seen.append(gradients(parameters))
            assert registered(model) == ["sharded"] * 4
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads = agree(see)
    compare(grads, see(implementation(), manual=False), CLOSE, "gradients")


@on_ranks(2)
def test_t28_when_finalize_is_refused(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        out = model(data(rank))
        seen = [raised(model.finalize_backward, "requires manual backward finalization")]
        seen.append(raised(model.blocks[1].finalize_backward, "on the root FSDP module"))
        by_hand(fsdp, model)
        out.register_hook(
            lambda _: (
                seen.append(raised(model.finalize_backward, "after backward completes")) or None
            )
        )
        model.blocks[1].register_full_backward_hook(
            lambda *_: seen.append(raised(model.finalize_backward, "after backward completes"))
        )
        total(out).backward()
        model.finalize_backward()
        backward(model, data(rank))
        return seen

    seen = agree(see)
    assert seen[:2] == ["RuntimeError"] * 2 and seen[-1] == "RuntimeError"


@on_ranks(2)
def test_t28_replicas_need_all_reduce(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, linear(fsdp, mesh=hsdp_mesh()))
        parameters = shards(model)
        x = torch.full((1, 4), rank + 1.0)
        sum_backward(model, x)
        model.set_requires_all_reduce(False)
        seen = raised(model.finalize_backward, "set_requires_all_reduce(True) before finalization")
        model.set_requires_all_reduce(True)
        model.finalize_backward()
        return seen, gradients(parameters)

    seen, grads = agree(see)
    assert seen == "RuntimeError" and grads["weight"][0].tolist() == [1.5] * 4


@on_ranks(2)
def test_t31_failed_backwards(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, sharded(fsdp))
        parameters = shards(model)
        backward(model, data(rank))
        model.finalize_backward()
        failed = fail_backward(model, data(rank))
        seen = [
            raised(model.finalize_backward, "after backward completes"),
            raised(lambda: model.set_manual_backward_finalization(False), "cannot change mode"),
        ]
        model.reset_iter_state()
        model.set_manual_backward_finalization(False)
        backward(model, data(rank, 1))
        return failed, seen, gradients(parameters)

    failed, seen, grads = agree(see)
    assert failed and seen == ["RuntimeError"] * 2 and None not in grads.values()


@on_ranks(2)
def test_t35_reset_drops_everything(rank: int, n_ranks: int) -> None:
    """Reduced gradients, held ones, sums that replicas have not seen, and the mode in progress."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp, mesh=hsdp_mesh())
        parameters = shards(model)
        by_hand(fsdp, model)
        x = torch.full((1, 4), rank + 1.0)
        seen = []
        for setting in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            sum_backward(model, x.clone().requires_grad_())
            getattr(model, setting)(False)
            sum_backward(model, x.clone().requires_grad_())
            getattr(model, setting)(True)
            model.reset_iter_state()
            (fsdp_param,) = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params
            seen.append((parameters["weight"].grad, fsdp_param.unsharded_accumulated_grad))
            sum_backward(model, x)
            model.finalize_backward()
            seen.append(gradients(parameters))
        model.set_manual_backward_finalization(False)
        return seen

    first, grads, second, again = agree(see)
    assert first == second == (None, None)
    assert grads["weight"][0].tolist() == again["weight"][0].tolist() == [1.5] * 4


@on_ranks(2)
def test_t83_sums_of_replicas_are_finalized(rank: int, n_ranks: int) -> None:
    """Torch refuses for good once a backward without all-reduce has left a sum."""
    model = by_hand(implementation(), linear(implementation(), mesh=hsdp_mesh()))
    parameters = shards(model)
    x = torch.full((1, 4), rank + 1.0).requires_grad_()
    model.set_requires_all_reduce(False)
    sum_backward(model, x)
    strictly = mock.patch.dict(os.environ, FSDP_C_STRICT="1")
    with strictly, pytest.raises(RuntimeError, match="partial gradient reductions"):
        model.finalize_backward()
    model.finalize_backward()
    assert parameters["weight"].grad is None
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert local(parameters["weight"].grad)[0].tolist() == [1.5] * 4
    model.finalize_backward()
    assert local(parameters["weight"].grad)[0].tolist() == [1.5] * 4


@on_ranks(2)
def test_t84_a_forgotten_end_is_told_once(rank: int, n_ranks: int) -> None:
    model = by_hand(implementation(), chain(implementation()))
    told = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(model, data(rank, step, 2, 4))
        told.append([str(item.message) for item in caught])
    assert [len(texts) for texts in told] == [0, 1, 0]
    assert "finalize_backward()" in told[1][0]
    # Held on purpose, and ended in time: nothing to tell.
    model = by_hand(implementation(), chain(implementation()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            train(model, rank, 2, sync=False, n=4)
            model.finalize_backward()


@on_ranks(2)
def test_t85_an_end_between_forward_and_backward(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = by_hand(fsdp, sharded(fsdp))
        parameters = shards(model)
        loss = total(model(data(rank)))
        model.finalize_backward()
        loss.backward()
        model.finalize_backward()
        return gradients(parameters), registered(model)

    grads, states = agree(see)
    assert None not in grads.values() and states == ["sharded"] * 4


@on_ranks(2)
def test_t61_the_callback_called_by_hand(rank: int, n_ranks: int) -> None:
    """As pipelines of earlier versions do: torch 2.15 asserts that a backward went before it."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        backward(model, data(rank, 0, 2, 4))
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        state = model._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()
        return gradients(parameters)

    assert None not in agree(see).values()
    model = chain(implementation())
    model(data(rank, 0, 2, 4))
    model._get_fsdp_state()._root_post_backward_final_callback()


def test_t8_handles_that_die_with_their_model() -> None:
    """Other models of the process run on."""
    from harness import run_ranks

    run_ranks(lose_a_model, 2)


def lose_a_model(rank: int, n_ranks: int) -> None:
    model = by_hand(implementation(), chain(implementation()))
    backward(model, data(rank, 0, 2, 4))
    model.finalize_backward(async_op=True)
    other = chain(implementation())
    assert kind_of(lambda: other(data(rank, 0, 2, 4))) == ""
    del model
    gc.collect()
    backward(other, data(rank, 0, 2, 4))
