"""Small models for the tests, ways to shard them, and data that every process can compute."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# Not divisible by 2, 3 or 4, so that every rank but the first has a ragged or an empty shard
# somewhere.
WIDTH = 6
HIDDEN = 7


class Block(nn.Module):
    """A residual pair of linear layers with a norm; `n_calls` counts its forwards."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A chain of blocks; with `own`, the root holds parameters of its own around them."""

    def __init__(self, n_blocks: int = 3, own: bool = True, **block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**block) for _ in range(n_blocks))
        self.stem = nn.Linear(WIDTH, WIDTH) if own else nn.Identity()
        self.scale = nn.Parameter(torch.rand(3) + 0.5) if own else None
        self.register_buffer("offset", torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if self.scale is not None:
            x = x * self.scale.sum()
        return x + self.offset


@contextlib.contextmanager
def function_replaced() -> Iterator[None]:
    """A forward in here hands its model over to torch's own implementation."""
    original = FSDPParamGroup._record_post_forward
    FSDPParamGroup._record_post_forward = lambda self: original(self)
    try:
        yield
    finally:
        FSDPParamGroup._record_post_forward = original


def is_torchs(model: Any) -> bool:
    """Whether the module's state and units are torch's own."""
    return type(model._get_fsdp_state()) is FSDPState


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self, n_tokens: int = 11, n_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.head = nn.Linear(WIDTH, n_tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branches(nn.Module):
    """Blocks of which each call uses those it names, in the order given."""

    def __init__(self, n_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.stem(x)
        for index in use:
            x = self.blocks[index](x)
        return x


class Tiny(nn.Module):
    """Parameters with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, WIDTH))
        self.two = nn.Parameter(torch.randn(2, 3))
        self.single = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        small = self.two.sum() * self.single + self.cube.pow(2).sum()
        return torch.tanh(x * self.one) * small


def shard_blocks(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """One unit per block, one for the rest."""
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)


def shard_root(model: nn.Module, fsdp: Any, **options: Any) -> None:
    fsdp.fully_shard(model, **options)


def shard_deep(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """Units inside units inside units."""
    for block in model.blocks:
        fsdp.fully_shard(block.down, **options)
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)


def shard_grouped(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """The first two blocks are one unit, the others are one each."""
    fsdp.fully_shard([model.blocks[0], model.blocks[1]], **options)
    for block in model.blocks[2:]:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)


def shard_children(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """The root unit has no parameters: all are in units of their own."""
    for child in [*model.blocks, *[c for n, c in model.named_children() if n != "blocks"]]:
        if any(True for _ in child.parameters()):
            fsdp.fully_shard(child, **options)
    fsdp.fully_shard(model, **options)


Sharding = Callable[..., None]


def data(rank: int, step: int = 0, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs of one rank in one step; every rank can compute every other rank's."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(shape or (4, WIDTH), generator=generator).to(dtype)


def tokens(rank: int, step: int = 0, n_tokens: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randint(n_tokens, (2, 5), generator=generator)


class Odd(nn.Module):
    """Sizes around those of vectors and blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1,), (7,), (33, 5), (64, 64), (1031, 37), (3, 1)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return sum((w * x.mean()).sin().sum() * 10.0**i for i, w in enumerate(self.weights))


def train(pair: Any, rank: int) -> None:
    """Two steps, one of two micro-batches, an evaluation: all that a step does without options."""
    for step in range(2):
        pair.step(data(rank, step))
    for step in range(2):
        pair.do(lambda side, last=step == 1: side.model.set_requires_gradient_sync(last))
        pair.forward(data(rank, step))
        pair.backward()
    pair.optimize()
    pair.eval_forward(data(rank, 9))
