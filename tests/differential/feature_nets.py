"""What programs with features call by name: tensors around others, meshes, modes, collectives."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import cached_mesh
from models import Block
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# What fully_shard does to a shard: the results are of the subclass again.
PRESERVING = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.alias.default,
    aten.t.default,
}


class Wrapped(Tensor):
    """A tensor around another one, without an extension."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], *_: Any) -> "Wrapped":
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        args, kwargs = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.name.endswith("_") and isinstance(first, Wrapped):
            return first
        return tree_map_only(Tensor, cls, result) if func in PRESERVING else result


def padded(shard: Tensor, n_rows: int) -> Tensor:
    """A rank's rows, and zeros up to what each rank sends."""
    rows = shard.new_zeros((n_rows, *shard.shape[1:]))
    rows[: shard.size(0)] = shard
    return rows


class Scaled(Wrapped):
    """As float8: travels in few bits with a scale for each rank's rows, two tensors a parameter.

    Where ranks are padded torch takes nothing but inputs of the shards' padded size: two summands.
    In a group of one rank it takes one input alone.
    """

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        with torch.no_grad():
            rows = padded(self.inner, math.ceil(outer_size[0] / mesh.size()))
            if mesh.size() == 1:
                return (rows,), "whole"
            if outer_size[0] % mesh.size():
                large = rows.to(torch.bfloat16)
                return (large, (rows - large).to(torch.float16)), "summands"
            scale = rows.abs().max().clamp(min=1e-6) / 127
            return ((rows / scale).round().to(torch.int8), scale.float()), "scales"

    @staticmethod
    def whole(outputs, metadata, param_dtype):
        if metadata == "summands":
            large, small = outputs
            return (large.float() + small).to(param_dtype)
        if metadata == "whole":
            return outputs[0].to(param_dtype)
        codes, scales = outputs
        parts = codes.unflatten(0, (scales.numel(), -1)).to(param_dtype)
        return (parts * scales.view(-1, *[1] * (parts.ndim - 1)).to(param_dtype)).flatten(0, 1)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        with torch.no_grad():
            whole = self.whole(outputs, metadata, param_dtype)
            if out is None:
                return whole, ()
            # Autograd has saved it in forward.
            target = out.to_local() if isinstance(out, DTensor) else out
            with torch.autograd._unsafe_preserve_version_counter(target):
                target.copy_(whole[: target.size(0)])
        return None


class Kept(Wrapped):
    """Travels in the policy's dtype and comes out as a tensor around what was gathered."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = padded(self.inner.detach(), math.ceil(outer_size[0] / mesh.size()))
        return (rows.to(mp_policy.param_dtype or rows.dtype),), "kept"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "kept"
        if out is None:
            return Unpacked(outputs[0]), outputs
        inner = (out._local_tensor if isinstance(out, DTensor) else out).inner
        assert inner.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr()
        return None


class Unpacked(Wrapped):
    """Multiplies by a function of its own, as quantized weights do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            product = UnpackedLinear.apply(x, weight)
            return product if not bias or bias[0] is None else product + bias[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class UnpackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.inner.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2), x.flatten(0, -2)
        return grad @ weight.inner, flat[0].t() @ flat[1]


def convert(model: nn.Module, kind: type[Wrapped], every: int = 1) -> int:
    """Weights of linear layers become tensors of the class; gives how many."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)][::every]
    for layer in layers:
        weight = layer.weight.detach()
        if isinstance(weight, DTensor):
            part = kind(weight.to_local())
            size = {"shape": weight.shape, "stride": weight.stride()}  # ranks may be uneven
            new: Tensor = DTensor.from_local(part, weight.device_mesh, weight.placements, **size)
        else:
            new = kind(weight)
        layer.weight = nn.Parameter(new, requires_grad=layer.weight.requires_grad)
    return len(layers)


# --- meshes ---------------------------------------------------------------------------------------


def parallelize(model: nn.Module, mesh: DeviceMesh) -> int:
    """Columns, then rows of each block; gives how many blocks there are."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return len(blocks)


def spread(model: nn.Module, mesh: DeviceMesh, placements: list[Any]) -> None:
    """Parameters become DTensors on the mesh of everything, and so do the inputs of forward."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    everywhere = [Replicate()] * mesh.ndim

    def wrap(module: nn.Module, *given: Any) -> Any:
        return tree_map_only(Tensor, lambda t: DTensor.from_local(t, mesh, everywhere), given)

    def unwrap(module: nn.Module, args: Any, out: Any) -> Any:
        return out.redistribute(placements=everywhere).to_local()

    model.register_forward_pre_hook(wrap, with_kwargs=True)
    model.register_forward_hook(unwrap)


def data_rank(mesh: DeviceMesh, *names: str) -> int:
    """This rank's number among those that have data of their own."""
    number = 0
    for name in names:
        number = number * mesh[name].size() + mesh[name].get_local_rank()
    return number


@functools.cache
def second_info(world: int) -> Any:
    """Over all ranks again, with a process group of its own."""
    group = dist.new_group(range(world))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("second",))
    return _fsdp_common.FSDPMeshInfo(mesh, 0)


def vectors_apart(world: int) -> Callable[[nn.Parameter], Any]:
    """Places vectors on a mesh of their own."""
    info = second_info(world)
    result = _fsdp_common.ShardPlacementResult(None, info)
    return lambda parameter: result if parameter.ndim == 1 else None


# --- collectives and who watches them -------------------------------------------------------------


# Under the names of torch before 2.13, too.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Allocating:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Allocating):
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append(("gather", output_tensor.numel(), str(output_tensor.dtype)))
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Allocating):
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append(("reduce", output_tensor.numel(), str(output_tensor.dtype)))
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduce_hook(calls: list[Any], factor: float) -> Callable[[Tensor], None]:
    """Notes what it gets, and scales it."""

    def hook(output: Tensor) -> None:
        calls.append(("hook", output.numel(), str(output.dtype)))
        output.mul_(factor)

    return hook


class Mode(TorchDispatchMode):
    """Sees every operator and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def without_sizes(calls: list[Any]) -> list[Any]:
    """What collectives were given, but how much of sums."""
    return [(name, 0 if name != "gather" else size, dtype) for name, size, dtype in calls]


METHODS = ("unshard", "reshard", "post_backward", "pre_backward")


@contextlib.contextmanager
def replaced_methods(model: nn.Module, fsdp: Any, calls: set[str]) -> Iterator[None]:
    """As memory trackers do: methods of each unit's group are the tool's own for some time."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for method in METHODS:
                found.append((group, method))
                setattr(group, method, noting(getattr(group, method), f"{method} {name}", calls))
    try:
        yield
    finally:
        for group, method in found:
            group.__dict__.pop(method, None)


def noting(original: Callable[..., Any], name: str, calls: set[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls.add(name)
        return original(*args, **options)

    return call


FEATURE_NAMES: dict[str, Any] = {
    "AllGather": AllGather,
    "Kept": Kept,
    "Mode": Mode,
    "ReduceScatter": ReduceScatter,
    "Replicate": Replicate,
    "Scaled": Scaled,
    "Shard": Shard,
    "Wrapped": Wrapped,
    "cached_mesh": cached_mesh,
    "convert": convert,
    "data_rank": data_rank,
    "parallelize": parallelize,
    "reduce_hook": reduce_hook,
    "replaced_methods": replaced_methods,
    "replicate": replicate,
    "spread": spread,
    "vectors_apart": vectors_apart,
    "without_sizes": without_sizes,
}
