"""T: gradient dtypes of parameters, reductions and hooks, from torch 2.15."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from harness import implementation
from models import data
from parity import EXACT, Tolerance, on_ranks
from torch import Tensor, nn

from behaviour.pairs import (
    CLOSE,
    agree,
    backward,
    features,
    gradients,
    hsdp_mesh,
    linear,
    local,
    raised,
    shards,
    sum_backward,
    weights,
)

pytestmark = pytest.mark.skipif(
    not features.manual_finalization, reason="this version of torch has none of it"
)


class Either(nn.Module):
    """One unit with two parameters, of which each call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, names: str) -> Tensor:
        return sum(getattr(self, name) * x for name in names)


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
def test_t19_gradient_dtypes_set_too_late(rank: int, n_ranks: int) -> None:
    """After the first forward; the gradients of before are left as they were."""

    def see(fsdp: Any) -> Any:
        model = linear(fsdp)
        backward(model, data(rank, 0, 2, 4))
        model.zero_grad()
        model.weight.grad_dtype = torch.bfloat16
        text = "attempting to assign a gradient with dtype"
        return raised(lambda: backward(model, data(rank, 1, 2, 4)), text), model.weight.grad

    assert agree(see)[0] == "RuntimeError"


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
