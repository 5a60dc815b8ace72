"""A weight used where its unit is not in forward: torch's error, and the parameter's name."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c
from fsdp_c._fully_shard import _errors

MIXED = "got mixed torch.Tensor and DTensor"


class Net(nn.Module):
    """`use` says how forward comes by the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])
        self.last = nn.Linear(4, 4)
        self.use = "module"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if self.use == "expression":
            return F.linear(
                h,
                self.heads[-1].weight,
            )
        if self.use == "argument":
            return self.product(h, weight=self.heads[1].weight)
        if self.use == "in torch":
            return F.layer_norm(h, (4,), self.heads[0].bias)
        if self.use == "of the user":
            raise RuntimeError("of the user")
        return self.heads[1](h)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self._first(x)

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))

    @staticmethod
    def product(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return h @ weight.t()


def name_weights(rank: int, n_ranks: int) -> None:
    model = Net()
    for module in (model.body, *model.heads):
        fsdp_c.fully_shard(module)
    fsdp_c.fully_shard(model)
    x = torch.ones(2, 4)

    def message(use: str) -> str:
        model.use = use
        with pytest.raises(RuntimeError) as caught:
            model(x)
        return str(caught.value)

    where = "of FSDP unit 'heads.1' is sharded, because the unit is not in forward"
    for use in ("expression", "argument"):
        text = message(use)
        assert MIXED in text and f"'heads.1.weight' {where}" in text, text
        assert text.count("register_fsdp_forward_method") == 1, text
    assert "'heads.0.bias' of FSDP unit 'heads.0'" in message("in torch")
    assert message("of the user") == "of the user"

    model.use = "module"
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.heads[1].parameters())


def sharded() -> Net:
    torch.manual_seed(0)
    model = Net()
    for module in (model.body, *model.heads):
        fsdp_c.fully_shard(module)
    return fsdp_c.fully_shard(model)


def text_of(run: Callable[[], Any]) -> str:
    """Of the error, as code around it catches it: nothing of fsdp_c's is called."""
    with pytest.raises(RuntimeError, match=MIXED) as caught:
        run()
    text = str(caught.value)
    assert text.count("FSDP unit") == 1, text
    return text


def add_to(total: torch.Tensor, weight: torch.Tensor) -> None:
    total += weight


def name_outside_of_all_calls(rank: int, n_ranks: int) -> None:
    x = torch.ones(2, 4)
    assert "'last.weight' and 'last.bias' of FSDP unit 'Net'" in text_of(
        lambda: sharded().encode(x)
    )
    model = sharded()
    model(x).sum().backward()
    head = "'heads.1.weight' of FSDP unit 'heads.1' is sharded"
    of_root = "'last.weight' and 'last.bias' of FSDP unit '(root)' are sharded"
    view = model.heads[1].weight.t()
    for use in (
        lambda: x @ model.heads[1].weight.t(),
        lambda: x @ view,
        lambda: F.linear(x, model.heads[1].weight),
        lambda: add_to(torch.ones(8, 4), model.heads[1].weight),
        lambda: torch.cat([x, model.heads[1].weight]),
        lambda: torch.einsum("ij,kj->ik", x, model.heads[1].weight),
    ):
        assert head in text_of(use)
    text = text_of(lambda: model.encode(x))
    assert of_root in text and "register_fsdp_forward_method(module, 'encode')" in text
    assert "Net.encode() was called" in text
    assert "forward_method(module, 'generate')" in text_of(lambda: model.generate(x))
    direct = nn.Sequential(nn.Linear(4, 4))
    fsdp_c.fully_shard(direct)
    assert "Sequential itself in place of its method forward()" in text_of(
        lambda: direct.forward(x)
    )
    text = text_of(lambda: model.last(x))
    assert of_root in text and "A Linear of it was called by itself: call the Net" in text
    text = text_of(lambda: model.last.weight.data.copy_(torch.ones(4, 4)))
    assert "'last.weight' of FSDP unit '(root)'" in text and "distribute_tensor(value" in text
    other = sharded()
    with torch.no_grad():
        other(x)  # the root stays unsharded
        text = text_of(lambda: other.last.weight.mul_(0.5).add_(model.last.weight))
    assert "is sharded and 'last.weight' of another is not" in text and "reshard()" in text
    fsdp_c.register_fsdp_forward_method(model, "encode")
    model.encode(x)
    name = str(torch.ops.aten.mm.default)
    assert name == f"{torch.ops.aten.mm.default}" == "aten.mm.default", model.last.weight


class Modes(TorchDispatchMode):
    """Asks for names of operators while weights are in sight, as tools do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def names_of_operators_stay(rank: int, n_ranks: int) -> None:
    model = sharded()
    with Modes() as mode:
        (model.last.weight * model.last.weight).sum()
    assert "aten.mul.Tensor" in mode.names and all(len(name) < 40 for name in mode.names)


def penalty_on_a_weight(rank: int, n_ranks: int) -> None:
    """Gradients arrive, or the parameter is named: both ways of sharding."""
    torch.manual_seed(0)
    plain = Net()
    x = torch.ones(2, 4)
    for name in ("heads.1.weight", "last.weight", "body.weight"):
        plain.zero_grad()
        (plain(x).sum() + plain.get_parameter(name).square().sum()).backward()
        for shard in WAYS:
            for is_whole in (False, True):
                model = copy.deepcopy(plain)
                shard(model)
                output = model(x).sum()
                penalty = model.get_parameter(name).square().sum()
                if isinstance(penalty, DTensor) and not is_whole:
                    text = text_of((output + penalty).backward)
                    assert f"computed from '{name}' of FSDP unit" in text, text
                    assert "full_tensor()" in text
                    continue
                penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
                (output + penalty).backward()
                for other, param in plain.named_parameters():
                    if param.grad is not None:
                        got = model.get_parameter(other).grad.full_tensor()
                        torch.testing.assert_close(got, param.grad, msg=other)


def by_hand(model: Net, **options: Any) -> None:
    for module in (model.body, *model.heads):
        fsdp_c.fully_shard(module, **options)
    fsdp_c.fully_shard(model, **options)


WAYS: list[Callable[[Net], Any]] = [
    by_hand,
    partial(by_hand, reshard_after_forward=True),
    partial(by_hand, reshard_after_forward=False),
    *[
        partial(fsdp_c.shard, strategy=strategy, units=[nn.Linear])
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    ],
]


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize(
    "body", [name_outside_of_all_calls, names_of_operators_stay, penalty_on_a_weight]
)
def test_named(body: Callable[..., None], n_ranks: int) -> None:
    run_ranks(body, n_ranks)


def test_penalty_over_messages() -> None:
    run_ranks(penalty_on_a_weight, 2, env={"FSDP_C_TRANSPORT": "callback"})


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_weight_outside_of_forward(n_ranks: int) -> None:
    run_ranks(name_weights, n_ranks)


def test_reading_the_expression_runs_nothing() -> None:
    class Owner:
        @property
        def weight(self) -> torch.Tensor:
            raise AssertionError("read")

    owner, missing = Owner(), {}
    try:
        owner.weight @ missing["w"]
    except (KeyError, AssertionError) as error:
        frames = list(_errors._frames(error.__traceback__))
    assert any(value is owner for value in _errors._operands(*frames[1]))
