"""Ways to leave step: what one rank does in the place of a training step."""

from collections.abc import Callable, Sequence

import torch
from parity import total
from torch import Tensor, nn

import fsdp_c

TRANSPORTS = {
    "shared memory": {},
    "messages": {"FSDP_C_TRANSPORT": "callback"},
    "device": {"FSDP_C_DEVICES": "cpu"},
}
APART = "ranks are out of step"


class Trial:
    """A training loop of which a way replaces a step.

    Args:
        plain: The model before it was sharded.
        units: Modules of the model that are units, none of them the root.
        inputs: Gives this rank's input of a step; what units take, too.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        units: Sequence[nn.Module],
        inputs: Callable[[int], Tensor],
    ) -> None:
        self.model = model
        self.plain = plain
        self.units = units
        self.inputs = inputs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.n_steps = 0

    def loss(self, step: int) -> Tensor:
        return total(self.model(self.inputs(step)))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n_steps += 1

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.update()


Way = Callable[[Trial, int], None]
WAYS: dict[str, Way] = {}
# What the error says where rank 1 of two leaves step in step 3 of a model whose units are
# blocks.0, blocks.1 and blocks.2.
SAID: dict[str, str] = {}


def way(pattern: str) -> Callable[[Way], Way]:
    def add(body: Way) -> Way:
        WAYS[body.__name__] = body
        SAID[body.__name__] = pattern
        return body

    return add


@way(f"{APART}: step 3 begins in the forward of .root. on rank 0, .* blocks.0 on rank 1")
def units_without_root(trial: Trial, step: int) -> None:
    x = trial.inputs(step)
    for unit in (trial.units[0], trial.units[-1]):
        x = unit(x)
    total(x).backward()
    trial.update()


@way(f"{APART}: step 3 begins in the forward of .root. on rank 0, .* blocks.1 on rank 1")
def a_sequential_of_some_units(trial: Trial, step: int) -> None:
    total(nn.Sequential(*trial.units[1:])(trial.inputs(step))).backward()
    trial.update()


@way(APART)
def one_more_forward(trial: Trial, step: int) -> None:
    trial.loss(step)
    trial.step(step)


@way(APART)
def one_more_forward_after_backward(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.loss(step)
    trial.update()


@way(f"{APART}: step 3 begins in the forward of .root. on rank 0, .* blocks.1 on rank 1")
def one_more_forward_of_a_unit(trial: Trial, step: int) -> None:
    trial.units[1](trial.inputs(step))
    trial.step(step)


@way(f"{APART} at unit .*begins after 3 optimizer steps .* of rank 0, and after 2 .* of rank 1")
def one_more_forward_and_backward(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.step(step)


@way("rank 1 went on to the forward of step 4 without the backward of step 3 that rank 0 is in")
def loss_passed_over(trial: Trial, step: int) -> None:
    trial.loss(step)


@way("rank 1 went on to the forward of step 4 without the backward of step 3 .*2 on rank 0")
def backward_left_out(trial: Trial, step: int) -> None:
    trial.loss(step)
    trial.update()


@way("is a forward with(out)? gradients on rank .* and a forward with(out)? gradients on rank")
def one_more_forward_without_gradients(trial: Trial, step: int) -> None:
    with torch.no_grad():
        trial.loss(step)
    trial.step(step)


@way(rf"{APART}.*the backward of step 3 \(number 2 of it\) that rank 1 is in")
def two_backwards(trial: Trial, step: int) -> None:
    loss = trial.loss(step)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()
    trial.update()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 2 .* of rank 1")
def step_left_out(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.optimizer.zero_grad()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 4 .* of rank 1")
def two_steps(trial: Trial, step: int) -> None:
    trial.loss(step).backward()
    trial.optimizer.step()
    trial.update()


@way(f"{APART} at unit .*after 3 optimizer steps .* of rank 0, and after 7 .* of rank 1")
def load_alone(trial: Trial, step: int) -> None:
    trial.step(step)
    whole = {name: param.detach() for name, param in trial.plain.named_parameters()}
    fsdp_c.load_full(trial.model, whole)


@way("rank 1 keeps the gradients|set_requires_gradient_sync")
def unequal_sync(trial: Trial, step: int) -> None:
    trial.model.set_requires_gradient_sync(False)
    trial.step(step)
    trial.model.set_requires_gradient_sync(True)


@way("rank 1 went on to the forward of step 4 without the backward of step 3")
def caught_between(trial: Trial, step: int) -> None:
    try:
        trial.loss(step)
        raise torch.OutOfMemoryError("no memory for the loss")
    except torch.OutOfMemoryError:
        trial.optimizer.zero_grad()
