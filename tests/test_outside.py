"""A weight used where its unit is not in forward: torch's error, and the parameter's name."""

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch import nn

import fsdp_c
from fsdp_c import _outside

MIXED = "got mixed torch.Tensor and DTensor"


class Net(nn.Module):
    """`use` says how forward comes by the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])
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

    # Outside of all modules nobody sees the error pass but who asks.
    with pytest.raises(RuntimeError, match=MIXED) as caught:
        F.linear(x, model.heads[1].weight)
    assert "heads" not in str(caught.value)
    _outside.explain(caught.value)
    assert f"'heads.1.weight' {where}" in str(caught.value)

    model.use = "module"
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.heads[1].parameters())


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
        frames = list(_outside._frames(error.__traceback__))
    assert any(value is owner for value in _outside._operands(*frames[1]))
