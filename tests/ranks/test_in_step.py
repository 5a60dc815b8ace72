"""Programs whose ranks differ, or do what resembles being out of step, and are right: no error."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from models import Branches, data, shard_blocks
from parity import total
from torch import Tensor, nn

TRANSPORTS = {
    "shared memory": {},
    "messages": {"FSDP_C_TRANSPORT": "callback"},
    "device": {"FSDP_C_DEVICES": "cpu"},
}
# Over messages all ranks use the same units.
SHARED_MEMORY_ONLY = {"units_of_some_ranks", "no_unit_on_one_rank", "unsynchronized_loss_left_out"}
PROGRAMS: dict[str, Callable[[int], None]] = {}
STEPS = 4


def program(body: Callable[[int], None]) -> Callable[[int], None]:
    PROGRAMS[body.__name__] = body
    return body


def made(**policies: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Branches()
    shard_blocks(model, harness.implementation(), **policies)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    total(model(data(rank, step))).backward()
    update(optimizer)


@program
def units_of_some_ranks(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        total(model(data(rank, step), use=((0, 1), (2,))[(rank + step) % 2])).backward()
        update(optimizer)


@program
def no_unit_on_one_rank(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        total(model(data(rank, step), use=() if rank == step % 2 else (0, 1, 2))).backward()
        update(optimizer)


@program
def unsynchronized_loss_left_out(rank: int) -> None:
    """Nothing is reduced or gathered in that backward, under torch too."""
    model = made(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = sgd(model)
    for step in range(STEPS):
        model.set_requires_gradient_sync(False)
        loss = total(model(data(rank, step)))
        if rank == 0:
            loss.backward()
        model.set_requires_gradient_sync(True)
        train(model, optimizer, rank, step)


@program
def all_ranks_pass_a_loss_over(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = total(model(data(rank, step)))
        if step == 1:
            continue
        loss.backward()
        update(optimizer)


@program
def metrics_on_all_ranks(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        model(data(rank, step))
        model.blocks[1](data(rank, step))
        with torch.no_grad():
            model(data(rank, step))
        train(model, optimizer, rank, step)


@program
def units_without_a_root(rank: int) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.05)
    model(data(rank, 0))
    for step in range(STEPS):
        x = data(rank, step)
        for block in model.blocks:
            x = block(x)
        total(x).backward()
        update(optimizer)


@program
def accumulation(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            total(model(data(rank, 3 * step + micro))).backward()
        update(optimizer)


@program
def two_losses(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = total(model(data(rank, step)))
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        update(optimizer)


@program
def momentum_encoder(rank: int) -> None:
    model, teacher = (made(reshard_after_forward=True) for _ in range(2))
    teacher.requires_grad_(False)
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = teacher(data(rank, step))
        (model(data(rank, step)) - target).square().mean().backward()
        update(optimizer)


@program
def optimizer_in_backward(rank: int) -> None:
    model = made()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step_now(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    for step in range(STEPS):
        total(model(data(rank, step))).backward()


@program
def closures(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for layer in (model[0], model[2], model):
        harness.implementation().fully_shard(layer)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = total(model(torch.ones(2, 8) + step))
            loss.backward()
            return loss

        optimizer.step(closure)


@program
def two_models(rank: int) -> None:
    """A step of the one changes nothing of the other's count."""
    generator, critic = made(), made()
    first, second = sgd(generator), torch.optim.Adam(critic.parameters())
    for step in range(STEPS):
        fake = generator(data(rank, step))
        total(critic(fake.detach())).backward()
        second.step()
        second.zero_grad()
        total(critic(fake)).backward()
        first.step()
        first.zero_grad()
        second.zero_grad()


@program
def two_optimizers(rank: int) -> None:
    model = made()
    optimizers = [sgd(model.blocks[0]), torch.optim.AdamW(model.blocks[1].parameters())]
    for step in range(STEPS):
        total(model(data(rank, step))).backward()
        optimizers[step % 2].step()
        model.zero_grad()


@program
def optimizer_of_one_rank(rank: int) -> None:
    """Its parameters are no shards."""
    model, probe = made(), nn.Linear(8, 1)
    optimizer = sgd(model)
    own = sgd(probe)
    for step in range(STEPS):
        if rank == 0:
            probe(torch.ones(2, 8)).sum().backward()
            own.step()
            copy.deepcopy(own).step()
        train(model, optimizer, rank, step)


class DictState(torch.optim.SGD):
    """Its state is its `__dict__`."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@program
def optimizers_with_a_past(rank: int) -> None:
    """Steps before one held shards are nobody's; what counts them is no part of its state."""
    model, probe = made(), nn.Linear(8, 1)
    optimizer = DictState(probe.parameters(), lr=0.05)
    for _ in range(1 + rank):
        probe(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    pickle.dumps(optimizer)
    optimizer.add_param_group({"params": list(model.parameters())})
    for step in range(STEPS):
        train(model, optimizer, rank, step)


@program
def failures_caught_by_all(rank: int) -> None:
    """One rank fails once, between forward and backward; all catch what they get, and go on. What
    follows depends on who is how far by then, so it is done often."""
    for _ in range(15):
        model = made()
        optimizer = sgd(model)
        n_caught = 0
        for step in range(3 * STEPS):
            try:
                loss = total(model(data(rank, step)))
                if step == 2 and rank == 1:
                    raise ValueError("no loss")
                loss.backward()
            except (RuntimeError, ValueError):
                n_caught += 1
                optimizer.zero_grad()
                continue
            update(optimizer)
        assert n_caught <= 4, n_caught


@program
def unshard_after_failures(rank: int) -> None:
    """What became of the backward before says nothing of an unshard, on whichever rank comes first;
    nor do collectives of that backward that only some ranks have begun."""
    model = made()
    optimizer = sgd(model)
    for step in range(3 * STEPS):
        fails = step % 3 < 2 or rank == 1  # on all ranks, or on one of them
        hook = model.blocks[1].register_forward_hook(failing if fails else passing)
        with contextlib.suppress(RuntimeError):
            total(model(data(rank, step))).backward()
        hook.remove()
        optimizer.zero_grad()
        model.reset_iter_state()
        unit = model.blocks[step % 3]
        unit.unshard()
        whole = [p.detach().clone() for p in unit.parameters()]
        unit.reshard()
        for shard, p in zip(unit.parameters(), whole, strict=True):
            assert torch.equal(shard.full_tensor(), p)
        train(model, optimizer, rank, step)


def failing(module: nn.Module, args: Any, out: Tensor) -> None:
    """Its backward does, at the output."""
    out.register_hook(fail)


def passing(module: nn.Module, args: Any, out: Tensor) -> None:
    pass


def fail(grad: Tensor) -> None:
    raise RuntimeError("for the test")


@program
def evaluation_on_all_ranks(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        train(model, optimizer, rank, step)
        model.eval()
        with torch.no_grad():
            for batch in range(2):
                model(data(rank, batch))
        model.train()


@program
def loads_on_all_ranks(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    for step in range(STEPS):
        train(model, optimizer, rank, step)
        model.load_state_dict(copy.deepcopy(model.state_dict()))


@program
def scaled_steps_left_out_on_all_ranks(rank: int) -> None:
    model = made()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(STEPS):
        loss = total(model(data(rank, step)))
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def run_in_turn(rank: int, n_ranks: int, names: list[str]) -> None:
    for name in names:
        print(name, flush=True)
        PROGRAMS[name](rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_refused(transport: str) -> None:
    """Over messages and on devices all ranks use the same units."""
    names = [n for n in PROGRAMS if transport == "shared memory" or n not in SHARED_MEMORY_ONLY]
    harness.run_ranks(run_in_turn, 2, names, env=TRANSPORTS[transport], timeout=120)
