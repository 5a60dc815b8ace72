"""The modules and helpers that generated programs and printed scripts call by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from harness import cached_mesh
from models import Block, data, tokens
from parity import copies, leaves, local, total
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

N_TOKENS = 11


class Planned(Exception):
    """Raised by a model on purpose."""


@dataclasses.dataclass
class Output:
    value: Tensor
    extra: dict[str, Any]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tiny(nn.Module):
    """Parameters of fewer rows than ranks, of one and of three dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, width))
        self.single = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.one) * (self.single + self.cube.pow(2).sum())


class Unused(nn.Module):
    """A parameter and a layer that no forward touches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width, bias=False)
        self.spare = nn.Parameter(torch.randn(width, 2))
        self.never = nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Frozen(nn.Module):
    """A frozen weight, an integer one, and a trainable bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.requires_grad_(False)
        self.index = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.index[1].to(x.dtype)


class Buffered(nn.Module):
    """Buffers, one of which counts the forwards, one of which is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("offset", torch.full((width,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) + (self.offset * self.count).to(x.dtype)


class Recurrent(nn.Module):
    """A layer that runs three times in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


class Nested(nn.Module):
    """Two modules that may be units of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = Block(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Several(nn.Module):
    """Gives a module, which may be a unit of its own, two inputs: that one uses the first alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.inner = FirstOf(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x), second=self.second(x))


class FirstOf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.tanh(self.linear(first))


class Many(nn.Module):
    """Its output is a container: a tuple, a dict or a dataclass."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        left, right = self.left(x), self.right(x)
        if self.kind == "tuple":
            return left, [right, None]
        if self.kind == "dict":
            return {"left": left, "right": (right, "text")}
        return Output(left, {"right": right})


class Checkpointed(nn.Module):
    """Recomputes its insides in backward."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = Block(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Rows(nn.Module):
    """Gives a layer its input as one batch of rows, as `shape` says."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.reshape(*self.shape, x.size(-1)))
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(width), torch.randn(2, width)])
        self.named = nn.ParameterDict({"gain": torch.randn(width), "unused": torch.randn(3)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.named["gain"] + self.some[0]) + self.some[1].sum(0)


class Waves(nn.Module):
    """Complex parameters alone, of rows that not every number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(5, width, dtype=torch.complex64))
        self.back = nn.Parameter(torch.randn(width, 5, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        waves = x.to(self.into.dtype) @ self.into.t() * self.phase.conj()
        return torch.tanh((waves @ self.back.t()).real / 8)


# What a layer of a `Net` can be, by the name that programs use.
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "block": lambda width: Block(width, 7),
    "thin": lambda width: Block(width, 2, bias=False),
    "even": lambda width: Block(width, 6),
    "linear": lambda width: nn.Linear(width, width),
    "norm": nn.LayerNorm,
    "tied": Tied,
    "tiny": Tiny,
    "unused": Unused,
    "frozen": Frozen,
    "buffered": Buffered,
    "recurrent": Recurrent,
    "nested": Nested,
    "several": Several,
    "tuple": lambda width: Many(width, "tuple"),
    "dict": lambda width: Many(width, "dict"),
    "dataclass": lambda width: Many(width, "dataclass"),
    "recompute": lambda width: Checkpointed(width, False),
    "reentrant": lambda width: Checkpointed(width, True),
    "tanh": lambda width: nn.Tanh(),
    "dropout": lambda width: nn.Dropout(0.25),
    "convolved": lambda width: Rows(nn.Conv1d(1, 1, 3, padding=1), -1, 1),
    "attention": lambda width: Rows(Attention(width), 1, -1),
    "lstm": lambda width: Rows(nn.LSTM(width, width), -1, 1),
    "listed": Listed,
    "weighted": lambda width: weight_norm(nn.Linear(width, width)),
    "wrapped": lambda width: checkpoint_wrapper(Block(width, 4)),
    "composed": lambda width: composable_checkpoint(Block(width, 4)),
    "inplace": lambda width: nn.LeakyReLU(0.5, inplace=True),
    "waves": Waves,
}


class Net(nn.Module):
    """A stem and layers; with `has_own` the root also has a parameter of its own.

    `layers` names the layers; `around` wraps each layer's call in a checkpoint ("recompute",
    "reentrant"); `output` is what forward returns. A layer named "again" is the first one.
    """

    def __init__(
        self,
        width: int,
        layers: str,
        stem: str = "linear",
        output: str = "tensor",
        around: str = "",
        has_own: bool = True,
    ) -> None:
        super().__init__()
        self.output = output
        self.around = around
        if stem in ("embedding", "bounded"):
            max_norm = 1.0 if stem == "bounded" else None  # written to in forward
            self.stem: nn.Module = nn.Embedding(N_TOKENS, width, max_norm=max_norm)
        else:
            self.stem = nn.Linear(width, width) if stem == "linear" else nn.Identity()
        self.layers = nn.ModuleList()
        for name in layers.split():
            self.layers.append(self.layers[0] if name == "again" else LAYERS[name](width))
        self.scale = nn.Parameter(torch.rand(width) + 0.5) if has_own else None

    def forward(
        self,
        x: Tensor,
        *,
        use: tuple[int, ...] | None = None,
        fail_in_forward: int = -1,
        fail_in_backward: int = -1,
    ) -> Any:
        x = self.stem(x)
        for position, index in enumerate(range(len(self.layers)) if use is None else use):
            if position == fail_in_forward:
                raise Planned("forward")
            x = self.call(self.layers[index], x)
            x = sum(leaves(x)) if not isinstance(x, Tensor) else x
            if position == fail_in_backward:
                x = FailInBackward.apply(x)
        if self.scale is not None:
            x = x * self.scale
        if self.output == "tuple":
            return x, {"double": x * 2, "kept": None}
        if self.output == "dict":
            return {"x": x, "list": [x.mean()]}
        if self.output == "dataclass":
            return Output(x, {"sum": x.sum(-1)})
        return x

    def encode(self, x: Tensor) -> Any:
        """A second way in."""
        return self.call(self.layers[0], self.stem(x))

    def call(self, layer: nn.Module, x: Tensor) -> Any:
        if self.around:
            return checkpoint(layer, x, use_reentrant=self.around == "reentrant")
        return layer(x)


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise Planned("backward")


def backward(out: Any, scaler: Any = None, **options: Any) -> Tensor | None:
    """Backward of a loss over all outputs; gives the loss."""
    if not any(leaf.requires_grad for leaf in leaves(out)):
        return None
    loss = total(out)
    (loss if scaler is None else scaler.scale(loss)).backward(**options)
    return loss.detach()


def floating(shards: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [shard for shard in shards.values() if shard.is_floating_point()]


def fill(model: nn.Module) -> None:
    """Values for all that `to_empty` left without."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*model.parameters(), *model.buffers()):
        mine = local(tensor)
        values = torch.randn(mine.shape, generator=generator)
        mine.copy_(values if mine.is_floating_point() else torch.ones(mine.shape))


def step_in_backward(shards: dict[str, nn.Parameter], kind: Any) -> list[Any]:
    """Steps each parameter in a hook of its own; gives what removes the hooks."""

    def hook(shard: nn.Parameter) -> None:
        optimizers[shard].step()
        optimizers[shard].zero_grad()

    trained = [shard for shard in shards.values() if shard.requires_grad]
    optimizers = {shard: kind([shard], lr=0.01) for shard in trained}
    return [shard.register_post_accumulate_grad_hook(hook) for shard in trained]


def log_gradients(shards: dict[str, nn.Parameter], log: list[Any]) -> None:
    for name, shard in shards.items():
        if shard.requires_grad:
            shard.register_post_accumulate_grad_hook(
                lambda p, name=name: log.append((name, p.grad.dtype))
            )


def halve_gradients(shards: dict[str, nn.Parameter]) -> int:
    """What a script may do by hand before a step; gives how many there were."""
    grads = [shard.grad for shard in shards.values() if shard.grad is not None]
    for grad in grads:
        grad.mul_(0.5)
    return len(grads)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as scripts make them: no weight decay for vectors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.005},
    ]


def planned(fn: Callable[[], Any]) -> str:
    """Whether `fn` failed on purpose; a rank may hear of it from another one first."""
    try:
        fn()
    except Planned:
        return "failed"
    except RuntimeError as error:
        if "by an exception" not in str(error):
            raise
        return "failed"
    return "went through"


def attempt(fn: Callable[[], Any]) -> str:
    """What `fn` raises."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def reshard(model: nn.Module, fsdp: Any) -> None:
    """Reshards all units."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def columns(world: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shards matrices on dim 1 where the ranks divide it."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim > 1 and parameter.size(1) % world == 0 else None

    return place


# What a program sees beside `fsdp`, `rank` and `world`.
NAMES: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "Net": Net,
    "Shard": Shard,
    "StateDictOptions": StateDictOptions,
    "attempt": attempt,
    "backward": backward,
    "cached_mesh": cached_mesh,
    "columns": columns,
    "copies": copies,
    "data": data,
    "fill": fill,
    "floating": floating,
    "get_model_state_dict": get_model_state_dict,
    "halve_gradients": halve_gradients,
    "leaves": leaves,
    "local": local,
    "log_gradients": log_gradients,
    "planned": planned,
    "reshard": reshard,
    "set_model_state_dict": set_model_state_dict,
    "step_in_backward": step_in_backward,
    "tokens": tokens,
    "total": total,
    "two_groups": two_groups,
}
