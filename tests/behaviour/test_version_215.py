"""T: what torch 2.15 adds: backwards ended by hand, gradient dtypes, sums between replicas."""

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import implementation
from models import data
from parity import EXACT, Tolerance, compare, on_ranks, total
from test_surface import kind_of
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate

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
    ranges,
    registered,
    sharded,
    shards,
    weights,
)
from behaviour.test_exceptions import fail_backward
from behaviour.test_extensions import Extension

pytestmark = pytest.mark.skipif(
    not features.manual_finalization, reason="this version of torch has none of it"
)


def by_hand(fsdp: Any, model: Any) -> Any:
    model.set_manual_backward_finalization(True)
    return model


class Either(nn.Module):
    """One unit with two parameters, of which each call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, names: str) -> Tensor:
        return sum(getattr(self, name) * x for name in names)


def sum_backward(model: Any, *args: Any) -> None:
    model(*args).sum().backward()


def train(model: Any, rank: int, steps: int, *, sync: bool = True, n: int = 0) -> None:
    """Backwards without an end; without `sync` all but the last only accumulate."""
    for step in range(steps):
        model.set_requires_gradient_sync(sync or step == steps - 1)
        backward(model, data(rank, step, *((2, n) if n else ())))


# --- set_manual_backward_finalization and finalize_backward ---


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


# --- sums between replicas ---


@on_ranks(2)
def test_t45_t46_sums_of_changing_parameters(rank: int, n_ranks: int) -> None:
    """What earlier backwards left is reduced by the next with all-reduce, whatever that uses."""

    def see(fsdp: Any) -> Any:
        seen = []
        for order in (("a", "b"), ("ab", "a"), ("a", "ab"), ("b", "a", "a")):
            model = fsdp.fully_shard(Either(), mesh=hsdp_mesh())
            parameters = shards(model)
            for step, names in enumerate(order):
                model.set_requires_all_reduce(step == len(order) - 1)
                x = torch.full((4,), 2.0**step * (rank + 1))
                sum_backward(model, x, names)
            seen.append(gradients(parameters))
        return seen

    grads = agree(see)
    first = {name: grad[0].item() for name, grad in grads[0].items()}
    assert first == {"a": 1.5, "b": 3.0}


# --- dtypes of gradients ---


@on_ranks(2)
def test_t19_t20_gradient_dtypes_survive(rank: int, n_ranks: int) -> None:
    """`_apply`, materialising from meta, and load_state_dict(assign=True)."""

    def see(fsdp: Any) -> Any:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        model.weight.grad_dtype = torch.float64
        fsdp.fully_shard(model)
        model.to_empty(device="cpu")
        kept = [model.weight.grad_dtype]
        values = {name: torch.ones_like(p) for name, p in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        kept.append(model.weight.grad_dtype)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        grads = gradients(parameters)
        model.to(torch.float32)
        kept += [p.grad.dtype for p in parameters.values()]
        return kept, grads

    kept, grads = agree(see)
    assert kept == [torch.float64] * 3 + [torch.float32]


@on_ranks(2)
def test_t37_t38_dtype_of_reductions(rank: int, n_ranks: int) -> None:
    """Without `reduce_dtype` sums are exact to the parameter's dtype, not to that of compute."""

    def weight(fsdp: Any) -> Any:
        model = linear(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        parameters = shards(model)
        # The sum of 1 and 1/512 is no bfloat16.
        sum_backward(model, torch.full((1, 4), 1.0 if rank == 0 else 2.0**-9))
        return local(parameters["weight"].grad)

    grad = agree(weight)
    assert grad.dtype is torch.float32 and grad[0, 0].item() == (1 + 2.0**-9) / 2


@on_ranks(2)
def test_t43_t59_micro_batches_add_up_in_the_parameters_dtype(rank: int, n_ranks: int) -> None:
    """On the unsharded parameter itself, where `unsharded_accumulated_grad` shows it."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        parameters = shards(model)
        (fsdp_param,) = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params
        model.set_requires_gradient_sync(False)
        held = []
        for x in (2.0, 2.0**-7, 2.0**-7):
            sum_backward(model, torch.full((1, 4), x))
            held.append(fsdp_param.unsharded_accumulated_grad.clone())
        kind = raised(lambda: setattr(fsdp_param, "unsharded_accumulated_grad", None))
        model.set_requires_gradient_sync(True)
        sum_backward(model, torch.full((1, 4), 2.0**-7))
        return held, kind, gradients(parameters)

    held, kind, grads = agree(see)
    assert {h.dtype for h in held} == {torch.float32} and kind == "AttributeError"
    assert grads["weight"][0, 0].item() == 2 + 3 * 2.0**-7


@on_ranks(2)
def test_t44_zero_grad_clears_what_is_registered(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen = []
        for reshards in (False, True):
            model = linear(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            parameters = shards(model)
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(reshards)
            sum_backward(model, torch.ones(1, 4))
            model.zero_grad()
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
            sum_backward(model, torch.ones(1, 4))
            seen.append(local(parameters["weight"].grad)[0, 0].item())
        return seen

    assert agree(see) == [1.0, 2.0]


# --- parameters ---


@on_ranks(2)
def test_t10_t11_t13_dtypes_of_single_parameters(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        asked = []

        def choose(parameter: nn.Parameter) -> torch.dtype | None:
            asked.append(tuple(parameter.shape))
            return parameter.dtype if parameter.dim() == 1 else None

        class Spy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append([x.dtype, self.weight.dtype, self.bias.dtype])
                return x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)

        seen: list[Any] = []
        model = Spy(4, 4)
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=choose)
        fsdp.fully_shard(model, mp_policy=policy)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        return asked, seen, gradients(parameters)

    asked, seen, _ = agree(see)
    assert asked == [(4, 4), (4,)] and seen == [[torch.bfloat16, torch.bfloat16, torch.float32]]


@on_ranks(2)
def test_t12_a_wrong_override_leaves_the_module_alone(rank: int, n_ranks: int) -> None:
    """Torch refuses with the same errors, and spoils the module for the next call."""
    for answer, text in ((torch.float16, "must return None"), (1, "must return a torch.dtype")):
        kinds = []
        for fsdp in (torch_fsdp, implementation()):
            model = nn.Linear(4, 4)
            fields = set(model.__dict__)
            policy = fsdp.MixedPrecisionPolicy(
                torch.bfloat16, param_dtype_override_fn=lambda _, answer=answer: answer
            )
            kinds.append(raised(lambda: fsdp.fully_shard(model, mp_policy=policy), text))
        assert kinds == ["ValueError"] * 2
        assert set(model.__dict__) == fields and type(model) is nn.Linear
        implementation().fully_shard(model)
        backward(model, torch.ones(2, 4))


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


@on_ranks(2)
def test_t17_t18_t41_gradient_dtypes_of_parameters(rank: int, n_ranks: int) -> None:
    """A parameter's own `grad_dtype` is the dtype of its shard's gradient."""

    def see(fsdp: Any) -> Any:
        seen = []
        for policy in ({}, {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64}):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            model[0].weight.grad_dtype = torch.float64
            model[1].weight.grad_dtype = torch.bfloat16
            fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
            parameters = shards(model)
            kept = [p.grad_dtype for p in parameters.values()]
            for step in range(2):
                backward(model, data(rank, step, 2, 4))
            grads = gradients(parameters)
            seen.append((kept, [g.dtype for g in grads.values()], grads))
        return seen

    kept, dtypes, _ = agree(see, Tolerance(scaled=2**-7))[0]
    assert kept[0] is torch.float64 and kept[2] is torch.bfloat16
    assert dtypes == [torch.float64, torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("wide", [torch.float64, torch.float32], ids=str)
@on_ranks(3, 4)
def test_t38_a_unit_is_reduced_in_one_dtype(rank: int, n_ranks: int, wide: torch.dtype) -> None:
    """The widest of its parameters', also where the sum of the shards waits for the replicas."""

    def see(fsdp: Any) -> Any:
        model = Either()
        model.a.grad_dtype = wide
        model.b.grad_dtype = torch.bfloat16
        mesh = hsdp_mesh() if n_ranks == 4 else None
        fsdp.fully_shard(model, mesh=mesh)
        parameters = shards(model)
        seen = []
        for sync, all_reduce in ((True, True), (True, False), (False, True), (True, True)):
            model.set_requires_gradient_sync(sync)
            if mesh is not None:
                model.set_requires_all_reduce(all_reduce)
            sum_backward(model, data(rank, len(seen), 4), "ab")
            seen.append(gradients(parameters))
            for parameter in parameters.values():
                parameter.grad = None
        return seen

    # Sums of three depend on their order.
    grads = agree(see, CLOSE if n_ranks == 3 and wide is torch.float32 else EXACT)
    assert grads[0]["b"].dtype is torch.bfloat16


@on_ranks(2)
def test_t32_what_hooks_on_unsharded_parameters_see(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen: list[Any] = []

        class Spy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                if not seen:
                    weight = self.weight
                    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
                    seen.append(weight.grad_dtype)
                return super().forward(x)

        model = Spy(4, 4)
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
        for sync in (True, False, False, True, True):
            model.set_requires_gradient_sync(sync)
            backward(model, data(rank, 0, 2, 4))
        return seen

    narrow, wide = torch.bfloat16, torch.float32
    policy = {"param_dtype": narrow}
    assert agree(see) == [wide, narrow, wide, wide, wide, narrow]
    policy = {"reduce_dtype": narrow}
    assert agree(see) == [narrow] * 6


@on_ranks(2)
def test_t16_unused_parameters_of_any_gradient_dtype(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = Either()
        model.b.grad_dtype = None
        fsdp.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        text = "Reducing unused parameters with grad_dtype=None"
        kind = raised(lambda: backward(model, torch.ones(4), "a"), text, "reduce_dtype", "b")
        model.reset_iter_state()
        model.set_reduce_scatter_unused_params(False)
        parameters = shards(model)
        backward(model, torch.ones(4), "a")
        return kind, gradients(parameters)

    kind, grads = agree(see)
    assert kind == "ValueError" and grads["b"] is None


@on_ranks(2)
def test_t5_storage_that_is_kept(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = sharded(fsdp)
        unit = model.blocks[0]
        parameters = shards(model)
        backward(model, data(rank))
        seen = []

        def pointer() -> tuple[Tensor, int]:
            unit.unshard()
            return unit.up.weight, unit.up.weight.data_ptr()

        model.set_keep_unsharded_storage(True)
        weight, before = pointer()
        backward(model, data(rank, 1))
        seen += [weight.untyped_storage().nbytes() > 0, weight.data_ptr() == before]
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        backward(model, data(rank, 2))
        again, after = pointer()
        seen += [again is weight, after == before, weight.detach().clone()]
        model.set_keep_unsharded_storage(False, recurse=False)
        unit.set_keep_unsharded_storage(False)
        unit.reshard()
        seen.append(weight.untyped_storage().nbytes())
        backward(model, data(rank, 3))
        return seen, gradients(parameters)

    seen, _ = agree(see)
    assert seen[:4] == [True] * 4 and seen[-1] == 0


# --- names and what they say ---


@on_ranks(2)
def test_t3_t4_t53_names(rank: int, n_ranks: int) -> None:
    """Messages of replicated units, what is still missing, the range of a backward's end."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        replicated = replicate(nn.Linear(4, 4))
        for each in (model, replicated):
            each(data(rank, 0, 2, 4))
        texts = []
        for each in (model, replicated):
            with pytest.raises(RuntimeError) as caught:
                each.finalize_backward()
            texts.append(str(caught.value).split()[0])
        by_hand(fsdp, model)
        backward(model, data(rank, 0, 2, 4))
        opened = ranges(model.finalize_backward)
        return texts, [name for name in opened if "rs_wait" not in name]

    texts, opened = agree(see)
    assert texts == ["FSDP", "Replicate"] and "FSDP::finalize_backward" in opened
    for name in ("get_pending_gradients", "synchronize_gradients", "set_all_gather_layout"):
        assert not hasattr(implementation().FSDPModule, name)
    with pytest.raises(TypeError):
        implementation().MixedPrecisionPolicy(grad_dtype=torch.float32)


@on_ranks(2)
def test_t14_whose_policy_it_is(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        model = nn.Linear(4, 4)
        policy = fsdp.MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.dim() == 1 else None
        )
        state = fsdp.fully_shard(model, mp_policy=policy)._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        kept = [p.mp_policy.param_dtype for p in group.fsdp_params]
        return kept, state._mp_policy.param_dtype_override_fn, hasattr(group, "mp_policy")

    assert agree(see) == ([torch.bfloat16, torch.float32], None, False)


@on_ranks(2)
def test_t25_t54_functions_that_lay_out_what_travels(rank: int, n_ranks: int) -> None:
    """A unit that has one of its own is torch's, from then on."""

    def see(fsdp: Any) -> Any:
        model = chain(fsdp)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        called = []
        (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
        for name in ("_all_gather_output_fn", "_prepare_reduce_scatter_inputs"):
            default = getattr(group, name)

            def spy(*args: Any, name: str = name, default: Any = default) -> Any:
                called.append((name, len(args)))
                return default(*args)

            setattr(group, name, spy)
        backward(model, data(rank, 1, 2, 4))
        return called, gradients(parameters)

    called, _ = agree(see, CLOSE)
    assert {name for name, _ in called} == {
        "_all_gather_output_fn",
        "_prepare_reduce_scatter_inputs",
    }


@on_ranks(2)
def test_t23_outputs_that_go_after_the_second_method(rank: int, n_ranks: int) -> None:
    def see(fsdp: Any) -> Any:
        seen = []
        for answer in (True, 1):
            model = nn.Sequential(nn.Linear(4, 4))
            fsdp.fully_shard(model)
            inner = model[0].weight._local_tensor
            extension = Extension(inner, alias=False).attach()
            inner.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda a=answer: a
            text = "" if answer is True else "must return a bool"
            seen.append(raised(lambda m=model: m(data(rank, 0, 2, 4)), text))
            seen += [outputs[0].untyped_storage().nbytes() for outputs, *_ in extension.post]
        return seen

    assert agree(see) == ["nothing", 0, "AssertionError"]


@on_ranks(2)
def test_t22_t40_gradients_of_any_dtype(rank: int, n_ranks: int) -> None:
    """A parameter whose `grad_dtype` is None keeps the dtype of the reduction, also in the spec."""

    def see(fsdp: Any) -> Any:
        seen = []
        for policy in ({}, {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float64}):
            model = nn.Linear(4, 4)
            model.weight.grad_dtype = None
            fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
            parameters = shards(model)
            backward(model, data(rank, 0, 2, 4))
            specs = [p.grad._spec.tensor_meta.dtype for p in parameters.values()]
            seen.append((specs, gradients(parameters)))
        return seen

    specs = [spec for spec, _ in agree(see, Tolerance(scaled=2**-7))]
    assert specs[0][0] is torch.float32 and specs[2][0] is torch.float64
    assert [spec[1] for spec in specs] == [torch.float32] * 3


@on_ranks(2)
def test_t86_adamw_of_gradients_that_are_wider(rank: int, n_ranks: int) -> None:
    """It refuses them, also of plain tensors; SGD and clipping take them."""

    def see(fsdp: Any) -> Any:
        model = nn.Linear(4, 4)
        model.weight.grad_dtype = torch.float64
        fsdp.fully_shard(model)
        parameters = shards(model)
        backward(model, data(rank, 0, 2, 4))
        kinds = [
            raised(torch.optim.AdamW(model.parameters(), foreach=foreach).step)
            for foreach in (False, True, None)
        ]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return kinds, norm.full_tensor(), weights(parameters)

    kinds, _, _ = agree(see, CLOSE)
    assert "nothing" not in kinds
