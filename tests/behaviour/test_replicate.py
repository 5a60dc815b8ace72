"""RP: replicated units, which torch's `replicate` builds on the same classes."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
from harness import cached_mesh
from models import Block, Net, data
from parity import Pair, Plain, Side, Tolerance, compare_values, full, on_ranks, total
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor, Replicate

import fsdp_c
from behaviour.accumulation import micro_batches
from behaviour.records import collectives, names

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def replicate_all(model: nn.Module, fsdp: Any, **options: Any) -> None:
    """Both sides the same; a script that only replicates meets fsdp_c nowhere."""
    for block in model.blocks:
        replicate(block, **options)
    replicate(model, **options)


def replicate_blocks(model: nn.Module, fsdp: Any) -> None:
    """Replicated blocks in a sharded root."""
    for block in model.blocks:
        replicate(block)
    fsdp.fully_shard(model)


def shard_blocks_in_replicated_root(model: nn.Module, fsdp: Any) -> None:
    for block in model.blocks:
        fsdp.fully_shard(block)
    replicate(model)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """In here torch's `replicate` makes units of fsdp_c."""
    fsdp_c.install()
    try:
        yield
    finally:
        fsdp_c.uninstall()


def replicated(**options: Any) -> nn.Module:
    harness.seed_everything(1)
    model = Net(own=False)
    replicate_all(model, None, **options)
    return model


@on_ranks(2)
def test_rp1_classes_of_the_state(rank: int, n_ranks: int) -> None:
    def states(side: Side) -> list[str]:
        state = replicate.state(side.model.blocks[0])
        assert isinstance(state, FSDPState)
        assert isinstance(state._state_ctx, FSDPStateContext)
        return [type(state).__name__, type(state._state_ctx).__name__]

    pair = Pair(Net, replicate_blocks)
    assert pair.both(states) == ["_ReplicateState", "_ReplicateStateContext"]


@on_ranks(2)
def test_rp2_class_of_the_module(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, replicate_blocks)

    def bases(side: Side) -> list[str]:
        block = side.model.blocks[0]
        assert isinstance(block, ReplicateModule) and isinstance(block, FSDPModule)
        assert not hasattr(block, "_is_fsdp_managed_module")
        return [cls.__name__ for cls in type(block).__mro__[:4]]

    assert pair.both(bases) == ["ReplicateBlock", "ReplicateModule", "FSDPModule", "Block"]
    assert replicate_with_fsdp.cls_to_replicate_cls[Block].__name__ == "ReplicateBlock"


@on_ranks(2)
def test_rp4_not_on_a_sharded_module(rank: int, n_ranks: int) -> None:
    """Nor the other way round, nor on a mesh of two dims."""
    pair = Pair(Net, replicate_blocks)

    def refuse(side: Side) -> None:
        block = Block()
        side.fsdp.fully_shard(block)
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(block)
        block = Block()
        replicate(block)
        with pytest.raises(AssertionError, match="more than once"):
            side.fsdp.fully_shard(block)
        with pytest.raises(ValueError, match="1D DeviceMesh"):
            replicate(Block(), mesh=cached_mesh((2, 1), ("a", "b")))

    pair.do(refuse)
    pair.step(data(rank))


@on_ranks(2)
def test_rp5_replicated_when_idle_plain_while_unsharded(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, replicate_blocks)

    def kinds(side: Side) -> Any:
        block = side.model.blocks[0]
        idle = block.up.weight.placements
        state = side.model.state_dict()["blocks.0.up.weight"]
        block.unshard()
        unsharded = isinstance(block.up.weight, DTensor)
        block.reshard()
        return idle, state.placements, unsharded

    assert pair.both(kinds) == ((Replicate(),), (Replicate(),), False)
    pair.step(data(rank))


def gathers_copy(model: Any) -> bool:
    """Whether the unsharded parameters of a block have memory of their own in forward.

    What is written to the shard's memory, beside torch, is seen where it is the parameter's.
    """
    block, found = model.blocks[0], []
    shard = block.up.weight._local_tensor
    kind = ctypes.c_double if shard.dtype == torch.float64 else ctypes.c_float

    def look(module: nn.Module, args: Any) -> None:
        there = kind.from_address(shard.data_ptr())
        here = kind.from_address(module.weight.data_ptr())
        before, there.value = there.value, there.value + 1
        found.append(here.value != there.value)
        there.value = before

    handle = block.up.register_forward_pre_hook(look)
    with torch.no_grad():
        model(data(0).to(shard.dtype))
    handle.remove()
    for unit in (*model.blocks, model):
        unit.reshard()
    assert shard.untyped_storage().nbytes() > 0
    return found[0]


@on_ranks(2)
def test_rp5_no_second_copy(rank: int, n_ranks: int) -> None:
    """Unless there is a cast; shards that are replaced or moved are followed."""
    assert gathers_copy(replicated())  # torch's own
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with installed():
        model = replicated()
        assert gathers_copy(replicated(mp_policy=policy))
    plain = Plain(lambda: Net(own=False))
    for step in range(6):
        assert not gathers_copy(model)
        before = list(model.parameters())
        if step == 2:  # into memory of others
            old = {name: t.clone() for name, t in model.state_dict().items()}
            model.load_state_dict(old, assign=True)
        elif step == 3:  # parts of larger storages: these are copied
            old = {
                name: DTensor.from_local(
                    torch.stack([p.to_local()] * 2)[1], p.device_mesh, p.placements
                )
                for name, p in model.named_parameters()
            }
            model.load_state_dict(old, assign=True, strict=False)
        elif step == 4:
            for module in (model, plain.model):
                module.to(torch.float64)
        x = [data(r, step).to(next(model.parameters()).dtype) for r in range(n_ranks)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain.model)]
        total(model(x[rank])).backward()
        plain.backward([total(plain.model(each)) for each in x], n_ranks)
        for optimizer in optimizers:
            optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert (list(model.parameters())[0] is before[0]) == (step not in (2, 3))
        for name, parameter in plain.model.named_parameters():
            found = model.get_parameter(name)
            compare_values(full(found), parameter.detach(), CLOSE, name)
            compare_values(full(found.grad), parameter.grad, CLOSE, name)
            found.grad = parameter.grad = None


@on_ranks(2)
def test_rp8_setters_about_shards_are_refused(rank: int, n_ranks: int) -> None:
    """Before any unit has changed, and with a text; torch raises in the middle, without one."""
    calls = {
        "set_reshard_after_forward": (False,),
        "set_separate_reduce_scatter_group": (),
        "set_allocate_memory_from_process_group_for_comm": (True,),
    }
    model: Any = replicated()
    for name, args in calls.items():
        with pytest.raises(AssertionError):
            getattr(model.blocks[0], name)(*args)
    with installed():
        replicated_model: Any = replicated()
        mixed: Any = Net()
        replicate(mixed.blocks[1])
        for module in (mixed.blocks[0], mixed):
            harness.implementation().fully_shard(module)
    for name, args in calls.items():
        refused = [replicated_model.blocks[0], mixed.blocks[1]]
        if "allocate" not in name:
            refused.append(mixed)  # reaches the replicated unit below
        for module in refused:
            with pytest.raises(ValueError, match=f"{name}.. is not for replicated units") as error:
                getattr(module, name)(*args)
            assert isinstance(error.value, AssertionError)  # for who expects torch's
            assert (module is mixed) == ("'blocks.1'" in str(error.value))
    (group,) = mixed.blocks[0]._get_fsdp_state()._fsdp_param_groups
    assert group.post_forward_mesh_info is not None
    mixed.set_reshard_after_forward(False, recurse=False)
    mixed.blocks[0].set_reshard_after_forward(reshard_after_forward=False)
    assert group.post_forward_mesh_info is None
    total(mixed(data(rank))).backward()
    assert all(p.grad is not None for p in mixed.parameters())


@on_ranks(2)
def test_rp6_one_all_reduce_per_unit(rank: int, n_ranks: int) -> None:
    """Never resharded after forward, always after backward; in the reduce dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(model: nn.Module, fsdp: Any) -> None:
        for block in model.blocks:
            replicate(block, mp_policy=policy)
        fsdp.fully_shard(model, mp_policy=policy)

    pair = Pair(lambda: Net(own=False), shard, tolerance=Tolerance.of(2, torch.bfloat16))

    def issued(side: Side) -> Any:
        with collectives() as seen:
            out = side.model(data(rank))
            unsharded = not isinstance(side.model.blocks[0].up.weight, DTensor)
            total(out).backward()
        assert isinstance(side.model.blocks[0].up.weight, DTensor)
        return names(seen), {str(dtype) for _, dtype, _ in seen}, unsharded

    assert pair.both(issued) == (["AR"] * 3, {"torch.float32"}, True)


@on_ranks(2)
def test_rp7_accumulation_without_sync(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, replicate_blocks, tolerance=CLOSE)
    for is_last in micro_batches(pair, Net, rank, FSDPModule.set_requires_gradient_sync, CLOSE):
        assert (pair.ours.shards["blocks.0.up.weight"].grad is not None) is is_last


@on_ranks(2)
def test_rp7_partial_sums_factor_and_hook(rank: int, n_ranks: int) -> None:
    pair = Pair(lambda: Net(own=False), replicate_blocks, tolerance=CLOSE)
    plain = Plain(lambda: Net(own=False))

    def prepare(side: Side) -> None:
        for block in side.model.blocks:
            block.set_requires_all_reduce(False)
            block.set_gradient_divide_factor(4.0)

    pair.do(prepare)
    for step, is_last in ((0, False), (1, True)):
        for side in (pair.theirs, pair.ours):
            for block in side.model.blocks:
                block.set_requires_all_reduce(is_last)
        pair.forward(data(rank, step))
        pair.backward()
        assert (pair.ours.shards["blocks.0.up.weight"].grad is not None) is is_last
        plain.backward([total(plain.model(data(r, step))) for r in range(2)], 4)
    plain.check(pair.ours, CLOSE)


@pytest.mark.parametrize("is_inside", [True, False], ids=["replicated in sharded", "reverse"])
@on_ranks(2)
def test_rp9_nested(rank: int, n_ranks: int, is_inside: bool) -> None:
    """Replicated units join a sharded root; sharded units in a replicated one are roots."""
    shard = replicate_blocks if is_inside else shard_blocks_in_replicated_root
    pair = Pair(Net, shard, tolerance=CLOSE)
    plain = Plain(Net)
    for step in range(2):
        pair.forward(data(rank, step))
        pair.backward()
        plain.backward([total(plain.model(data(r, step))) for r in range(2)], 2)
        plain.check(pair.ours, CLOSE)

    def roots(side: Side) -> list[bool]:
        return [unit._get_fsdp_state()._is_root for unit in (side.model, side.model.blocks[0])]

    assert pair.both(roots) == [True, not is_inside]


@on_ranks(2)
def test_rp9_replicated_only(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, replicate_all)
    for step in range(2):
        pair.step(data(rank, step))
    pair.check_state_dict()
