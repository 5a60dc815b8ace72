"""Checkpoints of FullyShardedDataParallel: to and from torch's, model and optimizer."""

import copy
from pathlib import Path
from typing import Any

import fsdp1_sides as sides
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from fsdp1_sides import Side, Sides
from harness import cached_mesh, implementation, run_ranks
from models import Net, Tied
from parity import EXACT, compare, on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp_c._fully_shard import _fqns

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
TORCHS = torch_fsdp.FullyShardedDataParallel


def momentum(params: Any) -> torch.optim.Optimizer:
    """One tensor per state: of several torch's whole states on CPU ranks all show the last."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def trained(optimizer: Any = momentum, **options: Any) -> Sides:
    pair = Sides(optimizer=optimizer, **options)
    pair.step()
    return pair


def saved(side: Side, kind: StateDictType, *configs: Any) -> tuple[Any, Any]:
    """Model and optimizer state, asked for through torch's class as libraries do."""
    with TORCHS.state_dict_type(side.model, kind, *configs):
        return side.model.state_dict(), TORCHS.optim_state_dict(side.model, side.optimizer)


def loaded(side: Side, kind: StateDictType, model: Any, optim: Any, *configs: Any) -> None:
    with TORCHS.state_dict_type(side.model, kind, *configs):
        side.model.load_state_dict(model)
        optim = TORCHS.optim_state_dict_to_load(side.model, side.optimizer, optim)
        side.optimizer.load_state_dict(optim)


@on_ranks(2)
def test_full(rank: int, n_ranks: int) -> None:
    for to_cpu, rank0_only in ((True, True), (False, False)):
        pair = trained()
        configs = (
            FullStateDictConfig(to_cpu, rank0_only),
            FullOptimStateDictConfig(to_cpu, rank0_only),
        )
        if rank0_only:  # torch raises with both on CPU ranks
            model, optim = saved(pair.ours, FULL, *configs)
            theirs = saved(pair.theirs, FULL)
            whole = (dict(theirs[0]), theirs[1])
            compare((dict(model), optim), whole if rank == 0 else ({}, {}), EXACT, "rank 0 only")
            continue
        results = pair.both(lambda side, configs=configs: saved(side, FULL, *configs))
        assert all(type(value) is torch.Tensor for value in results[0].values())
        theirs = saved(pair.theirs, FULL)
        pair.step()
        loaded(pair.ours, FULL, *theirs)  # torch's into ours, ours into torch's
        loaded(pair.theirs, FULL, *results)
        compare(pair.ours.wholes(False), pair.theirs.wholes(False), EXACT, "after loading")
        pair.step()


@on_ranks(2)
def test_full_optimizer_state_of_rank_0(rank: int, n_ranks: int) -> None:
    pair = trained()
    configs = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    _, optim = saved(pair.theirs, FULL)
    kept = copy.deepcopy(optim) if rank == 0 else {}
    pair.step()
    with TORCHS.state_dict_type(pair.ours.model, FULL, *configs):
        result = TORCHS.optim_state_dict_to_load(pair.ours.model, pair.ours.optimizer, kept)
    pair.ours.optimizer.load_state_dict(result)
    compare(saved(pair.ours, FULL)[1], optim, EXACT, "from rank 0")


@on_ranks(2)
def test_older_functions(rank: int, n_ranks: int) -> None:
    pair = trained()

    def ask(side: Side) -> Any:
        model, optim = side.model, side.optimizer
        full = side.fsdp.full_optim_state_dict(model, optim, rank0_only=False)
        side.fsdp.sharded_optim_state_dict(model, optim)
        for result in (
            side.fsdp.shard_full_optim_state_dict(full, model),  # of all, in the model's order
            side.fsdp.scatter_full_optim_state_dict(
                full if rank == 0 else None, model, optim=optim
            ),
            side.fsdp.flatten_sharded_optim_state_dict(
                side.fsdp.sharded_optim_state_dict(model, optim), model, optim
            ),
        ):
            optim.load_state_dict(result)
        by_name = side.fsdp.full_optim_state_dict(model, optim, rank0_only=False)
        key_type = torch_fsdp.fully_sharded_data_parallel.OptimStateKeyType
        plain = Net()
        plain_optim = momentum(plain.parameters())
        by_id = side.fsdp.rekey_optim_state_dict(
            by_name, key_type.PARAM_ID, plain, optim=plain_optim
        )
        plain_optim.load_state_dict(by_id)
        return [by_name, by_id]

    pair.both(ask)


@on_ranks(2)
def test_sharded(rank: int, n_ranks: int) -> None:
    for options in ({}, {"device_mesh": cached_mesh((2,))}):
        pair = trained(torch.optim.Adam, **options)
        model, optim = copy.deepcopy(saved(pair.ours, SHARDED))
        assert all(isinstance(model[name], DTensor) for name in model if name != "offset")
        theirs = saved(pair.theirs, SHARDED)
        expected = saved(pair.ours, FULL)
        for shards in (theirs, (model, optim)):
            pair.ours.optimizer.step()
            loaded(pair.ours, SHARDED, *shards)
            compare(saved(pair.ours, FULL), expected, EXACT, "sharded")
        pair.step()


@on_ranks(2)
def test_local(rank: int, n_ranks: int) -> None:
    pair = trained()
    before = pair.ours.wholes(False)
    with TORCHS.state_dict_type(pair.ours.model, LOCAL):
        local = copy.deepcopy(pair.ours.model.state_dict())
        assert all(type(value) is torch.Tensor for value in local.values())
        assert sum(value.numel() for value in local.values()) < Net().stem.weight.numel() * 8
        pair.ours.optimizer.step()
        pair.ours.model.load_state_dict(local)
    compare(pair.ours.wholes(False), before, EXACT, "local")


@on_ranks(2, 3)
def test_flat_local_states_of_torch(rank: int, n_ranks: int) -> None:
    """One flat tensor for each wrapper, aligned or not, comes to the parameters in it."""
    for is_orig, build in ((True, Net), (False, Net), (False, Tied)):
        pair = Sides(build)
        theirs = sides.wrap_blocks(build(), sides.Torchs, use_orig_params=is_orig)
        with TORCHS.state_dict_type(theirs, FULL):
            expected = copy.deepcopy(theirs.state_dict())
        with TORCHS.state_dict_type(theirs, LOCAL), TORCHS.state_dict_type(pair.ours.model, LOCAL):
            flat = theirs.state_dict()
            n_flat = sum(name.endswith("_flat_param") for name in flat)
            assert n_flat == len(pair.ours.model.blocks) + 1
            pair.ours.model.load_state_dict(flat)
            wholes = pair.ours.wholes(False)
            wanted = {name: expected[name] for name in wholes}
            compare(wholes, wanted, EXACT, f"use_orig_params={is_orig}")
            flat["blocks.1._flat_param"] = flat["_flat_param"]
            with pytest.raises(ValueError, match="'blocks.1._flat_param' does not have the"):
                pair.ours.model.load_state_dict(flat)


def through_files(source: Side, target: Side, folder: Path) -> None:
    """With torch.distributed.checkpoint and its state dict functions."""
    state = {
        "model": get_model_state_dict(source.model),
        "optim": get_optimizer_state_dict(source.model, source.optimizer),
    }
    dcp.save(state, checkpoint_id=folder, no_dist=False)
    state = {
        "model": get_model_state_dict(target.model),
        "optim": get_optimizer_state_dict(target.model, target.optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(target.model, state["model"])
    set_optimizer_state_dict(target.model, target.optimizer, state["optim"])


def there_and_back(rank: int, n_ranks: int, folder: str) -> None:
    pair = trained()
    full = StateDictOptions(full_state_dict=True)
    pair.both(lambda side: get_model_state_dict(side.model, options=full))
    pair.both(lambda side: get_optimizer_state_dict(side.model, side.optimizer, options=full))
    expected = saved(pair.theirs, FULL)
    pair.ours.optimizer.step()
    through_files(pair.theirs, pair.ours, Path(folder, "theirs"))
    compare(saved(pair.ours, FULL), expected, EXACT, "torch's files")
    pair.theirs.optimizer.step()
    through_files(pair.ours, pair.theirs, Path(folder, "ours"))
    compare(saved(pair.theirs, FULL), expected, EXACT, "our files")
    pair.step()


def test_files(tmp_path: Path) -> None:
    run_ranks(there_and_back, 2, str(tmp_path))


@on_ranks(2)
def test_buffers_are_saved_as_they_were(rank: int, n_ranks: int) -> None:
    pair = Sides(mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))

    def run(side: Side) -> Any:
        loss = side.model(sides.batch(1)).sum()
        return [loss, side.model.offset, side.model.state_dict()]

    pair.both(run)
    assert pair.ours.model.offset.dtype is torch.bfloat16


@on_ranks(2)
def test_keys_that_do_not_fit(rank: int, n_ranks: int) -> None:
    pair = Sides()

    def load(side: Side) -> Any:
        state = side.model.state_dict()
        del state["stem.weight"], state["blocks.1.up.bias"]
        state["blocks.0.other"] = torch.ones(1)
        found = side.model.load_state_dict(state, strict=False)
        return [sorted(found.missing_keys), sorted(found.unexpected_keys)]

    pair.both(load)


@on_ranks(2)
def test_settings(rank: int, n_ranks: int) -> None:
    pair = Sides()

    def ask(side: Side) -> Any:
        configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        before = side.fsdp.set_state_dict_type(side.model, SHARDED, *configs)
        now = side.fsdp.get_state_dict_type(side.model)
        with pytest.raises(RuntimeError, match="state_dict_config"):
            side.fsdp.set_state_dict_type(side.model, FULL, configs[0])
        found = [len(side.fsdp.fsdp_modules(side.model, root_only=only)) for only in (False, True)]
        return [str(before), str(now), found, side.model.check_is_root()]

    pair.both(ask)


@on_ranks(2)
def test_inside_of_another_module(rank: int, n_ranks: int) -> None:
    """A wrapper below the top names and loads its part."""
    fsdp = implementation().FullyShardedDataParallel
    model = torch.nn.ModuleDict({"a": fsdp(Net()), "b": torch.nn.Linear(2, 2)})
    state = copy.deepcopy(model.state_dict())
    assert sorted(state) == sorted(
        [f"a.{name}" for name in Net().state_dict()] + ["b.weight", "b.bias"]
    )
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    compare(model.state_dict(), state, EXACT, "loaded")
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "a.scale": torch.ones(4)})
    dist.barrier()


@on_ranks(2)
def test_summon_full_params(rank: int, n_ranks: int) -> None:
    for precision in (None, MixedPrecision(torch.bfloat16)):
        tolerance = None if precision is None else sides.Tolerance(scaled=0.05)
        pair = Sides(mixed_precision=precision, tolerance=tolerance)
        pair.step()

        def write(side: Side) -> Any:
            names = []
            for options in ({}, {"recurse": False}, {"writeback": False, "rank0_only": True}):
                with side.fsdp.summon_full_params(side.model, **options):
                    for name, param in side.model.named_parameters():
                        if "stem" in name and (rank == 0 or "rank0_only" not in options):
                            param.data.add_(1.0)
                            names.append([name, param.shape, param.dtype])
                    if "rank0_only" not in options:  # with what was written, and copies
                        names.append(side.model.state_dict())
                        inner = side.model.module.state_dict()
                        if side is pair.theirs:  # which frees the memory of these
                            inner = {key: value.clone() for key, value in inner.items()}
                        names.append({**inner})
            with side.fsdp.summon_full_params(side.model, with_grads=True):
                for param in side.model.parameters():
                    param.grad.mul_(2.0)
            side.model.apply(doubled)
            return [names if rank == 0 else None, side.wholes()]

        pair.both(write)
        fsdp, model = pair.ours.fsdp, pair.ours.model
        for with_grads in (False, True):  # as text generation does
            options = {"writeback": False, "recurse": False, "with_grads": with_grads}
            for part in (model, model.module.blocks[0]):  # the rest is not summoned
                with fsdp.summon_full_params(part, **options), torch.no_grad():
                    inside = model(sides.batch(0))
                assert torch.equal(inside, model(sides.batch(0)))
            options["recurse"] = True
            with fsdp.summon_full_params(model, **options), torch.no_grad():
                whole = model.module(sides.batch(0))
                of_rank_0 = torch_fsdp.FullStateDictConfig(rank0_only=True)
                with fsdp.state_dict_type(model, FULL, of_rank_0):
                    assert bool(model.state_dict()) is (rank == 0)
                assert whole.dtype is torch.float32
                assert torch.equal(inside, whole) is (precision is None)
                with (
                    fsdp.state_dict_type(model, SHARDED),
                    pytest.raises(RuntimeError, match="leave"),
                ):
                    model.state_dict()
        with pytest.raises(NotImplementedError, match="rank0_only"):
            fsdp.summon_full_params(model, rank0_only=True).__enter__()
        pair.step()


@torch.no_grad()
def doubled(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        module.weight.mul_(2.0)


@on_ranks(2)
def test_our_own_functions(rank: int, n_ranks: int) -> None:
    """They name parameters and units as checkpoints do."""
    api = implementation()
    pair = Sides()
    model = pair.ours.model
    whole = {name: value.clone() for name, value in api.iter_full_params(model)}
    assert set(whole) == {name for name, _ in Net().named_parameters()}
    api.load_full(model, {name: value + 1 for name, value in whole.items()}, strict=False)
    compare(model.state_dict()["blocks.1.up.bias"], whole["blocks.1.up.bias"] + 1, EXACT, "loaded")
    with pytest.raises(RuntimeError, match="'blocks.0.norm.weight' has shape"):
        api.load_full(model, {**whole, "blocks.0.norm.weight": torch.ones(1)}, strict=False)
    unit = model.blocks[1]._unit
    model(sides.batch(0))
    assert _fqns.unit_name(unit._fsdp_param_groups[0]) == "blocks.1"
