"""reshard_after_forward as an int, beside torch's own: what is registered when, and every gradient.

Over shared memory and over messages, on four ranks that reshard to two. Rows divide evenly here,
since torch registers wrong shards of others; tests/units/test_slices.py has those.
"""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
from harness import cached_mesh
from parity import Pair, Side, Tolerance, compare, local, total
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils.checkpoint import checkpoint

_fully_shard = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
WIDTH = 8
N_RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, n_blocks: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.recompute = recompute

    def forward(self, x: Tensor, calls: int = 1) -> Tensor:
        x = self.stem(x)
        for block in [b for b in self.blocks for _ in range(calls)]:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def data(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(17 * step + rank)
    return torch.randn(3, WIDTH, generator=generator)


def sharding(root: Any = None, **options: Any) -> Callable[..., None]:
    def shard(model: Any, fsdp: Any) -> None:
        wanted = {"mesh": cached_mesh((N_RANKS,)), "reshard_after_forward": 2, **options}
        if "param_dtype" in wanted:
            wanted["mp_policy"] = fsdp.MixedPrecisionPolicy(
                param_dtype=wanted.pop("param_dtype"), reduce_dtype=torch.float32
            )
        for block in model.blocks:
            fsdp.fully_shard(block, **wanted)
        fsdp.fully_shard(model, **{**wanted, "reshard_after_forward": root})

    return shard


def states(side: Side) -> list[str]:
    groups = [m._get_fsdp_state()._fsdp_param_group for m in (*side.model.blocks, side.model)]
    for group in groups:
        assert all(p.sharded_state == group._sharded_state for p in group.fsdp_params)
    return [group._sharded_state.name for group in groups]


def check_runs_on_core(pair: Pair) -> None:
    if pair.ours.fsdp is not pair.theirs.fsdp:
        assert pair.ours.model._get_fsdp_state()._root is not None


def train(pair: Pair, rank: int, n_steps: int = 2, **kwargs: Any) -> None:
    for step in range(n_steps):
        pair.step(data(rank, step), **kwargs)
        pair.both(states)
    check_runs_on_core(pair)


# --- bodies ---------------------------------------------------------------------------------------


def plain(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(3):
        pair.forward(data(rank, step))
        assert pair.both(states) == ["SHARDED_POST_FORWARD"] * 3 + ["UNSHARDED"]
        pair.both(whole_parameters)
        pair.backward()
        assert pair.both(states) == ["SHARDED"] * 4
        pair.optimize()
    check_runs_on_core(pair)


def whole_parameters(side: Side) -> list[Tensor]:
    return [p.full_tensor() for block in side.model.blocks for p in block.parameters()]


def root_too(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding(2))
    pair.forward(data(rank))
    assert pair.both(states) == ["SHARDED_POST_FORWARD"] * 4
    pair.backward()
    train(pair, rank)


def some_units(rank: int, n_ranks: int) -> None:
    """Beside units that reshard to all ranks, or not at all."""

    def shard(model: Any, fsdp: Any) -> None:
        for block, reshard in zip(model.blocks, (2, True, False), strict=True):
            fsdp.fully_shard(block, mesh=cached_mesh((4,)), reshard_after_forward=reshard)
        fsdp.fully_shard(model, mesh=cached_mesh((4,)))

    train(Pair(Chain, shard), rank)


def all_ranks(rank: int, n_ranks: int) -> None:
    """As many as there are is True."""
    pair = Pair(Chain, sharding(reshard_after_forward=4))
    pair.forward(data(rank))
    assert pair.both(states)[0] == "SHARDED"
    pair.backward()
    train(pair, rank)


def mixed_precision(rank: int, n_ranks: int) -> None:
    tolerance = Tolerance.of(n_ranks, torch.bfloat16)
    train(Pair(Chain, sharding(param_dtype=torch.bfloat16), tolerance=tolerance), rank)


def frozen(rank: int, n_ranks: int) -> None:
    def build() -> nn.Module:
        model = Chain()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)
        return model

    train(Pair(build, sharding()), rank)


def shared_parameters(rank: int, n_ranks: int) -> None:
    def build() -> nn.Module:
        model = Chain()
        model.blocks[1].again = model.blocks[1].up
        model.blocks[1].norm.weight = model.blocks[1].norm.bias
        return model

    train(Pair(build, sharding()), rank)


def called_twice(rank: int, n_ranks: int) -> None:
    """Torch reduces after each backward of a unit, which is another order of sums."""
    train(Pair(Chain, sharding()), rank, calls=2)


def several_forwards(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(2):
        pair.both(lambda side, step=step: two_forwards(side, rank, step), "two forwards")
        pair.both(states)
        pair.optimize()


def two_forwards(side: Side, rank: int, step: int) -> Tensor:
    first = side.model(data(rank, step))
    second = side.model(data(rank, step + 5))
    loss = first.square().mean() + second.sum()
    loss.backward()
    return loss.detach()


def validation(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(2):
        pair.eval_forward(data(rank, step))
        pair.both(states)
        pair.eval_forward(data(rank, step + 1))
        pair.step(data(rank, step))
        pair.both(states)


def checkpoints(rank: int, n_ranks: int) -> None:
    train(Pair(lambda: Chain(recompute=True), sharding()), rank)


def accumulation(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(4):
        pair.do(lambda side, s=step: side.model.set_requires_gradient_sync(s % 2 == 1), "sync")
        pair.forward(data(rank, step))
        pair.backward()
        pair.both(states)
        if step % 2 == 1:
            pair.optimize()


def unsharded_by_hand(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(2):
        pair.forward(data(rank, step))
        pair.do(lambda side: side.model.blocks[1].unshard(), "unshard")
        assert pair.both(states)[1] == "UNSHARDED"
        pair.backward()
        pair.both(states)
        pair.optimize()


def resharded_by_hand(rank: int, n_ranks: int) -> None:
    pair = Pair(Chain, sharding())
    for step in range(2):
        pair.forward(data(rank, step))
        pair.do(lambda side: side.model.blocks[1].reshard(), "reshard")
        assert pair.both(states)[1] == "SHARDED"
        pair.backward()
        pair.both(states)
        pair.optimize()


def other_after_forward(rank: int, n_ranks: int) -> None:
    """set_reshard_after_forward ends it."""
    pair = Pair(Chain, sharding())
    pair.step(data(rank))
    for after in (True, False):
        pair.do(lambda side, after=after: side.model.set_reshard_after_forward(after), "set")
        pair.forward(data(rank))
        assert pair.both(states)[0] == ("SHARDED" if after else "UNSHARDED")
        pair.backward()
        pair.optimize()


def state_dicts(rank: int, n_ranks: int) -> None:
    """A state_dict between forward and backward has shards."""
    pair = Pair(Chain, sharding())
    for step in range(2):
        pair.forward(data(rank, step))
        pair.n_checks += 1
        found = [side.model.state_dict() for side in (pair.theirs, pair.ours)]
        compare(found[1], found[0], pair.tolerance, "state_dict")
        for side in (pair.theirs, pair.ours):
            total(side.kept).backward()
        pair.check("backward")
        pair.optimize()


def loads(rank: int, n_ranks: int) -> None:
    """What is loaded between forwards counts from there on, also after one without backward."""
    pair = Pair(Chain, sharding())
    pair.step(data(rank))

    def load(side: Side) -> None:
        state = side.model.state_dict()
        dist.barrier()  # other ranks have compared what lies in memory of all
        side.model.load_state_dict({name: value * 0.5 for name, value in state.items()})

    for step in range(2):
        pair.eval_forward(data(rank, step))
        pair.do(load, "load_state_dict")
        pair.step(data(rank, step))
    pair.forward(data(rank))
    pair.do(lambda side: side.model.zero_grad(), "zero_grad")
    pair.do(load, "load_state_dict")
    pair.step(data(rank))


def exceptions(rank: int, n_ranks: int) -> None:
    """What is raised between forward and backward, or within a forward, leaves no trace."""
    pair = Pair(Chain, sharding())
    pair.forward(data(rank))  # its loss is given up
    pair.do(lambda side: setattr(side, "kept", None), "drop")
    train(pair, rank)

    def fail(side: Side) -> str:
        handle = side.model.blocks[2].down.register_forward_pre_hook(raise_error)
        try:
            side.model(data(rank))
        except ZeroDivisionError as error:
            return str(error)
        finally:
            handle.remove()
        return ""

    if pair.ours.fsdp is not pair.theirs.fsdp:  # torch's forward would not start again
        assert fail(pair.ours) == "for the test"
        train(pair, rank)


def raise_error(*_: Any) -> None:
    raise ZeroDivisionError("for the test")


def replicas(rank: int, n_ranks: int) -> None:
    """With replicas the shards of one are the whole of its mesh: the two ranks of it."""
    mesh = cached_mesh((1, 4), ("r", "s"))
    pair = Pair(Chain, sharding(mesh=mesh, root=True))
    pair.forward(data(rank))
    assert pair.both(states)[0] == "SHARDED_POST_FORWARD"
    pair.backward()
    train(pair, rank)


def within_forward(rank: int, n_ranks: int) -> None:
    """A reshard() in a unit's own forward leaves slices, too."""

    def build() -> nn.Module:
        model = Chain()
        model.blocks[1].register_forward_hook(lambda block, args, out: block.reshard())
        return model

    train(Pair(build, sharding()), rank)


def kept_by_others(rank: int, n_ranks: int) -> None:
    """Who keeps a slice has its values for good."""
    pair = Pair(Chain, sharding())

    def keep(side: Side) -> list[Any]:
        weight = side.model.blocks[0].up.weight
        side.kept_slices = [weight, side.model.blocks[1].up.weight.to_local().detach()]
        side.values = [local(weight).clone(), side.kept_slices[1].clone()]
        return [local(weight).clone(), side.kept_slices[1].clone()]

    def values(side: Side) -> list[Tensor]:
        found = [local(side.kept_slices[0]), side.kept_slices[1]]
        assert all(map(torch.equal, found, side.values))
        assert side.model.blocks[0].up.weight is not side.kept_slices[0]
        return [value.clone() for value in found]

    for step in range(2):
        pair.forward(data(rank, step))
        pair.both(keep)
        pair.backward()
        pair.both(values)
        pair.optimize()
        pair.both(values)
        pair.eval_forward(data(rank, step))
        pair.both(values)


def shared_groups(rank: int, n_ranks: int) -> None:
    """Units of one mesh have one smaller mesh."""
    pair = Pair(Chain, sharding())
    train(pair, rank)
    pair.skip_if_same()
    infos = [b._get_fsdp_state()._fsdp_param_group for b in pair.ours.model.blocks]
    assert len({id(group.post_forward_mesh_info) for group in infos}) == 1
    theirs = pair.theirs.model.blocks[0]._get_fsdp_state()._fsdp_param_group
    assert infos[0].post_forward_mesh_info.mesh == theirs.post_forward_mesh_info.mesh


BODIES = [
    plain,
    shared_groups,
    root_too,
    some_units,
    all_ranks,
    mixed_precision,
    frozen,
    shared_parameters,
    called_twice,
    several_forwards,
    validation,
    checkpoints,
    accumulation,
    unsharded_by_hand,
    resharded_by_hand,
    other_after_forward,
    state_dicts,
    loads,
    exceptions,
    replicas,
    within_forward,
    kept_by_others,
]


# Else torch makes process groups for each unit, whose threads go on polling.
_smaller: dict[tuple[Any, ...], Any] = {}


def smaller_mesh(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
    """torch's own function, with one smaller mesh for all units of a mesh."""
    key = (reshard_after_forward, mesh_info.mesh, type(mesh_info))
    if key in _smaller:
        return _smaller[key]
    info = _fsdp_init._get_post_forward_mesh_info(reshard_after_forward, mesh_info)
    if info not in (None, mesh_info):
        _smaller[key] = info
    return info


def run(rank: int, n_ranks: int, body: Callable[[int, int], None]) -> None:
    with mock.patch.object(_fully_shard, "_get_post_forward_mesh_info", smaller_mesh):
        body(rank, n_ranks)


@pytest.mark.parametrize("transport", ["shared", "callback"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_resharded_to_two(body: Callable[[int, int], None], transport: str) -> None:
    env = {"FSDP_C_TRANSPORT": transport} if transport == "callback" else None
    harness.run_ranks(run, N_RANKS, body, env=env)
