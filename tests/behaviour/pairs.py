"""What one behaviour test needs: run it under torch and under the tested one, compare, describe."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import models
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from harness import cached_mesh
from parity import EXACT, Tolerance, compare, total
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# What the installed torch does, where versions differ.
features = SimpleNamespace(
    # Gradients have dtypes of their own: a reduction without `reduce_dtype` runs in the parameter's
    # dtype, micro-batches without synchronisation are summed in it, and a failed backward's
    # gradients are dropped by `reset_iter_state`.
    grad_dtype=hasattr(torch.Tensor, "_has_grad_dtype_override"),
    manual_finalization=hasattr(torch_fsdp.FSDPModule, "finalize_backward"),
)

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)
ROUGH = Tolerance(scaled=2**-6)  # a few roundings to bfloat16


def agree(see: Callable[[Any], Any], tolerance: Tolerance = EXACT) -> Any:
    """What `see(fsdp)` returns under torch's fsdp and under ours; asserts that both are equal."""
    results = []
    for fsdp in (torch_fsdp, harness.implementation()):
        harness.seed_everything(1)
        results.append(see(fsdp))
    print(f"torch: {results[0]}\nours: {results[1]}")  # shown with a failure
    compare(results[1], results[0], tolerance, f"what {see.__qualname__} returns")
    return results[1]


def raised(call: Callable[[], Any], *texts: str) -> str:
    """The name of the exception that `call` raises; its message holds all of `texts`."""
    try:
        call()
    except Exception as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in {error!r}"
        return type(error).__name__
    return "nothing"


def sharded(
    fsdp: Any,
    build: Callable[[], nn.Module] = models.Net,
    shard: models.Sharding = models.shard_blocks,
    **options: Any,
) -> Any:
    """A model with equal weights on every call, sharded."""
    harness.seed_everything(7)
    model = build()
    shard(model, fsdp, **options)
    return model


def linear(fsdp: Any, n: int = 4, bias: bool = False, **options: Any) -> Any:
    """A single unit: an n x n matrix of ones."""
    model = nn.Linear(n, n, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    return fsdp.fully_shard(model, **options)


def chain(fsdp: Any, n_units: int = 2, n: int = 4, **options: Any) -> Any:
    """Linear units in a root without parameters of its own."""
    harness.seed_everything(7)
    model = nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(n_units)))
    for unit in model:
        fsdp.fully_shard(unit, **options)
    return fsdp.fully_shard(model, **options)


def hsdp_mesh() -> Any:
    """Two replicas of two shards each, or of one where there are two ranks."""
    return cached_mesh((2, dist.get_world_size() // 2), ("replicate", "shard"))


def own(module: nn.Module) -> str:
    """What is registered in the module itself, not below it."""
    kinds = {
        "sharded" if isinstance(parameter, DTensor) else "unsharded"
        for parameter in module.parameters(recurse=False)
    }
    return " and ".join(sorted(kinds)) or "nothing"


def registered(model: nn.Module) -> list[str]:
    """The units' states, in the order of `named_modules`, by what is registered below each."""
    names = []
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            inner = {
                id(p)
                for child in module.modules()
                if child is not module and isinstance(child, torch_fsdp.FSDPModule)
                for p in child.parameters()
            }
            parameters = [p for p in module.parameters() if id(p) not in inner]
            kinds = {"sharded" if isinstance(p, DTensor) else "unsharded" for p in parameters}
            names.append(" and ".join(sorted(kinds)) or "nothing")
    return names


def shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """The sharded parameters, to be taken while all units are sharded."""
    return dict(model.named_parameters())


def local(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """This rank's part of every gradient, as it is now."""
    return {name: local(parameter.grad) for name, parameter in parameters.items()}


def weights(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    return {name: local(parameter) for name, parameter in parameters.items()}


def backward(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Forward and backward of a loss over all outputs."""
    total(model(*args, **kwargs)).backward()


def full(tensor: Tensor | None) -> Tensor | None:
    """The whole of a parameter or gradient; all ranks call this."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Collectives(TorchDispatchMode):
    """Notes the names of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def counts(call: Callable[[], Any]) -> list[int]:
    """How many all-gathers, reduce-scatters and all-reduces `call` makes.

    Only for models that have not run yet: a tree that goes through shared memory by then makes no
    collectives that could be counted.
    """
    with Collectives() as mode:
        call()
    names = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    found = [mode.names.count(name) for name in names]
    assert sum(found) == len(mode.names), mode.names
    return found


def ranges(call: Callable[[], Any]) -> list[str]:
    """The profiler ranges of FSDP that `call` opens, in order of their beginnings."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    found = [event for event in profile.events() if event.name.startswith("FSDP::")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def sum_backward(model: Any, *args: Any) -> None:
    model(*args).sum().backward()
