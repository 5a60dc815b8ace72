"""Methods of groups that a tool has replaced: the core stays, and its hooks call them."""

from collections.abc import Callable
from typing import Any

import harness
import models
import pytest
from behaviour.records import collectives
from differential.ways import TRANSPORTS
from models import Net, data
from parity import Pair, Side, Tolerance, on_ranks, total

import fsdp_c

CLOSE = Tolerance(relative=1e-5, scaled=1e-5)
METHODS = (
    "unshard wait_for_unshard reshard pre_forward post_forward pre_backward post_backward".split()
)


def groups_of(side: Side) -> dict[str, Any]:
    names = {"": side.model, **{f"blocks.{i}": b for i, b in enumerate(side.model.blocks)}}
    return {n: m._get_fsdp_state()._fsdp_param_groups[0] for n, m in names.items()}


def replace(side: Side, methods: Any, calls: list[tuple[str, str, str]]) -> None:
    for name, group in groups_of(side).items():
        for method in methods:
            setattr(group, method, noting(group, getattr(group, method), (method, name), calls))


def noting(group: Any, original: Callable[..., Any], what: Any, calls: list[Any]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        calls.append((*what, group._training_state.name))
        return original(*args, **options)

    return call


def put_back(side: Side) -> None:
    for group in groups_of(side).values():
        for method in METHODS:
            group.__dict__.pop(method, None)


def check_on_core(pair: Pair) -> None:
    pair.skip_if_same()
    assert all(row.road.startswith("core over") for row in fsdp_c.explain(pair.ours.model).units)


@pytest.mark.parametrize("when", ["first", "later"])
@on_ranks(1, 2)
def test_training(rank: int, n_ranks: int, when: str) -> None:
    pair = Pair(Net, models.shard_blocks)
    if when == "later":
        pair.step(data(rank, 9))
    pair.do(lambda side: replace(side, METHODS, []))
    models.train(pair, rank)
    pair.do(put_back)
    pair.step(data(rank, 6))
    check_on_core(pair)
    assert not any(group._core_calls_methods for group in groups_of(pair.ours).values())


@on_ranks(1, 2)
def test_order_of_calls(rank: int, n_ranks: int) -> None:
    """And in which state of training each finds its unit."""
    pair = Pair(Net, models.shard_blocks)

    def step(side: Side) -> Any:
        calls: list[Any] = []
        replace(side, METHODS, calls)
        total(side.model(data(rank))).backward()
        put_back(side)
        return [" ".join(call) for call in calls]

    for _ in range(2):
        calls = pair.both(step)
    assert [call.split()[0] for call in calls].count("post_backward") == 4
    check_on_core(pair)


@on_ranks(2)
def test_order_with_collectives_in_sight(rank: int, n_ranks: int) -> None:
    """Gathers ahead are calls of unshard, over shared memory too."""
    pair = Pair(Net, models.shard_blocks, tolerance=CLOSE)

    def step(side: Side) -> Any:
        calls: list[Any] = []
        replace(side, METHODS, calls)
        with collectives() as seen:
            total(side.model(data(rank))).backward()
        put_back(side)
        return [name for name, *_ in seen], calls

    for _ in range(2):
        seen, calls = pair.both(step)
    assert len({call[:2] for call in calls}) == 4 * len(METHODS) and len(seen) == 7 + 4
    check_on_core(pair)


@on_ranks(2)
def test_what_forward_methods_return_counts(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)

    def scale(side: Side) -> None:
        group = groups_of(side)["blocks.1"]
        before, after = group.pre_forward, group.post_forward

        def pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = before(module, args, kwargs)
            return (args[0] * 2,), kwargs

        group.pre_forward = pre_forward
        group.post_forward = lambda module, args, output: after(module, args, output) * 3

    pair.do(scale)
    pair.step(data(rank))
    check_on_core(pair)


@on_ranks(2)
def test_on_one_rank_alone(rank: int, n_ranks: int) -> None:
    """No other rank has to know."""
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))
    if rank == 1:
        pair.do(lambda side: replace(side, METHODS, []))
    pair.step(data(rank, 1))
    check_on_core(pair)


def check_one_rank(rank: int, n_ranks: int) -> None:
    pair = Pair(Net, models.shard_blocks)
    pair.skip_if_same()
    if rank == 1:
        pair.do(lambda side: replace(side, METHODS, []))
    for step in range(2):
        pair.step(data(rank, step))


@pytest.mark.parametrize("transport", ["messages", "device"])
def test_on_one_rank_alone_over(transport: str) -> None:
    harness.run_ranks(check_one_rank, 2, apart=True, env=TRANSPORTS[transport])


@pytest.mark.parametrize("method", ["unshard", "pre_forward", "post_backward"])
@on_ranks(2)
def test_a_method_that_raises(rank: int, n_ranks: int, method: str) -> None:
    """On one rank: the other gets an error in seconds, and both go on."""
    pair = Pair(Net, models.shard_blocks)
    pair.step(data(rank))
    pair.skip_if_same()
    model = pair.ours.model

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("the tool is broken")

    if rank == 0:
        setattr(groups_of(pair.ours)["blocks.1"], method, fail)
    with pytest.raises((ValueError, RuntimeError), match="the tool is broken|rank 0"):
        total(model(data(rank))).backward()
        model(data(rank))
    put_back(pair.ours)
    model.reset_iter_state()
    total(model(data(rank))).backward()


@on_ranks(1, 2)
def test_a_method_that_does_nothing(rank: int, n_ranks: int) -> None:
    """What a unit has to do for its peers is done all the same: no gradient is lost."""
    pair = Pair(Net, models.shard_blocks)
    pair.skip_if_same()
    groups_of(pair.ours)["blocks.0"].post_backward = lambda *args: None
    groups_of(pair.ours)["blocks.1"].unshard = lambda *args: None
    pair.theirs.kept = total(pair.theirs.model(data(rank)))
    pair.ours.kept = total(pair.ours.model(data(rank)))
    for side in (pair.theirs, pair.ours):
        side.kept.backward()
    pair.check("after a backward")
