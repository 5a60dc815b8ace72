"""Runs a model under torch's `fully_shard` and under the tested one, comparing after each call."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def on_ranks(
    *worlds: int, timeout: float = 60, apart: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Make a test of `fn(rank, n_ranks, ...)`, which runs on the ranks of each of the worlds."""

    def decorate(fn: Callable[..., None]) -> Any:
        names = list(inspect.signature(fn).parameters)[2:]

        @pytest.mark.parametrize("n_ranks", worlds)
        def test(n_ranks: int, **values: Any) -> None:
            args = [values[name] for name in names]
            harness.run_ranks(fn, n_ranks, *args, timeout=timeout, apart=apart)

        functools.update_wrapper(test, fn)
        del test.__wrapped__
        test.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in ["n_ranks", *names]
            ]
        )
        test.on_rank = fn
        # The ranks look the function up by this path.
        fn.__qualname__ += ".on_rank"
        return test

    return decorate


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far values may be apart.

    `relative` to each, `scaled` to the largest of the tensor, and `absolute`.
    """

    relative: float = 0.0
    scaled: float = 0.0
    absolute: float = 0.0
    # Set when values of one step feed the next with a rounding of their own: then ours start each
    # step from torch's.
    realign: bool = False

    @staticmethod
    def of(n_ranks: int, dtype: torch.dtype = torch.float32) -> "Tolerance":
        """Sums of two do not depend on their order; of more they do, by a rounding per addition."""
        if dtype is torch.float32 and n_ranks <= 2:
            return Tolerance()
        if dtype in (torch.float32, torch.float64):
            return Tolerance(relative=1e-5, scaled=1e-5, realign=True)
        # Torch rounds each addition to `dtype`, and the quotient; the tested one may round once, or
        # only at the end.
        return Tolerance(scaled=(n_ranks + 1) * torch.finfo(dtype).eps, realign=True)


EXACT = Tolerance()


class Side:
    """A model, its sharded parameters and optimizer, and the implementation that shards it."""

    def __init__(
        self,
        name: str,
        fsdp: Any,
        build: Callable[[], nn.Module],
        shard: Callable[..., None],
        optimizer: Callable[..., torch.optim.Optimizer] | None,
    ) -> None:
        self.name = name
        self.fsdp = fsdp
        harness.seed_everything(1)
        self.model = build()
        shard(self.model, fsdp)
        # Kept from here: while a unit is unsharded its sharded parameters are registered nowhere.
        self.shards = dict(self.model.named_parameters())
        self.optimizer = optimizer(self.model.parameters()) if optimizer else None
        self.kept: Any = None  # for tests that carry something from one call to the next


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Pair:
    """Both sides of one model. `both` runs something on each and compares results and state."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shard: Callable[..., None],
        *,
        tolerance: Tolerance | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = sgd,
    ) -> None:
        self.theirs = Side("torch", torch_fsdp, build, shard, optimizer)
        self.ours = Side("tested", harness.implementation(), build, shard, optimizer)
        self.tolerance = tolerance or Tolerance.of(dist.get_world_size())
        self.n_checks = 0
        self.check("after sharding")

    def skip_if_same(self) -> None:
        """Where torch cannot do what is tested, torch's own in the place of ours cannot either."""
        if self.ours.fsdp is self.theirs.fsdp:
            pytest.skip("torch fails here")

    def both(self, fn: Callable[[Side], Any], where: str = "") -> Any:
        """Call `fn` on each side; compare what they return and leave. Gives our result."""
        self.n_checks += 1
        where = f"{where or getattr(fn, '__name__', '')} (check {self.n_checks})"
        results = []
        for side in (self.theirs, self.ours):
            harness.seed_everything(100 + self.n_checks)
            results.append(fn(side))
        compare(results[1], results[0], self.tolerance, f"result of {where}")
        self.check(where)
        return results[1]

    def do(self, fn: Callable[[Side], Any], where: str = "") -> None:
        """As `both`, for calls whose result says nothing."""

        def do(side: Side) -> None:
            fn(side)

        self.both(do, where)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward on both; keeps the output in `side.kept`."""

        def forward(side: Side) -> Any:
            side.kept = side.model(*copies(args), **copies(kwargs))
            return side.kept

        return self.both(forward)

    def backward(self, **kwargs: Any) -> Tensor:
        def backward(side: Side) -> Tensor:
            loss = total(side.kept)
            loss.backward(**kwargs)
            return loss.detach()

        return self.both(backward)

    def optimize(self, set_to_none: bool = True) -> None:
        def optimize(side: Side) -> None:
            side.optimizer.step()

        self.realign()
        self.both(optimize)
        self.realign()
        self.both(lambda side: side.optimizer.zero_grad(set_to_none), "zero_grad")

    def step(self, *args: Any, set_to_none: bool = True, **kwargs: Any) -> None:
        """One training step, compared after forward, backward, optimizer and zero_grad."""
        self.forward(*args, **kwargs)
        self.backward()
        self.optimize(set_to_none)

    def eval_forward(self, *args: Any) -> None:
        def eval_forward(side: Side) -> Any:
            with torch.no_grad():
                return side.model(*copies(args))

        self.both(eval_forward)

    def check(self, where: str) -> None:
        """Compare registered parameters, sharded parameters and all gradients."""
        for name, theirs in self.theirs.shards.items():
            ours = self.ours.shards[name]
            compare(ours, theirs, self.tolerance, f"shard of {name} {where}")
            compare(ours.grad, theirs.grad, self.tolerance, f"gradient of {name} {where}")
        theirs = dict(self.theirs.model.named_parameters())
        ours = dict(self.ours.model.named_parameters())
        assert list(ours) == list(theirs), where
        for name in theirs:
            sides = ((theirs, self.theirs), (ours, self.ours))
            if all(found[name] is side.shards.get(name) for found, side in sides):
                continue  # compared above
            place = f"registered {name} {where}"
            compare(ours[name], theirs[name], self.tolerance, place)
            compare(ours[name].grad, theirs[name].grad, self.tolerance, f"gradient of {place}")
        buffers = dict(self.theirs.model.named_buffers())
        compare(dict(self.ours.model.named_buffers()), buffers, self.tolerance, f"buffers {where}")

    def check_state_dict(self) -> None:
        """Only while both are sharded: torch's state_dict would reshard."""
        self.both(lambda side: side.model.state_dict(), "state_dict")

    def recapture(self) -> None:
        """For calls that replace parameter objects."""
        for side in (self.theirs, self.ours):
            side.shards = dict(side.model.named_parameters())

    def realign(self) -> None:
        """Go on from torch's shards and gradients, where roundings would add up."""
        if not self.tolerance.realign:
            return
        with torch.no_grad():
            for name, theirs in self.theirs.shards.items():
                local(self.ours.shards[name]).copy_(local(theirs))
                if theirs.grad is not None:
                    local(self.ours.shards[name].grad).copy_(local(theirs.grad))


# --- comparison -----------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd."""
    # A DTensor's own methods cost more than all else in a comparison.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its values."""
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    spec: tuple[Any, ...] = ("plain",)
    if isinstance(tensor, DTensor):
        part = tensor._local_tensor
        spec = (tensor.placements, tensor.device_mesh, part.shape, part.stride())
    return kind, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, spec


def compare(ours: Any, theirs: Any, tolerance: Tolerance, where: str) -> None:
    """Assert that two trees are of the same types and hold the same values."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {type(ours)} for a tensor"
        assert describe(ours) == describe(theirs), (
            f"{where}: {describe(ours)} for {describe(theirs)}"
        )
        if not theirs.is_meta:
            compare_values(local(ours), local(theirs), tolerance, where)
        return
    assert type(ours) is type(theirs), f"{where}: {type(ours)} for {type(theirs)}"
    if dataclasses.is_dataclass(theirs):
        compare(vars(ours), vars(theirs), tolerance, where)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), f"{where}: keys {list(ours)} for {list(theirs)}"
        for key in theirs:
            compare(ours[key], theirs[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(theirs, Sequence) and not isinstance(theirs, str):
        assert len(ours) == len(theirs), f"{where}: {len(ours)} items for {len(theirs)}"
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            compare(mine, other, tolerance, f"{where}[{index}]")
    elif isinstance(theirs, int | float | str | bool | None | torch.dtype | torch.Size):
        assert ours == theirs, f"{where}: {ours!r} for {theirs!r}"


def compare_values(ours: Tensor, theirs: Tensor, tolerance: Tolerance, where: str) -> None:
    if ours.dtype is theirs.dtype and torch.equal(ours, theirs):
        return
    largest = 0.0
    if theirs.is_floating_point() or theirs.is_complex():
        finite = theirs[theirs.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=tolerance.relative,
        atol=tolerance.scaled * largest + tolerance.absolute,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}\nours {ours}\ntorch {theirs}",
    )


def total(tree: Any) -> Tensor:
    """A loss of all floating tensors in a tree that need a gradient; uneven in its elements."""
    losses = [
        (leaf.float() * torch.linspace(0.5, 1.5, leaf.numel()).view(leaf.shape)).sum()
        + leaf.float().pow(2).mean()
        for leaf in leaves(tree)
        if leaf.requires_grad
    ]
    return torch.stack(losses).sum()


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return []


def copies(tree: Any) -> Any:
    """The same tree with tensors of its own: no side sees what the other does to its inputs."""
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if dataclasses.is_dataclass(tree):
        return dataclasses.replace(tree, **{k: copies(v) for k, v in vars(tree).items()})
    if isinstance(tree, Mapping):
        return type(tree)((key, copies(value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(copies(item) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(copies(item) for item in tree)
    return tree


# --- the same model without sharding --------------------------------------------------------------


class Plain:
    """The model unsharded, with the losses of all ranks: what sharded training has to equal."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        harness.seed_everything(1)
        self.model = build()
        self.optimizer = sgd(self.model.parameters())

    def backward(self, losses: Sequence[Tensor], divisor: float) -> None:
        """Gradients of the sum of the ranks' losses over `divisor`; a loss may be without graph."""
        for loss in losses:
            if loss.requires_grad:
                (loss / divisor).backward()

    def check(self, side: "Side", tolerance: Tolerance) -> None:
        """Compare this rank's shards and gradients with these."""
        for name, parameter in self.model.named_parameters():
            shard = side.shards[name]
            self.check_part(shard, parameter, tolerance, name)
            if parameter.grad is None:
                assert shard.grad is None, f"{name} has a gradient"
                continue
            assert shard.grad is not None, f"{name} has no gradient"
            self.check_part(shard.grad, parameter.grad, tolerance, f"gradient of {name}")

    @staticmethod
    def check_part(shard: Tensor, whole: Tensor, tolerance: Tolerance, name: str) -> None:
        """The scale is the whole tensor's."""
        largest = whole.detach().abs().max().item() if whole.numel() else 0.0
        absolute = max(tolerance.absolute, tolerance.scaled * largest)
        by_whole = dataclasses.replace(tolerance, absolute=absolute)
        compare_values(local(shard), own_part(whole, shard), by_whole, name)


def own_part(whole: Tensor, shard: Tensor) -> Tensor:
    """What this rank holds of it, without a collective, which ranks that differ would not join."""
    if not isinstance(shard, DTensor):
        return whole.detach()
    sizes, starts = compute_local_shape_and_global_offset(
        whole.shape, shard.device_mesh, shard.placements
    )
    part = whole.detach()
    for dim, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        part = part.narrow(dim, min(start, part.size(dim)), size)
    return part


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
