"""Units whose collectives others look at run on the core, and make those that torch's make."""

import contextlib
import functools
from typing import Any

import harness
import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from behaviour.pairs import Collectives
from harness import cached_mesh
from models import Net, data
from parity import Pair, Plain, Side, Tolerance, on_ranks

import fsdp_c
from fsdp_c._comm import _communicator

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)


def double(reduced: torch.Tensor) -> None:
    reduced.mul_(2)


def set_hook(side: Side) -> None:
    side.model.blocks[1].set_all_reduce_hook(double)


def words(side: Side) -> list[str]:
    return [row.road for row in fsdp_c.explain(side.model).units]


@on_ranks(1, 2, 3)
def test_hook_before_the_first_forward(rank: int, n_ranks: int) -> None:
    """Only its own unit pays for it."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    pair.do(set_hook)
    for step in range(3):
        pair.step(data(rank, step))
    pair.skip_if_same()
    by_unit = {row.unit: row.road for row in fsdp_c.explain(pair.ours.model).units}
    assert by_unit["blocks.1"] == "core over collectives in sight: an all-reduce hook"
    assert by_unit["blocks.0"].startswith("core over")
    assert not any("hook" in word for unit, word in by_unit.items() if unit != "blocks.1")


@on_ranks(1, 2)
def test_hook_set_and_taken_back_between_steps(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    pair.step(data(rank, 0))
    pair.do(set_hook)
    for step in range(1, 3):
        pair.step(data(rank, step))
    pair.do(
        lambda side: setattr(
            side.model.blocks[1]._get_fsdp_state()._fsdp_param_group, "_all_reduce_hook", None
        )
    )
    for step in range(3, 5):
        pair.step(data(rank, step))
    pair.skip_if_same()
    assert not any("hook" in word for word in words(pair.ours))


@on_ranks(2, 3)
def test_padding_is_zeros(rank: int, n_ranks: int) -> None:
    """Who looks may take the norm of what travels, or scale by its largest element."""

    def note(call: Any, into: list[Any]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input_tensor")
            into.append((given if given is not None else args[1]).double().norm())
            return call(*args, **kwargs)

        return noted

    def train(side: Side) -> list[torch.Tensor]:
        seen: list[Any] = []
        unit = side.model.blocks[1]
        group = unit._get_fsdp_state()._fsdp_param_group
        for comm, take in (
            (group._all_gather_comm, unit.set_custom_all_gather),
            (group._reduce_scatter_comm, unit.set_custom_reduce_scatter),
        ):
            custom = type("Custom", (type(comm),), {"__call__": note(type(comm).__call__, seen)})
            take(custom())
        unit.set_all_reduce_hook(lambda grad: seen.append(grad.double().norm()))
        for step in range(3):
            dirt = [torch.full((n,), torch.inf) for n in range(1, 600)]
            del dirt  # into memory that the next who ask get
            side.model(data(rank, step)).square().mean().backward()
        return seen

    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for options in ({}, {"mp_policy": policy}):
        pair = Pair(Net, functools.partial(models.shard_blocks, **options), tolerance=CLOSE)
        pair.both(train, "norms")


@on_ranks(4)
def test_hook_between_replicas_with_partial_sums(rank: int, n_ranks: int) -> None:
    def shard(model: Any, fsdp: Any) -> None:
        models.shard_blocks(model, fsdp, mesh=cached_mesh((2, 2), ("r", "s")))

    pair = Pair(Net, shard, tolerance=CLOSE)
    pair.do(set_hook)
    for step in range(4):
        pair.do(lambda side, last=step % 2 == 1: side.model.set_requires_all_reduce(last))
        pair.forward(data(rank, step))
        pair.backward()


@on_ranks(4)
def test_hook_between_replicas_makes_no_other_collective(rank: int, n_ranks: int) -> None:
    """Gathers and sums of shards stay in shared memory; what the hook sees is torch's."""
    made: list[str] = []
    seen: dict[str, list[torch.Tensor]] = {"torch": [], "tested": []}

    def shard(model: Any, fsdp: Any) -> None:
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = cached_mesh((2, 2), ("r", "s"))
        models.shard_blocks(model, fsdp, mesh=mesh, mp_policy=policy)

    def keep(side: Side) -> None:
        for block in side.model.blocks:
            block.set_all_reduce_hook(lambda reduced: seen[side.name].append(reduced.clone()))

    def counted(process_group: dist.ProcessGroup) -> Any:
        made.append("")
        return make(process_group)

    make = _communicator.communicator_for
    pair = Pair(Net, shard, tolerance=Tolerance(relative=1e-2, scaled=1e-2))
    pair.do(keep)
    pair.step(data(rank, 0))
    pair.skip_if_same()
    _communicator.communicator_for = counted
    try:
        pair.step(data(rank, 1))
    finally:
        _communicator.communicator_for = make
    assert len(made) == len(pair.ours.model.blocks)
    for mine, theirs in zip(seen["tested"], seen["torch"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


class Gather:
    """What torch's does, noted."""

    def __init__(self) -> None:
        self.n_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        self.n_calls += 1
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


@on_ranks(2)
def test_custom_gather_leaves_sums_in_shared_memory(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    gathers = {side: Gather() for side in (pair.ours, pair.theirs)}
    pair.do(
        lambda side: [block.set_custom_all_gather(gathers[side]) for block in side.model.blocks]
    )
    pair.step(data(rank, 0))
    pair.skip_if_same()
    sent = dist.group.WORLD._get_sequence_number_for_group()
    pair.ours.model(data(rank, 1)).sum().backward()
    made = dist.group.WORLD._get_sequence_number_for_group() - sent
    pair.theirs.model(data(rank, 1)).sum().backward()
    assert gathers[pair.ours].n_calls == gathers[pair.theirs].n_calls > 0
    # All that the process group has seen are the gathers.
    assert made == gathers[pair.ours].n_calls // 2


@on_ranks(2)
def test_mode_in_some_steps(rank: int, n_ranks: int) -> None:
    """It sees torch's collectives while it is active, and costs nothing after."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    seen: dict[Side, list[Any]] = {pair.ours: [], pair.theirs: []}

    def step(side: Side, index: int) -> None:
        with Collectives() if index % 2 else contextlib.nullcontext() as mode:
            side.model(data(rank, index)).sum().backward()
        seen[side].append(mode.names if mode else None)

    for index in range(4):
        pair.do(lambda side, index=index: step(side, index))
    pair.skip_if_same()
    assert seen[pair.ours] == seen[pair.theirs] and seen[pair.ours][1]
    for name, shard in pair.ours.shards.items():
        torch.testing.assert_close(
            shard.grad.to_local(), pair.theirs.shards[name].grad.to_local(), msg=name
        )


@on_ranks(2)
def test_mode_around_the_first_forward_alone(rank: int, n_ranks: int) -> None:
    """The next one finds the model where it would be without."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)

    def step(side: Side, index: int) -> None:
        with Collectives() if index == 0 else contextlib.nullcontext():
            side.model(data(rank, index)).sum().backward()

    pair.do(lambda side: step(side, 0))
    pair.skip_if_same()
    assert any("dispatch mode" in word for word in words(pair.ours))
    for index in range(1, 3):
        pair.do(lambda side, index=index: step(side, index))
        assert not any("dispatch mode" in word for word in words(pair.ours))
    pair.check("at the end")


@on_ranks(2)
def test_mode_of_one_rank_around_the_first_forward(rank: int, n_ranks: int) -> None:
    """Its end is seen on that rank alone, so that nothing changes."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    for index in range(3):
        with Collectives() if rank == 1 and index == 0 else contextlib.nullcontext():
            pair.step(data(rank, index))
    pair.skip_if_same()
    assert all("dispatch mode" in word for word in words(pair.ours))


@on_ranks(2)
def test_mode_of_one_rank_is_named(rank: int, n_ranks: int) -> None:
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return
    harness.seed_everything(1)
    model = Net()
    models.shard_blocks(model, fsdp)
    model(data(rank)).sum().backward()
    with (
        Collectives() if rank == 1 else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match="rank 1"),
    ):
        model(data(rank))
    dist.barrier()


@on_ranks(2, 3)
def test_hook_of_one_rank(rank: int, n_ranks: int) -> None:
    """The others make the same collectives."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    if rank == n_ranks - 1:
        pair.do(lambda side: side.model.blocks[0].set_all_reduce_hook(lambda reduced: None))
    for step in range(2):
        pair.step(data(rank, step))
    pair.skip_if_same()
    (word,) = [word for word in words(pair.ours) if "hook" in word]
    assert (f"on rank {n_ranks - 1}" in word) == (rank < n_ranks - 1)


@on_ranks(2)
def test_hook_after_an_early_unshard(rank: int, n_ranks: int) -> None:
    """The unit is bound by then; its parameters, and hooks on them, are those of the forward."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)

    def unshard(side: Side) -> None:
        block = side.model.blocks[1]
        block.unshard()
        block.up.weight.register_hook(lambda grad: grad * 3)
        block.set_all_reduce_hook(double)

    pair.do(unshard)
    pair.forward(data(rank))
    pair.backward()
    pair.skip_if_same()
    assert any("hook" in word for word in words(pair.ours))


SHAPES = {"sharded": None, "one rank": (1,), "replicas of one": (-1, 1), "one replica": (1, -1)}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_watched", [False, True])
@on_ranks(1, 2)
def test_divide_factor_with_a_hook(
    rank: int, n_ranks: int, is_watched: bool, shape: str, reduce_dtype: torch.dtype | None
) -> None:
    """Each gradient is divided once, by the whole factor, before the hook or after it."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp or (shape == "one rank" and n_ranks > 1):
        return
    sizes = tuple(n_ranks if size < 0 else size for size in SHAPES[shape] or (n_ranks,))
    plain = Plain(Net)
    shard = functools.partial(
        models.shard_blocks,
        mesh=cached_mesh(sizes, ("r", "s")[-len(sizes) :]),
        mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    )
    side = Side("ours", fsdp, Net, shard, None)
    set_hook(side)
    for module in (*side.model.blocks, side.model):
        module.set_gradient_divide_factor(6.0)
    tolerance = CLOSE if reduce_dtype is None else Tolerance(relative=1e-2, scaled=1e-2)
    for step in range(2):
        side.model.zero_grad()
        with Collectives() if is_watched else contextlib.nullcontext():
            side.model(data(rank, step)).sum().backward()
        plain.model.zero_grad()
        plain.backward([plain.model(data(r, step)).sum() for r in range(n_ranks)], 6.0)
        for parameter in plain.model.blocks[1].parameters():
            parameter.grad *= 2  # as the hook does
        plain.check(side, tolerance)


@on_ranks(1, 2)
def test_divide_factor_of_zero_is_named(rank: int, n_ranks: int) -> None:
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return
    side = Side("ours", fsdp, Net, models.shard_blocks, None)
    set_hook(side)
    side.model.blocks[1].set_gradient_divide_factor(0)
    with pytest.raises(ZeroDivisionError, match=r"blocks\.1"):
        side.model(data(rank)).sum().backward()


@on_ranks(1, 2)
def test_hook_set_while_a_unit_is_unsharded(rank: int, n_ranks: int) -> None:
    """It stays unsharded, with what was written to it."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)
    pair.step(data(rank, 0))

    def unshard(side: Side) -> None:
        side.model.blocks[0].unshard()
        with torch.no_grad():
            side.model.blocks[0].up.weight.mul_(3)
        set_hook(side)

    pair.do(unshard)
    pair.forward(data(rank, 1))
    pair.backward()
    pair.step(data(rank, 2))
    pair.skip_if_same()
    assert any("hook" in word for word in words(pair.ours))


class Careless(Net):
    """Rank 1 does something else with the second block, or with what it brings."""

    act = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = self.act if dist.get_rank() == 1 else ""
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            for _ in range({"skip": 0, "twice": 2}.get(act, 1) if index == 1 else 1):
                x = block(x)
        return (x.detach() if act == "bypass" else x) * self.scale.sum()


def check_careless(model: Any, act: str, rank: int) -> None:
    """Gradients are the mean over ranks, doubled where the hook is."""
    harness.seed_everything(1)
    plain: Any = Careless()
    plain.act = act
    plain(data(rank)).sum().backward()
    for (name, parameter), sharded in zip(
        plain.named_parameters(), model.parameters(), strict=True
    ):
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(wanted)
        wanted *= 1 if name.startswith("blocks.1") else 0.5
        torch.testing.assert_close(sharded.grad.full_tensor(), wanted, msg=name)


@pytest.mark.parametrize("act", ["skip", "twice", "bypass"])
@pytest.mark.parametrize("sizes", [(2,), (1, 2), (2, 1)])
@on_ranks(2, apart=True)
def test_ranks_that_differ_are_named(
    rank: int, n_ranks: int, act: str, sizes: tuple[int, ...]
) -> None:
    """Each waits for the other, for the collectives of another unit: long before the deadline."""
    fsdp = harness.implementation()
    if fsdp is torch_fsdp:
        return
    harness.seed_everything(1)
    model: Any = Careless()
    mesh = cached_mesh(sizes, ("r", "s")[-len(sizes) :])
    models.shard_blocks(model, fsdp, mesh=mesh)
    model.blocks[1].set_all_reduce_hook(double)
    model(data(rank)).sum().backward()
    model.act = act
    if sizes == (1, 2) or (sizes, act) == ((2, 1), "twice"):
        # Between shards a unit that was left out counts as zero; one that ran twice is summed once.
        model.zero_grad()
        model(data(rank)).sum().backward()
        check_careless(model, act, rank)
        return
    with pytest.raises(RuntimeError, match=rf"rank {1 - rank} ") as caught:
        model(data(rank)).sum().backward()
    texts: list[Any] = [None] * n_ranks
    dist.all_gather_object(texts, str(caught.value))
    # Who comes late hears that the other has left; the other says why.
    named = [text for text in texts if "all ranks make the same calls in the same order" in text]
    assert named and all("in " in text and "(step 2)" in text for text in named), texts


class Mixed(torch.nn.Module):
    """Parameters of three types in one unit: 8 bytes each behind 9 times 4 or 2 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 5, bias=False)
        self.second = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
        self.third = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).bfloat16()).double())


@on_ranks(2, 3)
def test_types_in_one_unit(rank: int, n_ranks: int) -> None:
    """torch refuses them; the unsharded model is the judge."""
    torch.manual_seed(0)
    whole, model = Mixed(), Mixed()
    model.load_state_dict(whole.state_dict())
    fsdp_c.fully_shard(model, mesh=cached_mesh((n_ranks,)))
    model.set_all_reduce_hook(lambda reduced: None)
    for step in range(3):
        inputs = [
            torch.randn(4, 1, generator=torch.Generator().manual_seed(10 * step + r))
            for r in range(n_ranks)
        ]
        for x in inputs:
            (whole(x).square().mean() / n_ranks).backward()
        model(inputs[rank]).square().mean().backward()
        for p, q in zip(whole.parameters(), model.parameters(), strict=True):
            # bfloat16 sums are rounded at other places.
            torch.testing.assert_close(
                q.grad.full_tensor(), p.grad, rtol=0.03, atol=0.03 * float(p.grad.abs().max())
            )
        whole.zero_grad()
        model.zero_grad()
    (tree,) = [tree for tree in fsdp_c.status().trees if tree.root == "Mixed"]
    assert tree.transports == ("callback",)
