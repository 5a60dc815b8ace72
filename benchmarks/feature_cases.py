"""The features that bench_features.py times: how a model of many small units takes each of them.

torch is imported where ranks need it; who prints a table needs none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

WIDTH = 16
EXACT, HALF = 1e-4, 0.1  # of the largest value; bfloat16 through 40 layers


def linears(n_units: int) -> Any:
    """Orthogonal, so that no gradient is small after many layers."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_units)])
    for module in model:
        torch.nn.init.orthogonal_(module.weight)
    return model


def shard_all(api: Any, model: Any, each: Callable[[Any], None] | None = None, **options: Any):  # noqa: ANN201
    """A unit per layer, and a root without parameters of its own."""
    for module in model:
        api.fully_shard(module, **options)
        if each is not None:
            each(module)
    return api.fully_shard(model, **options)


@functools.cache
def mesh_of(*dims: tuple[str, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(name for name, _ in dims)
    return init_device_mesh("cpu", tuple(size for _, size in dims), mesh_dim_names=names)


@dataclass
class Feature:
    """A model without sharding, the same one sharded, and what goes on around its steps."""

    name: str
    title: str
    ranks: int
    goal: str
    shard: Callable[[Any, Any], Any]  # of an implementation and a model
    prepare: Callable[[Any], Any] = lambda model: model  # of both models
    first: Callable[[], AbstractContextManager] = contextlib.nullcontext  # around the first step
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext  # around all others
    tolerance: float = EXACT
    transport: str = ""
    data_mesh: Callable[[], Any] = lambda: None  # where ranks share their data: the others' mesh
    missing: Callable[[], str] = lambda: ""  # why the installed torch lacks it
    # Of the process group, which a unit makes in a step since somebody has a part in them.
    calls: tuple[str, ...] = ()
    # Each implementation in processes of its own: one leaves threads there that wake all the time.
    apart: bool = False

    def plain(self, n_units: int) -> Any:
        return self.prepare(linears(n_units))

    def sharded(self, api: Any, n_units: int) -> Any:
        return self.shard(api, self.plain(n_units))

    def calling(self, n_units: int) -> Any:
        """The model without sharding, and those calls of units' sizes where units make them."""
        return with_calls(self.plain(n_units), self.calls)

    def data_group(self) -> Any:
        mesh = self.data_mesh()
        return None if mesh is None else mesh.get_group()

    def data_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self.data_group())


CASES: dict[str, Feature] = {}


def case(name: str, title: str, ranks: int, goal: str, shard: Any = shard_all, **more: Any) -> None:
    CASES[name] = Feature(name, title, ranks, goal, shard, **more)


# --- what the core runs today ---------------------------------------------------------------------


def shard_in_bf16(api: Any, model: Any) -> Any:
    import torch

    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard_all(api, model, mp_policy=policy)


def shard_offloaded(api: Any, model: Any) -> Any:
    return shard_all(api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=False))


def compile_blocks(model: Any) -> Any:
    for module in model:
        module.compile(backend="aot_eager")
    return model


def hsdp_mesh() -> Any:
    return mesh_of(("replicate", 2), ("shard", 2))


def shard_hsdp(api: Any, model: Any) -> Any:
    return shard_all(api, model, mesh=hsdp_mesh())


case("plain", "plain", 2, "stay 1.8")
case("bf16", "bf16", 2, "stay 4.5", shard_in_bf16, tolerance=HALF)
case("offload", "CPU offload", 2, "stay 2.8", shard_offloaded)
case("compiled", "compiled blocks", 2, "stay 10.8", prepare=compile_blocks)
case("hsdp", "HSDP", 4, "stay 45", shard_hsdp)


# --- DTensors -------------------------------------------------------------------------------------


def mesh_2d() -> Any:
    return mesh_of(("dp", 2), ("tp", 2))


def parallelize(model: Any) -> Any:
    """Columns and rows in turn: activations are split between the two layers of a pair."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = (ColwiseParallel, RowwiseParallel)
    plan = {str(index): styles[index % 2]() for index in range(len(model))}
    return parallelize_module(model, mesh_2d()["tp"], plan)


def shard_2d(api: Any, model: Any) -> Any:
    return shard_all(api, model, mesh=mesh_2d()["dp"])


def distribute(model: Any) -> Any:
    """Parameters are DTensors on the mesh of everything, and activations in between as well."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh, everywhere = mesh_2d(), [Replicate(), Replicate()]
    for module in model:
        for name, parameter in list(module.named_parameters()):
            spread = distribute_tensor(parameter.detach(), mesh, everywhere)
            setattr(module, name, torch.nn.Parameter(spread))
    model.register_forward_pre_hook(
        lambda module, args: (DTensor.from_local(args[0], mesh, everywhere),)
    )
    model.register_forward_hook(lambda module, args, out: out.to_local())
    return model


def shard_dims(api: Any, model: Any) -> Any:
    from torch.distributed.fsdp import DataParallelMeshDims

    return shard_all(api, model, mesh=mesh_2d(), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def missing_dims() -> str:
    import torch.distributed.fsdp as fsdp

    return "" if hasattr(fsdp, "DataParallelMeshDims") else "this torch has no dp_mesh_dims"


on_data_parallel: dict[str, Any] = {"data_mesh": lambda: mesh_2d()["dp"]}
case("tensor_parallel", "tensor parallel, 2-D", 4, "<= 300", shard_2d, prepare=parallelize)
case("dp_mesh_dims", "dp_mesh_dims", 4, "<= 300", shard_dims, prepare=distribute)
CASES["dp_mesh_dims"].missing = missing_dims
for _name in ("tensor_parallel", "dp_mesh_dims"):
    CASES[_name].data_mesh = on_data_parallel["data_mesh"]


# --- subclasses -----------------------------------------------------------------------------------


@functools.cache
def wrapper_classes() -> tuple[Any, Any]:
    """A tensor around another, and one that is gathered by its own methods, in bfloat16."""
    import torch
    from torch.utils._pytree import tree_map_only

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> Any:
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, tensors: Any, *_: Any) -> Any:
            return cls(tensors["inner"])

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # noqa: ANN206
            args, kwargs = tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
            result = func(*args, **kwargs)
            return tree_map_only(torch.Tensor, cls, result)

    class Gathered(Wrapper):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.inner.bfloat16(), self.inner.abs().max()), None

        def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None):  # noqa: ANN201
            if out is None:
                whole = outputs[0].to(dtype)
                return whole, (*outputs, whole)
            # Autograd has saved it in forward.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0])
            return None

    return Wrapper, Gathered


def shard_wrapped(index: int) -> Callable[[Any, Any], Any]:
    def shard(api: Any, model: Any) -> Any:
        import torch

        kind = wrapper_classes()[index]
        for module in model:
            module.weight = torch.nn.Parameter(kind(module.weight.detach()))
        return shard_all(api, model)

    return shard


case("subclass", "subclass without extension", 2, "<= 150", shard_wrapped(0))
case("extension", "all-gather extension", 2, "<= 200", shard_wrapped(1), tolerance=HALF)


# --- other collectives ----------------------------------------------------------------------------


def shard_to_two(api: Any, model: Any) -> Any:
    return shard_all(api, model, reshard_after_forward=2)


def shard_with_hook(api: Any, model: Any) -> Any:
    def add_hook(module: Any) -> None:
        module.set_all_reduce_hook(lambda output: None)

    return shard_all(api, model, add_hook, mesh=hsdp_mesh())


def with_calls(model: Any, calls: tuple[str, ...]) -> Any:
    import torch
    import torch.distributed as dist

    n_ranks, numel = dist.get_world_size(), sum(p.numel() for p in model[0].parameters())
    group = hsdp_mesh().get_group("replicate") if calls == SUMS else None
    whole, shard = torch.zeros(numel), torch.zeros(numel // n_ranks)

    def gather(*_: Any) -> None:
        dist.all_gather_into_tensor(whole, shard)

    def scatter(*_: Any) -> None:
        dist.reduce_scatter_tensor(shard, whole)

    def add_up(*_: Any) -> None:
        dist.all_reduce(shard, group=group)

    for module in model:
        if "gather" in calls:
            module.register_forward_pre_hook(gather)
            module.register_full_backward_pre_hook(gather)
        if "scatter" in calls:
            module.bias.register_post_accumulate_grad_hook(scatter)
        if "sum" in calls:
            module.bias.register_post_accumulate_grad_hook(add_up)
    return model


GATHERS, ALL, SUMS = ("gather",), ("gather", "scatter"), ("sum",)


class AllGather:
    """What torch does, written by a user."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def shard_with_gather(api: Any, model: Any) -> Any:
    return shard_all(api, model, lambda module: module.set_custom_all_gather(AllGather()))


def replicate_all(api: Any, model: Any) -> Any:
    """torch's `replicate`, which makes units of fsdp_c while that is installed."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    getattr(api, "install", lambda: None)()
    try:
        for module in model:
            replicate(module)
        return replicate(model)
    finally:
        getattr(api, "uninstall", lambda: None)()


@functools.cache
def second_mesh() -> Any:
    """Over all ranks again, with a process group of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group(range(dist.get_world_size()))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("biases",))


def shard_two_meshes(api: Any, model: Any) -> Any:
    """Biases over a mesh of their own: two groups in each unit."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    info = FSDPMeshInfo(second_mesh(), 0)

    def place(parameter: Any) -> Any:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    return shard_all(api, model, shard_placement_fn=place)


def missing_meshes() -> str:
    import torch.distributed.fsdp._fully_shard._fsdp_common as common

    has = hasattr(common, "ShardPlacementResult")
    return "" if has else "this torch has one mesh per unit"


def shard_watched(api: Any, model: Any) -> Any:
    """As memory trackers do: a method of each group is one of the tool's."""

    def watch(module: Any) -> None:
        group = module._get_fsdp_state()._fsdp_param_group
        unshard = group.unshard
        group.unshard = lambda *args, **options: unshard(*args, **options)

    return shard_all(api, model, watch)


# torch makes two process groups for each unit: 250 threads a rank, awake 8,000 times a second.
case("reshard_int", "reshard_after_forward=2", 4, "<= 150", shard_to_two, apart=True)
case("all_reduce_hook", "all-reduce hook (HSDP)", 4, "<= 400", shard_with_hook, calls=SUMS)
case("custom_all_gather", "custom all-gather", 2, "<= 900", shard_with_gather, calls=GATHERS)
case("replicate", "replicate", 2, "<= 20", replicate_all)
case("several_meshes", "two meshes in a unit", 2, "-", shard_two_meshes, missing=missing_meshes)
case("replaced_method", "a method of groups replaced", 2, "-", shard_watched)


# --- modes and transports -------------------------------------------------------------------------


def dispatch_mode() -> AbstractContextManager:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # noqa: ANN204
            return func(*args, **(kwargs or {}))

    return Mode()


watched: dict[str, Any] = {"first": dispatch_mode, "around": dispatch_mode, "calls": ALL}
case("mode", "a dispatch mode, active", 2, "<= 900", **watched)
case("after_mode", "after a dispatch mode", 2, "as plain", first=dispatch_mode)
case("messages", "the process group's messages", 2, "<= 400", transport="callback")
