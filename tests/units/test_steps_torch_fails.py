"""What torch gets wrong in steps; the unsharded model judges.

Each body runs under fsdp_c and, expected to fail, under torch: a torch that does better is noticed.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh, failure_of, run_ranks
from parity import full
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_c

WIDTH = 4
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "_has_grad_dtype_override")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 6)
        self.b = nn.Linear(6, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.used = "a"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.used)(x)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Case:
    """A model, sharded under one implementation, and the same unsharded."""

    def __init__(self, fsdp: Any) -> None:
        self.fsdp = fsdp
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()

    def build(
        self,
        build: Callable[[], nn.Module] = Net,
        units: Callable[[Any], Iterable[Any]] = lambda model: [model.a, model.b],
        **options: Any,
    ) -> tuple[Any, Any]:
        torch.manual_seed(5)
        plain = build()
        model = copy.deepcopy(plain)
        for unit in (*units(model), model):
            self.fsdp.fully_shard(unit, **options)
        return model, plain

    def policy(self) -> Any:
        return self.fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )

    def backward(self, model: Any, step: int = 0) -> None:
        model(batch(self.rank, step)).square().sum().backward()

    def refer(self, plain: Any, step: int = 0) -> None:
        for rank in range(self.n_ranks):
            (plain(batch(rank, step)).square().sum() / self.n_ranks).backward()

    def check(self, model: Any, plain: Any, tolerance: float = 1e-5) -> None:
        for unit in model.modules():
            if isinstance(unit, torch_fsdp.FSDPModule):
                unit.reshard()
        for name, param in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (param.grad is None), f"gradient of {name}: {grad}"
            if grad is not None:
                torch.testing.assert_close(
                    full(grad), param.grad, rtol=tolerance, atol=tolerance, msg=name
                )

    def check_training(self, model: Any, plain: Any, step: int = 9) -> None:
        for one in (model, plain):
            one.zero_grad()
        self.backward(model, step)
        self.refer(plain, step)
        self.check(model, plain)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


def x2_backward_that_failed(case: Case) -> None:
    """The next ones reduce; what was reduced before stays."""
    model, plain = case.build()
    case.backward(model)
    case.refer(plain)
    hook = model.b.register_forward_pre_hook(lambda module, args: Failing.apply(args[0]))
    with pytest.raises(ValueError, match="on purpose"):
        case.backward(model, 1)
    hook.remove()
    kept = full(model.a.weight.grad).clone()
    torch.testing.assert_close(kept, plain.a.weight.grad, rtol=1e-5, atol=1e-5)
    with pytest.warns(UserWarning, match="previous backward ended in an exception"):
        model(batch(case.rank))
    for step in (3, 4):
        case.check_training(model, plain, step)


def x5_reset_drops_accumulated_gradients(case: Case) -> None:
    model, plain = case.build()
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    case.backward(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    case.check_training(model, plain)


class Box:
    def __init__(self, content: Tensor) -> None:
        self.content = content


class Hiding(Net):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


def f5_output_in_an_object(case: Case) -> None:
    for reshard in (True, False):
        model, plain = case.build(Hiding, lambda model: [], reshard_after_forward=reshard)
        for step in range(2):
            out = model(batch(case.rank, step))
            out.content.square().sum().backward()
            for rank in range(case.n_ranks):
                (plain(batch(rank, step)).content.square().sum() / case.n_ranks).backward()
        case.check(model, plain)


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        out = self.head(hidden)
        self.extra = self.head(2 * hidden).square().sum()
        return out


def df33_member_that_runs_again(case: Case) -> None:
    """Its second output is none of the root's."""
    model, plain = case.build(Tail, lambda model: [[model.norm, model.head]])
    (model(batch(case.rank)).square().sum() + model.extra).backward()
    for rank in range(case.n_ranks):
        ((plain(batch(rank)).square().sum() + plain.extra) / case.n_ranks).backward()
    case.check(model, plain)


def f15_first_forward_in_inference_mode(case: Case) -> None:
    model, plain = case.build()
    with torch.inference_mode():
        model(batch(case.rank))
    case.check_training(model, plain)


def d25_all_frozen_at_first(case: Case) -> None:
    model, plain = case.build(mp_policy=case.policy())
    for param in model.parameters():
        param.requires_grad_(False)
    model(batch(case.rank))
    model.reshard()
    for param in model.parameters():
        param.requires_grad_(True)
    case.backward(model)
    case.refer(plain)
    case.check(model, plain, 0.2)


def d30_frozen_while_unsharded(case: Case) -> None:
    model, plain = case.build()
    model(batch(case.rank))
    model.a.unshard()
    for one in (model, plain):
        one.a.weight.requires_grad_(False)
    model.a.reshard()
    assert not model.a.weight.requires_grad and model.a.bias.requires_grad
    case.check_training(model, plain)


def d32_accumulated_and_fresh_gradients(case: Case) -> None:
    """The micro-batches use different parameters, whose dtypes then differ; also with zeros."""
    for with_unused in (False, True):
        model, plain = case.build(OneOfTwo, lambda model: [], mp_policy=case.policy())
        model.set_reduce_scatter_unused_params(with_unused)
        for used, is_last in (("a", False), ("a" if with_unused else "b", True)):
            model.used = plain.used = used
            model.set_requires_gradient_sync(is_last)
            case.backward(model)
            case.refer(plain)
        if with_unused:
            plain.b.weight.grad = torch.zeros_like(plain.b.weight)
        case.check(model, plain, 0.2)


def accumulated_gradients_of_shards_that_are_cast(case: Case) -> None:
    model, plain = case.build()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for rank in range(case.n_ranks):
            x = batch(rank, step).to(plain.a.weight.dtype)
            (plain(x).square().sum() / case.n_ranks).backward()
            if rank == case.rank:
                model(x).square().sum().backward()
        for one in (model, plain) if step == 0 else ():
            one.to(torch.float64)
    case.check(model, plain)


class OneOfThree(OneOfTwo):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)


def g24_partial_sums_by_parameter(case: Case) -> None:
    """What neither micro-batch has used gets no gradient."""
    mesh = cached_mesh((2, case.n_ranks // 2), ("r", "s"))
    model, plain = case.build(OneOfThree, lambda model: [], mesh=mesh)
    for step, (used, is_last) in enumerate((("a", False), ("b", True), ("c", True))):
        model.used = plain.used = used
        model.set_requires_all_reduce(is_last)
        case.backward(model, step)
        case.refer(plain, step)
        if is_last:
            case.check(model, plain)


def g18_kept_units_after_a_step(case: Case) -> None:
    """Kept by the flags, and unsharded by hand before."""
    for by_hand in (False, True):
        model, plain = case.build()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        if by_hand:
            for unit in (model.a, model.b, model):
                unit.unshard()
        for step in range(3):
            torch.testing.assert_close(
                model(batch(0, step)), plain(batch(0, step)), rtol=1e-4, atol=1e-4
            )
            case.backward(model, step)
            case.refer(plain, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def y4_state_dict_inside_forward(case: Case) -> None:
    model, plain = case.build()
    seen: list[Any] = []
    model.b.register_forward_pre_hook(lambda module, args: seen.append(model.state_dict()))
    case.check_training(model, plain)
    assert all(isinstance(value, DTensor) for value in seen[0].values())


def y5_state_dict_on_one_rank(case: Case) -> None:
    """The others do not gather again, and neither does this rank; shards are what it then shows."""
    model, plain = case.build()
    with torch.no_grad():
        model(batch(case.rank))
    if case.rank == 0:
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert all(isinstance(param, DTensor) for param in model.parameters())
    if case.fsdp is torch_fsdp:
        raise AssertionError("torch hangs here")
    case.check_training(model, plain)


def y16_shard_that_was_replaced(case: Case) -> None:
    model, plain = case.build()
    case.backward(model)
    old = model.a.weight
    model.a.weight = nn.Parameter(
        DTensor.from_local(
            old.to_local() * 2, old.device_mesh, old.placements, shape=old.shape, stride=(4, 1)
        )
    )
    with torch.no_grad():
        plain.a.weight.mul_(2)
    case.check_training(model, plain)


def pp9_unshard_by_hand_lasts_beyond_forward(case: Case) -> None:
    """As pipelines do around their micro-batches; split backwards then find the parameters."""
    model, plain = case.build()
    units = [model.a, model.b, model]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(2):
        with mock.patch.dict(os.environ, FSDP_C_KEEP_UNSHARDED="1"):
            for unit in units:
                unit.unshard()
        for is_last in (False, True):
            model.set_reshard_after_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            loss = model(batch(case.rank, 2 * step + is_last)).square().sum()
            assert not any(isinstance(param, DTensor) for param in model.parameters())
            loss.backward()
            case.refer(plain, 2 * step + is_last)
        case.check(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    case.check_training(model, plain)
    for strict in ("0", "1"):
        names = {"FSDP_C_KEEP_UNSHARDED": "1", "FSDP_C_STRICT": strict}
        with mock.patch.dict(os.environ, names):
            model.a.unshard()
        with torch.no_grad():
            torch.testing.assert_close(model(batch(0)), plain(batch(0)), rtol=1e-4, atol=1e-4)
        assert isinstance(model.a.weight, DTensor) == (strict == "1")
        model.a.reshard()
        assert isinstance(model.a.weight, DTensor)
        model(batch(case.rank))
        assert isinstance(model.a.weight, DTensor)


def x9_two_roots_in_one_context(case: Case) -> None:
    (first, plain), (second, _) = case.build(), case.build()
    case.fsdp.share_comm_ctx([first, second])
    losses = [model(batch(case.rank)).square().sum() for model in (first, second)]
    for loss in losses:
        loss.backward()
    case.refer(plain)
    for model in (first, second):
        case.check(model, plain)


def g3_sparse_gradient_is_named(case: Case) -> None:
    model = nn.Sequential(nn.Embedding(6, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    for unit in (model[0], model):
        case.fsdp.fully_shard(unit)
    with pytest.raises(ValueError, match=r"'0.weight' is sparse"):
        model(torch.tensor([1, 2])).sum().backward()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, packed: Any) -> Tensor:
        return self.a(packed.data)


def d11_packed_sequence_is_cast(case: Case) -> None:
    model, _ = case.build(Packed, lambda model: [], mp_policy=case.policy())
    out = model(nn.utils.rnn.pack_sequence([batch(case.rank)]))
    assert out.dtype == torch.bfloat16


def g15_zero_grad_reaches_shards(case: Case) -> None:
    """Also those of units that are unsharded between forward and backward."""
    model, plain = case.build()
    for set_to_none in (True, False):
        case.backward(model)
        loss = model(batch(case.rank, 1)).square().sum()
        model.zero_grad(set_to_none)
        plain.zero_grad()
        loss.backward()
        case.refer(plain, 1)
        case.check(model, plain)


def g8_g27_settings_that_nothing_follows(case: Case) -> None:
    model, _ = case.build()
    model.c.weight.register_hook(lambda grad: None)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(2.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            case.backward(model)
    texts = [str(warning.message) for warning in seen]
    assert sum("hooks of parameter 'c.weight' never run" in text for text in texts) == 1, texts
    assert sum("2 other units, such as 'a'" in text for text in texts) == 1, texts


BODIES = [
    x2_backward_that_failed,
    x5_reset_drops_accumulated_gradients,
    f5_output_in_an_object,
    df33_member_that_runs_again,
    f15_first_forward_in_inference_mode,
    d25_all_frozen_at_first,
    d30_frozen_while_unsharded,
    d32_accumulated_and_fresh_gradients,
    accumulated_gradients_of_shards_that_are_cast,
    g24_partial_sums_by_parameter,
    g18_kept_units_after_a_step,
    y4_state_dict_inside_forward,
    y5_state_dict_on_one_rank,
    y16_shard_that_was_replaced,
    pp9_unshard_by_hand_lasts_beyond_forward,
    x9_two_roots_in_one_context,
    g3_sparse_gradient_is_named,
    d11_packed_sequence_is_cast,
    g15_zero_grad_reaches_shards,
    g8_g27_settings_that_nothing_follows,
]
# What torch 2.15 does right.
MENDED = {
    "d25_all_frozen_at_first",
    "d32_accumulated_and_fresh_gradients",
    "g24_partial_sums_by_parameter",
}


def run_ours(rank: int, n_ranks: int, name: str) -> str:
    return failure_of(globals()[name], Case(fsdp_c))


def run_torch(rank: int, n_ranks: int) -> dict[str, str]:
    return {body.__name__: failure_of(body, Case(torch_fsdp)) for body in BODIES}


@pytest.mark.parametrize("name", [body.__name__ for body in BODIES])
def test_works(name: str) -> None:
    errors = run_ranks(run_ours, 2, name)
    assert not any(errors), "\n".join(errors)


def test_torch_fails() -> None:
    expected = MENDED if HAS_GRAD_DTYPE else set()
    for outcome in run_ranks(run_torch, 2, fresh=True):
        assert outcome.ok, outcome
        assert {name for name, error in outcome.value.items() if not error} == expected
