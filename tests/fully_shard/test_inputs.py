"""What forwards may take and give: containers, keywords, nothing, outputs changed in place."""

import collections
import dataclasses
from typing import Any, NamedTuple

import models
import pytest
import torch
from models import WIDTH, Block, data
from parity import Pair, Side, on_ranks, total
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class Record:
    x: Tensor
    tag: str
    parts: dict[str, Any]


class Named(NamedTuple):
    first: Tensor
    second: list[Tensor]


class Wrapper(nn.Module):
    """Blocks whose inputs and outputs travel in the container that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carrier(kind) for _ in range(2))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        carried = self.blocks[0].pack(self.stem(x))
        for block in self.blocks:
            carried = block(carried)
        return carried


class Carrier(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block()

    def pack(self, x: Tensor) -> Any:
        half = x * 0.5
        return {
            "tuple": lambda: (x, None, 3, half),
            "list": lambda: [x, [half, "text"]],
            "dict": lambda: {"x": x, "deep": {"half": half, "n": 1}},
            "ordered": lambda: collections.OrderedDict(x=x, half=half),
            "named": lambda: Named(x, [half, half + 1]),
            "dataclass": lambda: Record(x, "tag", {"half": half}),
        }[self.kind]()

    def unpack(self, carried: Any) -> Tensor:
        return {
            "tuple": lambda: carried[0] + carried[3],
            "list": lambda: carried[0] + carried[1][0],
            "dict": lambda: carried["x"] + carried["deep"]["half"],
            "ordered": lambda: carried["x"] + carried["half"],
            "named": lambda: carried.first + carried.second[1],
            "dataclass": lambda: carried.x + carried.parts["half"],
        }[self.kind]()

    def forward(self, carried: Any) -> Any:
        return self.pack(self.inner(self.unpack(carried)))


KINDS = ["tuple", "list", "dict", "ordered", "named", "dataclass"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_containers(rank: int, n_ranks: int, kind: str) -> None:
    pair = Pair(lambda: Wrapper(kind), models.shard_blocks)
    for step in range(2):
        pair.step(data(rank, step))
    assert type(pair.ours.kept) is type(pair.theirs.kept)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_containers_are_cast(rank: int, n_ranks: int, kind: str) -> None:
    def shard(model: nn.Module, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.float64, output_dtype=torch.float32, reduce_dtype=torch.float32
        )
        models.shard_blocks(model, fsdp, mp_policy=policy)

    pair = Pair(lambda: Wrapper(kind), shard)
    for step in range(2):
        pair.step(data(rank, step))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, *, x: Tensor, extra: dict[str, Tensor], flag: bool = False) -> Tensor:
        x = self.blocks[0](x=x)
        return x + extra["bias"] if flag else x


@on_ranks(1, 2)
def test_keywords_only(rank: int, n_ranks: int) -> None:
    pair = Pair(Keywords, models.shard_blocks)
    for step in range(3):
        pair.step(x=data(rank, step), extra={"bias": data(rank, 9)}, flag=step == 1)


class Sourceless(nn.Module):
    """Takes nothing, or nothing that could need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = nn.ModuleList([Block()])

    def forward(self, index: Tensor | None = None) -> Tensor:
        return self.blocks[0](self.table if index is None else self.table[index])


@on_ranks(1, 2, 3)
def test_no_tensor_inputs(rank: int, n_ranks: int) -> None:
    pair = Pair(Sourceless, models.shard_blocks)
    pair.step()
    pair.step(torch.tensor([0, 3, 3]))
    pair.step(None)


class Giving(nn.Linear):
    """Gives its weight out, which is the same leaf in each forward; `hook` is a user's on it."""

    hook: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.hook is not None:
            self.weight.register_hook(self.hook)
            self.hook = None
        return super().forward(x), self.weight


@pytest.mark.parametrize("has_hook", [False, True])
@on_ranks(1, 2)
def test_a_parameter_as_output(rank: int, n_ranks: int, has_hook: bool) -> None:
    pair = Pair(lambda: Giving(WIDTH, WIDTH), models.shard_root)
    if has_hook:
        pair.both(lambda side: setattr(side.model, "hook", lambda grad: grad * 2))
    for step in range(3):
        pair.step(data(rank, step))


class Multi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.blocks[0](x)
        return a, self.blocks[1](a), a.detach()


@pytest.mark.parametrize("used", [0, 1])
@on_ranks(1, 2)
def test_one_output_of_several(rank: int, n_ranks: int, used: int) -> None:
    """Gradient reaches the units through one output only."""
    pair = Pair(Multi, models.shard_blocks)

    def forward(side: Side) -> Tensor:
        side.kept = side.model(data(rank))[used]
        return side.kept

    for _ in range(2):
        pair.both(forward)
        pair.backward()
        pair.optimize()


@on_ranks(1, 2)
def test_output_changed_in_place(rank: int, n_ranks: int) -> None:
    pair = Pair(Multi, models.shard_blocks)

    def step(side: Side) -> Tensor:
        outputs = side.model(data(rank))
        outputs[1].mul_(2).add_(1)
        loss = total(outputs[:2])
        loss.backward()
        return loss.detach()

    for _ in range(2):
        pair.both(step)
        pair.optimize()


class Viewing(nn.Module):
    """Its output is a view, whatever torch makes of linear layers."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.inner = Block()
        self.copy = copy

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x.clone() if self.copy else x.view(-1)[:10].view(2, 5)


@pytest.mark.filterwarnings("error")
@on_ranks(1, 2)
def test_view_output_changed_in_place(rank: int, n_ranks: int) -> None:
    """Torch loses its hook here and fails, so an unchanged sum is the reference."""
    pair = Pair(lambda: Viewing(False), models.shard_root)
    pair.skip_if_same()

    def step(side: Side) -> None:
        output = side.model(data(rank))
        output = output.relu_() if side is pair.ours else output.clone().relu()
        total(output).backward()

    for _ in range(2):
        pair.both(step)
        pair.optimize()


class Listed(nn.Module):
    """Grows a list it was given, and ignores an object it knows nothing about."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, seen: list[Tensor], anything: object) -> Tensor:
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return x


@on_ranks(1, 2)
def test_callers_list_is_filled(rank: int, n_ranks: int) -> None:
    pair = Pair(Listed, models.shard_blocks)

    def step(side: Side) -> int:
        seen: list[Tensor] = []
        loss = total(side.model(data(rank), seen, object()))
        loss.backward()
        return len(seen)

    for _ in range(2):
        pair.both(step)
        pair.optimize()


@on_ranks(1, 2)
def test_hooks_of_the_user(rank: int, n_ranks: int) -> None:
    """Forward hooks see the same values, in the same order, as under torch."""

    def shard(model: nn.Module, fsdp: Any) -> None:
        model.seen = []
        block = model.blocks[0]
        block.register_forward_pre_hook(lambda m, args: model.seen.append(args[0].sum().item()))
        models.shard_blocks(model, fsdp)
        block.register_forward_hook(lambda m, args, out: out * 2)
        block.register_forward_hook(lambda m, args, out: model.seen.append(out.sum().item()))
        block.register_full_backward_hook(lambda m, gi, go: model.seen.append(go[0].sum().item()))

    pair = Pair(Multi, shard)
    for step in range(2):
        pair.step(data(rank, step))
        pair.both(lambda side: list(side.model.seen), "seen")


class OneUsed(nn.Module):
    """Its unit is given several inputs and uses the first; one is used elsewhere too."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.sources = nn.ModuleList(Block() for _ in range(3))
        self.unit = FirstOf(by)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (source(x) for source in self.sources)
        if self.by == "keyword":
            return self.unit(first, other=second, more=[third]) + third
        return self.unit(first, second, [third]) + third


class FirstOf(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.inner = Block()

    def forward(self, x: Tensor, other: Tensor, more: list[Tensor]) -> Tensor:
        if self.by == "recomputed":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def shard_sources(model: nn.Module, fsdp: Any) -> None:
    for source in model.sources:
        fsdp.fully_shard(source)
    fsdp.fully_shard(model.unit)
    fsdp.fully_shard(model)


@pytest.mark.parametrize("by", ["position", "keyword", "recomputed"])
@on_ranks(1, 2)
def test_inputs_that_are_not_used(rank: int, n_ranks: int, by: str) -> None:
    """What lies behind them gets zeros, as behind any autograd.Function, and weight decay."""
    pair = Pair(
        lambda: OneUsed(by),
        shard_sources,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    )

    def step(side: Side) -> list[bool]:
        total(side.model(data(rank))).backward()
        return [p.grad is None for p in side.model.sources[1].parameters()]

    for _ in range(3):
        assert not any(pair.both(step))
        pair.optimize()


@on_ranks(1, 2)
def test_a_leaf_that_is_not_used(rank: int, n_ranks: int) -> None:
    pair = Pair(lambda: FirstOf("position"), models.shard_root)

    def step(side: Side) -> tuple[Tensor, ...]:
        inputs = [data(rank).requires_grad_() for _ in range(3)]
        total(side.model(*inputs[:2], inputs[2:])).backward()
        return tuple(x.grad for x in inputs)

    for _ in range(2):
        pair.both(step)
        pair.optimize()
