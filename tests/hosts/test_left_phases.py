"""Over several hosts a rank leaves its forward or backward by an exception: alone, it is named on
the others within seconds, and nobody waits for the group's deadline; all alike, they go on."""

import contextlib
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hosts import run_hosts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

VICTIM = 1
BAD = 1  # the step
SOON_S = 20.0  # far from the timeout of the group
LEFT = f"rank {VICTIM} left its forward or backward by an exception while rank "


class OwnError(Exception):
    pass


def refuse(*unused: Any) -> None:
    raise OwnError("the script's own")


def step_with(model: Any, rank: int, step: int, where: str) -> None:
    """One that raises in forward, behind the first blocks, or in backward, behind the last ones."""
    handle = None
    if where == "forward":
        handle = model.blocks[1].register_forward_pre_hook(refuse)
    try:
        out = model(models.data(rank, step))
        if where == "backward":
            out.register_hook(refuse)
        out.square().mean().backward()
    finally:
        if handle is not None:
            handle.remove()


def live(rank: int, n_ranks: int, where: str, goes_on: bool, who: str) -> tuple[str, float]:
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    began = time.monotonic()
    for step in range(4):
        is_bad = step == BAD and who in ("all", str(rank))
        try:
            step_with(model, rank, step, where if is_bad else "")
        except OwnError:
            if not goes_on:
                return "own", 0.0
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        model.zero_grad()
    return "through", 0.0


def alone(hosts: tuple[int, ...], where: str, goes_on: bool) -> list[tuple[str, float]]:
    outcomes = run_hosts(live, hosts, where, goes_on, str(VICTIM), timeout=60, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("hosts", [(2, 2), (2, 1), (1, 1)])
def test_alone(hosts: tuple[int, ...], where: str) -> None:
    """It does something else from then on: no message of its ever says so."""
    found = alone(hosts, where, False)
    for rank, (text, seconds) in enumerate(found):
        if rank == VICTIM:
            assert text == "own", found
        else:
            assert LEFT in text and seconds < SOON_S, found


def live_apart(rank: int, n_ranks: int, folder: str) -> tuple[str, float]:
    """The other host comes to a large unit when this one has given up what it sent of it."""
    import fsdp_c

    model: Any = models.Net(hidden=4000)
    models.shard_blocks(model, fsdp_c)

    def come_late(*unused: Any) -> None:
        time.sleep(2)

    if rank != 0:
        hook = refuse if rank == VICTIM else come_late
        model.blocks[1].register_forward_pre_hook(hook, prepend=True)
    began, said = time.monotonic(), "own"
    with contextlib.suppress(OwnError):
        try:
            model(models.data(rank, 0))
        except RuntimeError as error:
            said = str(error)
    seconds = time.monotonic() - began
    Path(folder, str(rank)).touch()
    while len(list(Path(folder).iterdir())) < n_ranks:  # nobody's lines end before
        time.sleep(0.05)
    return said, seconds


def test_alone_while_the_other_host_is_late(tmp_path: Path) -> None:
    outcomes = run_hosts(live_apart, (2, 2), str(tmp_path), timeout=60, fresh=True)
    found = [outcome.value for outcome in outcomes]
    for rank, (text, seconds) in enumerate(found):
        assert (text == "own") == (rank == VICTIM) and seconds < SOON_S, found
    assert LEFT in found[0][0], found
    assert any(LEFT in text for text, _ in found[2:]), found


def replicas(rank: int, n_ranks: int, goes_on: bool, folder: str) -> list[str]:
    """Shards inside of hosts, replicas between: one of them leaves a forward."""
    import fsdp_c

    ranks = torch.arange(4).view(2, 2)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c, mesh=mesh)
    said = []
    for step in range(2 if rank >= 2 else 3):
        try:
            step_with(model, rank, step, "forward" if (rank, step) == (VICTIM, BAD) else "")
            said.append("through")
        except (OwnError, RuntimeError) as error:
            said.append(str(error))
            if not goes_on:
                break
        model.zero_grad()
    Path(folder, str(rank)).touch()
    while len(list(Path(folder).iterdir())) < n_ranks:
        time.sleep(0.05)
    return said


@pytest.mark.parametrize("goes_on", [False, True])
def test_one_replica_alone(goes_on: bool, tmp_path: Path) -> None:
    """The other one does not wait for it, nor add up its next step's gradients."""
    for outcome in run_hosts(replicas, (2, 2), goes_on, str(tmp_path), timeout=40, fresh=True):
        assert outcome.ok, outcome
        assert outcome.value[0] == "through" and "through" not in outcome.value[BAD:], outcome


class Late(nn.Module):
    """Its last sum is of a large unit; small ones come along with others in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(models.WIDTH, 8000)
        self.down = nn.Linear(8000, models.WIDTH)
        self.blocks = nn.Sequential(*(models.Block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(self.down(torch.tanh(self.up(x))))
        return y


def late_model() -> Late:
    import fsdp_c

    model = Late()
    for module in (model.up, model.down, *model.blocks, model):
        fsdp_c.fully_shard(module)
    return model


def late_step(model: Late, rank: int, step: int, is_left: bool) -> str:
    """One that may be left in backward, where nobody waits for this rank any more."""
    x = models.data(rank, step).clone().requires_grad_()
    if is_left:
        x.register_hook(refuse)
    try:
        model(x).square().mean().backward()
    except OwnError:
        return "own"
    finally:
        model.zero_grad()
    return "through"


def behind_the_last_sum(rank: int, n_ranks: int) -> list[str]:
    model = late_model()
    return [late_step(model, rank, step, (rank, step) == (VICTIM, 0)) for step in range(3)]


@pytest.mark.parametrize("transport", ["rails", "callback"])
def test_alone_behind_the_last_sum(transport: str) -> None:
    """All come to the same units ahead in the backwards behind it."""
    env = {"FSDP_C_TRANSPORT": transport}
    for rank, said in enumerate(run_hosts(behind_the_last_sum, (1, 1), timeout=60, env=env)):
        assert said == ["own" if rank == VICTIM else "through", "through", "through"]


def left_again(rank: int, n_ranks: int, folder: str) -> str:
    """One rank leaves a backward at its end, unnoticed; the other one leaves a later forward."""
    model = late_model()
    said = [late_step(model, rank, step, (rank, step) == (VICTIM, 1)) for step in range(3)]
    assert said[0] == said[2] == "through"
    if rank != VICTIM:
        model.blocks[1].register_forward_pre_hook(refuse, prepend=True)
    try:
        text = late_step(model, rank, 3, False)
    except RuntimeError as error:
        text = str(error)
    Path(folder, str(rank)).touch()
    while len(list(Path(folder).iterdir())) < n_ranks:
        time.sleep(0.05)
    return text


def test_the_other_one_alone_later(tmp_path: Path) -> None:
    """Both count phases alike by then."""
    outcomes = run_hosts(left_again, (1, 1), str(tmp_path), timeout=40, fresh=True)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert outcomes[0].value == "own"
    assert "rank 0 left its forward or backward by an exception" in outcomes[1].value


def freeze(rank: int, n_ranks: int, is_hybrid: bool, folder: str) -> tuple[str, float]:
    """The last rank alone freezes a parameter: its backward has no collective of that left."""
    import fsdp_c

    model: Any = models.Net()
    mesh = None
    if is_hybrid:
        ranks = torch.arange(n_ranks).view(2, -1)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    models.shard_blocks(model, fsdp_c, mesh=mesh)
    began, said = time.monotonic(), "through"
    try:
        for step in range(4):
            if (rank, step) == (n_ranks - 1, BAD):
                model.get_parameter(FROZEN).requires_grad_(False)
            step_with(model, rank, step, "")
            model.zero_grad()
    except RuntimeError as error:
        said = str(error)
    seconds = time.monotonic() - began
    Path(folder, str(rank)).touch()
    while len(list(Path(folder).iterdir())) < n_ranks:  # nobody's end is what the others notice
        time.sleep(0.05)
    return said, seconds


FROZEN = "blocks.0.up.weight"


@pytest.mark.parametrize("is_hybrid", [False, True], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("hosts", [(2, 2), (2, 1), (1, 1)])
def test_frozen_on_one_rank(hosts: tuple[int, ...], is_hybrid: bool, tmp_path: Path) -> None:
    """All are told which, also those that have ended that backward; or who has left since it was
    told."""
    if is_hybrid and sum(hosts) % 2:
        pytest.skip("replicas of one size")
    last = sum(hosts) - 1
    for outcome in run_hosts(freeze, hosts, is_hybrid, str(tmp_path), timeout=60, fresh=True):
        assert outcome.ok, outcome
        said, seconds = outcome.value
        is_neighbour = is_hybrid and outcome.rank != last and "left its forward or backward" in said
        assert (f"'{FROZEN}'" in said and "is frozen" in said) or is_neighbour, outcome
        assert seconds < SOON_S, outcome


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("hosts", [(2, 1), (1, 1)])
def test_alone_and_goes_on(hosts: tuple[int, ...], where: str) -> None:
    """Its next collective is not what the others wait for."""
    found = alone(hosts, where, True)
    for rank, (text, seconds) in enumerate(found):
        assert seconds < SOON_S and text not in ("through", "own"), found
        assert rank == VICTIM or LEFT in text or "out of step" in text, found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("hosts", [(2, 2), (1, 1)])
def test_all_alike(hosts: tuple[int, ...], where: str) -> None:
    for text, _ in run_hosts(live, hosts, where, True, "all", timeout=60):
        assert text == "through"


def gradients_after(rank: int, n_ranks: int, where: str) -> None:
    """Of the step after one that all have left: those of the unsharded model."""
    import fsdp_c

    torch.manual_seed(0)
    plain: Any = models.Net()
    torch.manual_seed(0)
    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    for _ in range(2):
        with pytest.raises(OwnError):
            step_with(model, rank, BAD, where)
        model.zero_grad()
    step_with(model, rank, 2, "")
    for peer in range(n_ranks):
        (plain(models.data(peer, 2)).square().mean() / n_ranks).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_after_all_have_raised(where: str) -> None:
    run_hosts(gradients_after, (2, 1), where, timeout=60)


def unshard_beside(rank: int, n_ranks: int) -> str:
    """One rank unshards a block while the others are in a forward; then all train on."""
    import fsdp_c

    model: Any = models.Net()
    models.shard_blocks(model, fsdp_c)
    step_with(model, rank, 0, "")
    with pytest.raises(RuntimeError) as found:
        if rank == VICTIM:
            model.blocks[0].unshard()
        step_with(model, rank, 1, "")
    step_with(model, rank, 2, "")
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    step_with(model, rank, 3, "")
    return str(found.value)


@pytest.mark.parametrize("transport", ["", "callback"])
def test_unshard_beside_a_forward(transport: str) -> None:
    env = {"FSDP_C_TRANSPORT": transport} if transport else {}
    for outcome in run_hosts(unshard_beside, (1, 1), timeout=60, fresh=True, env=env):
        assert outcome.ok, outcome
        assert f"unshard() on rank {VICTIM}" in outcome.value, outcome
