"""The same model under torch's FullyShardedDataParallel and under ours, side by side."""

import warnings
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed.fsdp as torch_fsdp
from models import WIDTH, Net
from parity import EXACT, Tolerance, compare
from torch import nn

CPU = torch.device("cpu")


class Side:
    """A wrapped model and its optimizer; `fsdp` is the class."""

    def __init__(
        self,
        fsdp: Any,
        build: Callable[[], nn.Module],
        wrap: Callable[[nn.Module, Any], nn.Module],
        optimizer: Any,
    ) -> None:
        self.fsdp = fsdp
        harness.seed_everything(1)
        self.model = wrap(build(), fsdp)
        self.optimizer = optimizer(self.model.parameters())

    def wholes(self, with_grads: bool = True) -> dict[str, Any]:
        """Parameters, buffers and gradients, whole."""
        found: dict[str, Any] = {}
        with self.fsdp.summon_full_params(self.model, writeback=False, with_grads=with_grads):
            for name, param in self.model.named_parameters():
                found[name] = param.detach().clone()
                if with_grads:
                    found[f"{name}, gradient"] = None if param.grad is None else param.grad.clone()
            found |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return found


# torch adds up the squares of a rank's flat parameters, ours those of each parameter: on some CPUs
# the norm is a rounding off, and so is what follows.
CLIPPED = Tolerance(relative=1e-6, scaled=1e-6)


class Sides:
    """Both; `both` calls something on each and compares what it returns."""

    def __init__(
        self,
        build: Callable[[], nn.Module] = Net,
        wrap: Callable[..., nn.Module] | None = None,
        *,
        tolerance: Tolerance | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=0.05))
        wrap = wrap or wrap_blocks
        warnings.simplefilter("ignore")

        def wrapped(model: nn.Module, fsdp: Any) -> nn.Module:
            return wrap(model, fsdp, use_orig_params=True, **options)

        self.theirs = Side(Torchs, build, wrapped, optimizer)
        ours = harness.implementation().FullyShardedDataParallel
        self.ours = Side(ours, build, wrapped, optimizer)
        self.tolerance = tolerance or Tolerance.of(2)
        self.n_checks = 0

    def both(self, fn: Callable[[Side], Any], where: str = "") -> Any:
        """Calls it on both; compares and returns our result."""
        self.n_checks += 1
        results = []
        for side in (self.theirs, self.ours):
            harness.seed_everything(100 + self.n_checks)
            results.append(fn(side))
        compare(results[1], results[0], self.tolerance, f"{where} (check {self.n_checks})")
        return results[1]

    def step(self, n_micro: int = 1, clip: float | None = None) -> None:
        """A training step: losses, gradients, the norm, then parameters are compared."""
        if clip is not None and self.tolerance == EXACT:
            self.tolerance = CLIPPED

        def train(side: Side) -> list[Any]:
            side.optimizer.zero_grad()
            losses = []
            for micro in range(n_micro):
                is_last = micro == n_micro - 1
                with torch_nullcontext() if is_last else side.model.no_sync():
                    loss = side.model(batch(self.n_checks + micro)).square().mean()
                    loss.backward()
                losses.append(loss.detach())
            norm = None if clip is None else side.model.clip_grad_norm_(clip)
            return [losses, norm, side.wholes()]

        self.both(train, "backward")

        def update(side: Side) -> Any:
            side.optimizer.step()
            return side.wholes(with_grads=False)

        self.both(update, "optimizer")


def torch_nullcontext() -> Any:
    return torch.enable_grad()


class Torchs(torch_fsdp.FullyShardedDataParallel):
    """torch's, on CPU ranks."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **{"device_id": CPU, **options})


def batch(seed: int, n: int = 4) -> torch.Tensor:
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + seed)
    return torch.randn(n, WIDTH, generator=generator)


def wrap_root(model: nn.Module, fsdp: Any, **options: Any) -> nn.Module:
    return fsdp(model, **options)


def wrap_blocks(model: nn.Module, fsdp: Any, **options: Any) -> nn.Module:
    """By hand: a unit per block, then the rest."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fsdp(block, **options)
    return fsdp(model, **options)
