"""Constructor arguments of FullyShardedDataParallel: ours against torch's."""

import copy
import functools
import warnings
from typing import Any

import fsdp1_sides as sides
import pytest
import torch
import torch.distributed as dist
from fsdp1_sides import CPU, Sides
from harness import cached_mesh, implementation
from models import WIDTH, Block, Net, Tied
from parity import Tolerance, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

BLOCKS = ModuleWrapPolicy({Block})


def names_of(side: sides.Side) -> list[str]:
    return [name for name, _ in side.model.named_parameters()]


def trained(pair: Sides, n_steps: int = 2) -> None:
    assert names_of(pair.ours) == names_of(pair.theirs)
    for _ in range(n_steps):
        pair.step()


@on_ranks(2)
def test_policies(rank: int, n_ranks: int) -> None:
    policies = (
        CustomPolicy(
            lambda m: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(m, Block)
                else isinstance(m, nn.LayerNorm)
            )
        ),
        functools.partial(size_based_auto_wrap_policy, min_num_params=40),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    )
    for policy in policies:
        trained(Sides(wrap=sides.wrap_root, auto_wrap_policy=policy), 1)


@on_ranks(2)
def test_arguments_without_effect_on_results(rank: int, n_ranks: int) -> None:
    def wrap(model: nn.Module, fsdp: Any, **options: Any) -> nn.Module:
        if fsdp is not sides.Torchs:  # which would pin memory, and cannot
            options["cpu_offload"] = CPUOffload(offload_params=True)
        return sides.wrap_blocks(model, fsdp, **options)

    trained(
        Sides(
            wrap=wrap,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
            limit_all_gathers=False,
            process_group=dist.group.WORLD,
        )
    )


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def filled(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for index, tensor in enumerate([*module.parameters(False), *module.buffers(False)]):
        nn.init.constant_(tensor, 0.1 * index + 0.2)


@on_ranks(2)
def test_meta_device(rank: int, n_ranks: int) -> None:
    trained(Sides(on_meta, sides.wrap_root, auto_wrap_policy=BLOCKS, param_init_fn=filled))


class Resettable(nn.Sequential):
    """All of it can be initialized by `reset_parameters`."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 3))


@on_ranks(2)
def test_meta_device_reset(rank: int, n_ranks: int) -> None:
    trained(Sides(Resettable, sides.wrap_root), 1)


@on_ranks(2)
def test_sync_module_states(rank: int, n_ranks: int) -> None:
    """torch demands an accelerator for it: held to what rank 0 had."""
    torch.manual_seed(rank)
    net = Net()
    net.offset.fill_(rank + 1.0)
    first = [copy.deepcopy(net.state_dict())]
    dist.broadcast_object_list(first)
    model = implementation().FullyShardedDataParallel(
        net, auto_wrap_policy=BLOCKS, sync_module_states=True
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[0][name]), name


@on_ranks(2)
def test_ignored(rank: int, n_ranks: int) -> None:
    def wrap(model: Any, fsdp: Any, **options: Any) -> nn.Module:
        model.blocks[0].requires_grad_(False)
        return fsdp(model, ignored_modules=[model.blocks[0]], auto_wrap_policy=BLOCKS, **options)

    trained(Sides(wrap=wrap))

    def wrap_without(model: Any, fsdp: Any, **options: Any) -> nn.Module:
        model.scale.requires_grad_(False)
        return fsdp(model, ignored_states=[model.scale], **options)

    pair = Sides(wrap=wrap_without)
    trained(pair)
    assert type(pair.ours.model.scale) is nn.Parameter


@on_ranks(4)
def test_hybrid(rank: int, n_ranks: int) -> None:
    mesh = cached_mesh((2, 2), ("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    tolerance = Tolerance(relative=1e-4, scaled=1e-5)
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        for given in ({"device_mesh": mesh}, {"process_group": groups}):
            options = {"sharding_strategy": strategy, "auto_wrap_policy": BLOCKS, **given}
            pair = Sides(wrap=sides.wrap_root, tolerance=tolerance, optimizer=sgd, **options)
            trained(pair, 1)
            assert pair.ours.model.stem.weight._local_tensor.shape[0] == WIDTH // 2


class Partly(nn.Module):
    """A parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(2)
def test_unused_parameters(rank: int, n_ranks: int) -> None:
    """Their gradients are zero, so that decay reaches them."""
    trained(Sides(Partly, sides.wrap_root, optimizer=decaying))


def decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.5)


@on_ranks(2)
def test_containers(rank: int, n_ranks: int) -> None:
    """A list whose members are all wrapped is wrapped as well, and does nothing."""
    pair = Sides(wrap=sides.wrap_root, auto_wrap_policy=always_wrap_policy)
    pair.both(lambda side: len(side.fsdp.fsdp_modules(side.model)))
    pair.step(n_micro=2, clip=0.5)
    pair.both(lambda side: side.model.state_dict())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@on_ranks(2)
def test_hybrid_by_hosts(rank: int, n_ranks: int) -> None:
    """Without groups a host is what to shard over; torch would take a rank for a host on CPUs."""
    api = implementation()
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model = api.FullyShardedDataParallel(Net(), auto_wrap_policy=BLOCKS, **options)
    assert model.process_group.size() == 2 and model._inter_node_pg.size() == 1
    model(sides.batch(0)).sum().backward()
    with pytest.raises(ValueError, match="requires explicit specification of process group"):
        api.FullyShardedDataParallel(Net(), **options)


class Seeing(nn.Module):
    """Says in which dtypes it sees things."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.full((1,), 1.0 / 3))
        self.seen: list[Any] = []
        self.inner.register_forward_pre_hook(lambda m, args: self.seen.append(args[0].dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.offset.dtype, self.norm.running_mean.dtype]
        return self.norm(self.inner(x)) * self.scale + self.offset


@on_ranks(2)
def test_mixed_precision(rank: int, n_ranks: int) -> None:
    half, full = torch.bfloat16, torch.float32
    tolerance = Tolerance(relative=0.02, scaled=0.02)
    for precision in (
        MixedPrecision(half, full, half),
        MixedPrecision(half, None, None, cast_root_forward_inputs=False, cast_forward_inputs=True),
        MixedPrecision(None, half, None),
    ):
        policy = ModuleWrapPolicy({nn.Linear})
        pair = Sides(
            Seeing,
            sides.wrap_root,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            tolerance=tolerance,
            optimizer=sgd,
        )

        def step(side: sides.Side) -> Any:
            loss = side.model(sides.batch(3))
            loss.float().sum().backward()
            dtypes = {name: value.dtype for name, value in side.model.state_dict().items()}
            return [str(side.model.seen), str(dtypes), loss, side.wholes()]

        pair.both(step, str(precision))


@on_ranks(2)
def test_tied(rank: int, n_ranks: int) -> None:
    pair = Sides(Tied, sides.wrap_root, auto_wrap_policy=BLOCKS, optimizer=sgd)
    assert names_of(pair.ours) == names_of(pair.theirs)

    def step(side: sides.Side) -> Any:
        loss = side.model(torch.arange(6).view(2, 3) + dist.get_rank()).square().mean()
        loss.backward()
        side.optimizer.step()
        return [loss, side.wholes()]

    for _ in range(2):
        pair.both(step)


@on_ranks(1)
def test_one_rank(rank: int, n_ranks: int) -> None:
    trained(Sides(optimizer=sgd))


@on_ranks(2)
def test_bad_arguments(rank: int, n_ranks: int) -> None:
    fsdp = implementation().FullyShardedDataParallel
    model = fsdp(Net())
    assert fsdp(model)._unit is None  # as torch's: nothing is left to do
    with pytest.raises(ValueError, match="already"):
        fsdp(sides.Torchs(nn.Linear(2, 2)))
    for name, value, wanted in (
        ("module", [nn.Linear(2, 2)], "Module"),
        ("process_group", "gloo", "ProcessGroup"),
        ("sharding_strategy", "FULL_SHARD", "such as ShardingStrategy.FULL_SHARD"),
        ("cpu_offload", True, "CPUOffload"),
        ("backward_prefetch", "pre", "such as BackwardPrefetch.BACKWARD_PRE"),
        ("mixed_precision", torch.bfloat16, "MixedPrecision"),
        ("param_init_fn", 3, "a function"),
        ("device_mesh", (2,), "DeviceMesh"),
    ):
        plain = Net()
        with pytest.raises(
            TypeError, match=f"^FullyShardedDataParallel: {name}=.*: pass .*{wanted}"
        ):
            fsdp(**({"module": plain} | {name: value}))
        assert type(plain) is Net and not any(m._forward_pre_hooks for m in plain.modules())
    model = fsdp(Net())
    with pytest.raises(ValueError, match="ModuleList"):
        fsdp(nn.ModuleList([nn.Linear(2, 2)]))
    for name in ("_flat_param", "flat_param"):
        with pytest.raises(AttributeError, match="named_parameters"):
            getattr(model, name)
    with pytest.raises(ValueError, match="not already have"):
        fsdp(nn.Sequential(fsdp(Net())), auto_wrap_policy=BLOCKS)
    with pytest.warns(UserWarning, match="keep_low_precision_grads"):
        fsdp(Net(), mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True))
    inner = fsdp(nn.Sequential(fsdp(nn.Linear(2, 2)))).module[0]
    for call in (inner.no_sync().__enter__, lambda: inner.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="root"):
            call()
    assert not inner.check_is_root()
    with model.summon_full_params(model), pytest.raises(RuntimeError, match="training inside"):
        model(sides.batch(0))
    with warnings.catch_warnings(action="error"):
        fsdp(Net(), device_id=CPU)
