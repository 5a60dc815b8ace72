"""What `fully_shard` refuses: the error, and the module as it was, still good for a right call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness import cached_mesh, implementation, run_ranks
from snapshots import Net, Snapshot, check_trains
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only


@dataclass
class Attempt:
    """A call that must fail, and the call that must work after it."""

    root: nn.Module
    call: Callable[[], Any]
    # Makes the right call on `root`. Without it only the root's state is looked at.
    repair: Callable[[], Any] | None = None
    reference: Callable[[], nn.Module] = Net


@dataclass
class Case:
    error: type[Exception]
    match: str
    build: Callable[[Any, DeviceMesh], Attempt]
    n_ranks: int
    is_strict: bool = False  # fsdp_c accepts it, unless it is told to refuse what torch refuses


CASES: dict[str, Case] = {}


def case(
    error: type[Exception], match: str, n_ranks: int = 1, is_strict: bool = False
) -> Callable[..., Any]:
    """Adds a function that builds an `Attempt` to the table."""

    def add(build: Callable[[Any, DeviceMesh], Attempt]) -> Callable[[Any, DeviceMesh], Attempt]:
        CASES[build.__name__] = Case(error, match, build, n_ranks, is_strict)
        return build

    return add


def attempt(
    api: Any,
    default_mesh: DeviceMesh,
    net: nn.Module | None = None,
    target: Any = None,
    reference: Callable[[], nn.Module] = Net,
    **wrong: Any,
) -> Attempt:
    """The usual case: one wrong argument, or a wrong `target`; then the call on all of `net`."""
    net = Net() if net is None else net
    target = net if target is None else target
    return Attempt(
        net,
        lambda: api.fully_shard(target, **{"mesh": default_mesh, **wrong}),
        lambda: api.fully_shard(net, mesh=default_mesh),
        reference,
    )


# --- E1 to E4: the module ---


@case(AssertionError, "can only be applied to a module once")
def applied_twice(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    api.fully_shard(net.first, mesh=mesh)
    return attempt(api, mesh, net, net.first)


@case(AssertionError, "can only be applied to a module once")
def applied_twice_in_a_list(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    api.fully_shard(net.second, mesh=mesh)
    return Attempt(
        net,
        lambda: api.fully_shard([net.first, net.second], mesh=mesh),
        lambda: [api.fully_shard(m, mesh=mesh) for m in (net.first, net)],
    )


class ListNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.layers = nn.ModuleList([net.first, net.second])
        self.named = nn.ModuleDict({"scale": nn.Linear(3, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.named["scale"](self.layers[1](self.layers[0](x)))


@case(ValueError, "containers that do not implement forward")
def module_list(api: Any, mesh: DeviceMesh) -> Attempt:
    net = ListNet()
    return attempt(api, mesh, net, net.layers, ListNet)


@case(ValueError, "containers that do not implement forward")
def module_dict(api: Any, mesh: DeviceMesh) -> Attempt:
    net = ListNet()
    return attempt(api, mesh, net, net.named, ListNet)


@case(ValueError, "module")
def empty_list(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, target=[])


@case(TypeError, "int")
def not_a_module(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, target=3)


@case(TypeError, "int")
def not_a_module_in_a_list(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    return attempt(api, mesh, net, [net.first, 3])


# --- E5 to E7: the mesh ---


@case(ValueError, "expects a 1D or 2D DeviceMesh but got")
def mesh_of_three_dims(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, mesh=cached_mesh((1, 1, 1), ("a", "b", "c")))


@case(AssertionError, "init the 2D mesh for HSDP with mesh_dim_names")
def mesh_without_names(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, mesh=cached_mesh((1, 1)))


@case(TypeError, "mesh")
def mesh_of_another_type(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, mesh="cpu")


@case(ValueError, "mesh_dim_names")
def dims_of_an_unnamed_mesh(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))


@case(ValueError, "not found in mesh.mesh_dim_names")
def unknown_dim(api: Any, mesh: DeviceMesh) -> Attempt:
    dims = api.DataParallelMeshDims(shard="other")
    return attempt(api, mesh, mesh=cached_mesh((1,), ("dp",)), dp_mesh_dims=dims)


@case(ValueError, "At least one of shard or replicate")
def dims_without_a_field(api: Any, mesh: DeviceMesh) -> Attempt:
    dims = api.DataParallelMeshDims(shard="dp")
    dims.shard = None
    return attempt(api, mesh, mesh=cached_mesh((1,), ("dp",)), dp_mesh_dims=dims)


# --- E8 to E11: a mesh with named data-parallel dims ---


def on_mesh(mesh: DeviceMesh, placements: list[Any]) -> Net:
    """A `Net` whose parameters are DTensors."""
    net = Net()
    for layer in (net.first, net.second):
        for name, param in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh, placements)))
    return net


@case(ValueError, "must be DTensors")
def dims_and_plain_parameters(api: Any, mesh: DeviceMesh) -> Attempt:
    dims = api.DataParallelMeshDims(shard="dp")
    return attempt(api, mesh, mesh=cached_mesh((1,), ("dp",)), dp_mesh_dims=dims)


@case(ValueError, "same mesh")
def dims_and_parameters_of_another_mesh(api: Any, mesh: DeviceMesh) -> Attempt:
    net = on_mesh(cached_mesh((1, 1, 1), ("dp", "tp", "cp")), [Replicate()] * 3)
    whole, dims = cached_mesh((1, 1), ("dp", "tp")), api.DataParallelMeshDims(shard="dp")
    return Attempt(net, lambda: api.fully_shard(net, mesh=whole, dp_mesh_dims=dims))


@case(ValueError, "Expected Replicate")
def dims_and_sharded_parameters(api: Any, mesh: DeviceMesh) -> Attempt:
    whole, dims = cached_mesh((1, 1), ("dp", "tp")), api.DataParallelMeshDims(shard="dp")
    net = on_mesh(whole, [Shard(0), Replicate()])
    return Attempt(net, lambda: api.fully_shard(net, mesh=whole, dp_mesh_dims=dims))


@case(NotImplementedError, "reshard_after_forward as int")
def dims_and_a_reshard_size(api: Any, mesh: DeviceMesh) -> Attempt:
    whole, dims = cached_mesh((1, 1), ("dp", "tp")), api.DataParallelMeshDims(shard="dp")
    net = on_mesh(whole, [Replicate(), Replicate()])
    return Attempt(
        net, lambda: api.fully_shard(net, mesh=whole, dp_mesh_dims=dims, reshard_after_forward=1)
    )


# --- E12, E13: reshard_after_forward ---


@case(ValueError, "factor of 2", n_ranks=2)
def reshard_size_that_does_not_divide(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, reshard_after_forward=3)


@case(ValueError, "factor of 2", n_ranks=2)
def reshard_size_of_zero(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, reshard_after_forward=0)


@case(ValueError, "factor of 2", n_ranks=2)
def reshard_size_below_zero(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, reshard_after_forward=-1)


@case(ValueError, "bool or an int")
def reshard_by_name(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, reshard_after_forward="x")


@case(ValueError, "bool or an int")
def reshard_by_fraction(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, reshard_after_forward=1.5)


# --- E14 to E17: parameters ---


class ScaledNet(Net):
    def __init__(self, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@case(ValueError, "Change scale to a 1D tensor with numel equal to 1.", n_ranks=2, is_strict=True)
def scalar_parameter(api: Any, mesh: DeviceMesh) -> Attempt:
    net = ScaledNet(())

    def repair() -> None:
        net.scale = nn.Parameter(net.scale.detach().reshape(1))
        api.fully_shard(net, mesh=mesh)

    return Attempt(net, lambda: api.fully_shard(net, mesh=mesh), repair, ScaledNet)


@case(NotImplementedError, "does not support non-contiguous parameters", n_ranks=2, is_strict=True)
def transposed_parameter(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    weight = net.second.weight
    net.second.weight = nn.Parameter(weight.detach().t().contiguous().t())

    def repair() -> None:
        net.second.weight = nn.Parameter(net.second.weight.detach().contiguous())
        api.fully_shard(net, mesh=mesh)

    return Attempt(net, lambda: api.fully_shard(net, mesh=mesh), repair)


@case(NotImplementedError, "does not support uneven sharding on dim 1", n_ranks=2, is_strict=True)
def uneven_second_dim(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, shard_placement_fn=lambda p: Shard(1) if p.shape == (3, 5) else None)


@case(AssertionError, "Shard dim 1 is invalid for 1D tensor", n_ranks=2)
def missing_second_dim(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 1 else None)


# --- E18 to E20: shard_placement_fn ---


@case(ValueError, "(?i)invalid .*result")
def placement_of_another_type(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, shard_placement_fn=lambda p: "rows")


@case(ZeroDivisionError, "division by zero")
def placement_function_that_raises(api: Any, mesh: DeviceMesh) -> Attempt:
    return attempt(api, mesh, shard_placement_fn=lambda p: 1 / 0 if p.shape == (3,) else None)


@case(ValueError, "same FSDPMeshInfo object", is_strict=True)
def equal_groups_of_two_mesh_infos(api: Any, mesh: DeviceMesh) -> Attempt:
    def place(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))

    return attempt(api, mesh, shard_placement_fn=place)


@case(ValueError, "requires FSDPMeshInfo")
def placement_on_a_replicated_mesh(api: Any, mesh: DeviceMesh) -> Attempt:
    whole, dims = cached_mesh((1, 1), ("dp", "tp")), api.DataParallelMeshDims(replicate="dp")
    net = on_mesh(whole, [Replicate(), Replicate()])
    return Attempt(
        net,
        lambda: api.fully_shard(
            net, mesh=whole, dp_mesh_dims=dims, shard_placement_fn=lambda p: Shard(0)
        ),
    )


# --- E21 to E24: DTensor parameters ---
# E24 (a combined mesh that is not of 2 to 4 dims) cannot be reached: E5 and E23 bound both parts.


def with_device_tensor(device_type: str) -> nn.Module:
    """A module with a parameter on a mesh of `device_type` and data on an accelerator."""
    mesh = DeviceMesh(device_type, [0], _init_backend=False, mesh_dim_names=("tp",))
    with FakeTensorMode():
        data = torch.empty(4, 4, device="cuda:0")
    meta = TensorMeta(data.shape, data.stride(), data.dtype)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    module = nn.Module()
    module.weight = nn.Parameter(DTensor(data, spec, requires_grad=False))
    return module


@case(ValueError, "mesh of the same type as the FSDP mesh but got")
def parameter_on_a_mesh_of_another_device(api: Any, mesh: DeviceMesh) -> Attempt:
    module = with_device_tensor("cuda")
    return Attempt(module, lambda: api.fully_shard(module, mesh=mesh))


@case(AssertionError, "cuda")
def parameter_on_another_device_than_its_mesh(api: Any, mesh: DeviceMesh) -> Attempt:
    module = with_device_tensor("cpu")
    return Attempt(module, lambda: api.fully_shard(module, mesh=mesh))


@case(NotImplementedError, "only supports 1D TP/EP or 2D EP")
def parameter_with_three_placements(api: Any, mesh: DeviceMesh) -> Attempt:
    whole = cached_mesh((1, 1, 1, 1), ("dp", "a", "b", "c"))
    net = on_mesh(whole["a", "b", "c"], [Replicate()] * 3)
    return Attempt(net, lambda: api.fully_shard(net, mesh=whole["dp"]))


# --- E25 to E27: what other calls and user code did ---


@case(ValueError, "(?s)(?=.*bottom-up)(?=.*weight)(?=.*Net)")
def child_after_parent(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    api.fully_shard(net, mesh=mesh)
    return Attempt(net, lambda: api.fully_shard(net.first, mesh=mesh), lambda: None)


@case(ValueError, "Linear with parameter 'weight' is part of Seq.*, and of Seq.*on it first")
def module_of_two_units(api: Any, mesh: DeviceMesh) -> Attempt:
    def build() -> nn.Module:
        shared = nn.Linear(4, 4)
        return nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared))

    right = build()
    for unit in (right[0][0], *right, right):  # as the text says
        api.fully_shard(unit, mesh=mesh)
    net = build()
    api.fully_shard(net[0], mesh=mesh)
    return Attempt(net, lambda: api.fully_shard(net[1], mesh=mesh))


class HalfExtension(torch.Tensor):
    """A wrapper of a tensor with only one of the two all-gather extension methods."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "HalfExtension":
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"HalfExtension({self.data_inside})"

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> None:
        raise AssertionError("never called")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = tree_map_only(cls, lambda t: t.data_inside, (args, kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            func(*inside[0], **inside[1])
            return args[0]
        return tree_map_only(torch.Tensor, cls, func(*inside[0], **inside[1]))


@case(AssertionError, "fsdp_p(re|ost)_all_gather")
def extension_with_one_method(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    weight = net.second.weight
    net.second.weight = nn.Parameter(HalfExtension(weight.detach()))

    def repair() -> None:
        net.second.weight = weight
        api.fully_shard(net, mesh=mesh)

    return Attempt(net, lambda: api.fully_shard(net, mesh=mesh), repair)


class GrowingLinear(nn.Linear):
    """Registers one parameter more whenever its weight is replaced, once armed."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and self.__dict__.get("armed"):
            self.register_parameter("extra", nn.Parameter(torch.zeros(1)))


@case(RuntimeError, "FQNs")
def names_that_change(api: Any, mesh: DeviceMesh) -> Attempt:
    net = Net()
    net.second = GrowingLinear(5, 3)
    net.second.armed = True
    return Attempt(net, lambda: api.fully_shard(net, mesh=mesh))


# --- policies, which torch does not look at ---


def policy_case(
    name: str, error: type[Exception], match: str, **wrong: Callable[[Any], Any]
) -> None:
    def build(api: Any, mesh: DeviceMesh) -> Attempt:
        return attempt(api, mesh, **{key: make(api) for key, make in wrong.items()})

    CASES[name] = Case(error, match, build, 1)


FIELDS = {"param_dtype": "bf16", "reduce_dtype": torch.int32, "output_dtype": 16}
for field, value in FIELDS.items():
    policy_case(
        f"wrong_{field}",
        ValueError,
        field,
        mp_policy=lambda api, given=(field, value): api.MixedPrecisionPolicy(**dict([given])),
    )
policy_case("policy_class", TypeError, "mp_policy", mp_policy=lambda api: api.MixedPrecisionPolicy)
policy_case("policy_dtype", TypeError, "mp_policy", mp_policy=lambda api: torch.bfloat16)
OFFLOAD = "offload_policy"
policy_case("offload_class", TypeError, OFFLOAD, offload_policy=lambda api: api.CPUOffloadPolicy)
policy_case("offload_flag", TypeError, OFFLOAD, offload_policy=lambda api: True)
policy_case("ignored_number", TypeError, "ignored_params", ignored_params=lambda api: 3)


# --- the tests ---


@contextmanager
def strictness(is_strict: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if is_strict:
            patch.setenv("FSDP_C_STRICT", "1")
        yield


def check_error(rank: int, n_ranks: int, name: str) -> None:
    refused = CASES[name]
    tried = refused.build(implementation(), cached_mesh((n_ranks,)))
    with strictness(refused.is_strict), pytest.raises(refused.error, match=refused.match) as caught:
        tried.call()
    # A subclass would be caught by handlers that are meant for something else.
    assert caught.type is refused.error


def check_untouched(rank: int, n_ranks: int, name: str) -> None:
    refused = CASES[name]
    api = implementation()
    tried = refused.build(api, cached_mesh((n_ranks,)))
    before = Snapshot(tried.root)
    for _ in range(2):
        with strictness(refused.is_strict), pytest.raises(refused.error):
            tried.call()
        before.check()
    if tried.repair is not None:
        tried.repair()
        check_trains(tried.root, tried.reference())


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    run_ranks(check_error, CASES[name].n_ranks, name)


# In `names_that_change` it is the module's own code that changes the module.
@pytest.mark.parametrize("name", [name for name in CASES if name != "names_that_change"])
def test_module_is_untouched(name: str) -> None:
    run_ranks(check_untouched, CASES[name].n_ranks, name)


def train_with_ignored_list(rank: int, n_ranks: int) -> None:
    api = implementation()
    net = Net()
    kept = [net.first.weight]
    api.fully_shard(net, mesh=cached_mesh((n_ranks,)), ignored_params=kept)
    assert net.first.weight is kept[0]
    assert isinstance(net.second.weight, DTensor)
    net(torch.ones(2, 4)).sum().backward()
    reference = Net()
    reference(torch.ones(2, 4)).sum().backward()
    assert torch.equal(kept[0].grad, reference.first.weight.grad)


def test_list_of_ignored_parameters() -> None:
    run_ranks(train_with_ignored_list, 2)


def call_again_between_steps(rank: int, n_ranks: int) -> None:
    """The core keeps the dicts in which a unit's modules have their parameters."""
    api, mesh = implementation(), cached_mesh((n_ranks,))
    net = Net()
    api.fully_shard(net.second, mesh=mesh)
    api.fully_shard(net, mesh=mesh)
    net(torch.ones(2, 4)).sum().backward()
    dicts = [module._parameters for module in net.modules()]
    with pytest.raises(AssertionError):
        api.fully_shard(net, mesh=mesh)
    assert all(m._parameters is d for m, d in zip(net.modules(), dicts, strict=True))
    net.zero_grad()
    check_trains(net, Net())


def test_refused_call_on_a_model_in_use() -> None:
    run_ranks(call_again_between_steps, 2)
