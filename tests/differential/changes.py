"""What scripts change in the middle: parameters, contexts, the end of backward, the way in.

Left out for what torch does: a change of dtype after the first forward, since its next backward
fails; going on after an exception in backward without a reset, since there are no gradients then.
"""

import torch.distributed.fsdp as torch_fsdp

from differential import on_device
from differential.steps import Steps

# Refused by torch.optim on a CPU, or for leaves; the same errors must come, and no step.
REFUSED_OPTIMIZERS = [
    "Adam(model.parameters(), differentiable=True)",
    "AdamW(model.parameters(), capturable=True)",
    "SGD(model.parameters(), lr=0.1, differentiable=True)",
    "Adamax(model.parameters(), differentiable=True)",
]
# Parameters that every layer of the name has.
WEIGHTS = {"block": "up.weight", "linear": "weight", "norm": "bias", "tuple": "left.weight"}


class Changes(Steps):
    """Blocks that change what the setting has decided."""

    def replace(self) -> list[str]:
        """Another parameter at a shard's place, before the first forward: later ones torch drops
        without a word, and fsdp_c takes."""
        places = [i for i, name in enumerate(self.layers) if name in WEIGHTS]
        if not places or self.has_hooks:
            return []
        index = self.rng.choice(places)
        module, _, name = f"model.layers[{index}].{WEIGHTS[self.layers[index]]}".rpartition(".")
        old = f"{module}.{name}"
        value = self.rng.choice([f"{old}.detach() * 2", f"torch.full_like({old}, 0.5)"])
        return [
            f"{old} = nn.Parameter({value}, requires_grad={old}.requires_grad)",
            "shards = dict(model.named_parameters())",
            self.optimizer(),
            *self.train(),
        ]

    def refuse_optimizer(self) -> list[str]:
        """While gradients are there: what is refused must leave all as it was."""
        if self.stays_unsharded or self.ignores:
            return []
        call = f"torch.optim.{self.rng.choice(REFUSED_OPTIMIZERS)}.step()"
        return [
            f"out = {self.forward()}",
            self.backward(),
            *self.hook_lines(),
            f"what = attempt(lambda: {call})",
            *self.finish(),
        ]

    def finalize(self) -> list[str]:
        """Backwards whose end the script says, since torch 2.15. With partial sums of replicas
        torch refuses to end them."""
        if not hasattr(torch_fsdp.FSDPModule, "finalize_backward"):
            return []
        if self.program.has("set_requires_all_reduce", "set_is_last_backward"):
            return []
        if on_device.gradients_come_late(self.program):
            return []
        if "again" in self.layers:  # the core reduces a module that ran twice once, at the end
            return []
        self.adds_many = True
        lines = ["reshard(model, fsdp)", "model.set_manual_backward_finalization(True)"]
        holds = self.chance(0.4)
        if holds:
            lines.append("model.set_requires_gradient_sync(False)")
        for _ in range(self.rng.randint(1, 2)):
            lines += [f"out = {self.forward('')}", "loss = backward(out)"]
        if holds:
            lines += [
                "model.set_requires_gradient_sync(True)",
                f"out = {self.forward('')}",
                "loss = backward(out)",
            ]
        if self.chance(0.5):
            lines += ["handle = model.finalize_backward(async_op=True)", "handle.wait()"]
        else:
            lines.append("model.finalize_backward()")
        lines.append("model.set_manual_backward_finalization(False)")
        return lines + self.hook_lines() + self.finish()

    def share(self) -> list[str]:
        """One context for two roots, both of which have run: before, torch loses its order."""
        lines = self.second_root()
        if not lines or not self.program.has("out = model("):
            return []
        first, second = self.forward(), self.second_call()
        return [
            *lines,
            "fsdp.share_comm_ctx([model, second_model])",
            self.rng.choice([f"out = [{first}, {second}]", f"out = [{second}, {first}]"]),
            "loss = backward(out)",
            "second_optimizer.step()\nsecond_optimizer.zero_grad()",
            *self.finish(),
        ]

    def load_between(self) -> list[str]:
        """Weights are loaded between micro-batches."""
        if self.has_hooks:
            return []
        self.adds_many = True
        same = "" if self.mixes or self.is_hsdp else None
        return [
            "model.set_requires_gradient_sync(False)",
            f"out = {self.forward(same)}",
            "loss = backward(out)",
            "reshard(model, fsdp)",
            "state = {name: value.detach().clone() for name, value in model.state_dict().items()}",
            "result = model.load_state_dict(copies(elsewhere['state']))",
            "model.set_requires_gradient_sync(True)",
            f"out = {self.forward(same)}",
            "loss = backward(out)",
            *self.finish(),
        ]

    def other_way_in(self) -> list[str]:
        """A registered method of a unit, after the root has run."""
        # A reentrant checkpoint has no backward without an input that needs a gradient; torch's
        # parameters stay unsharded then, and old.
        able = [index for index in self.singles if self.layers[index] != "reentrant"]
        if not able or not self.program.has("out = model("):
            return []
        layer = f"model.layers[{self.rng.choice(able)}]"
        dtype = ", dtype=torch.float64" if self.is_double else ""
        self.n_inputs += 1
        return [
            f"{layer}.enter = {layer}.forward\nfsdp.register_fsdp_forward_method({layer}, 'enter')",
            f"out = {layer}.enter(data(rank, {self.n_inputs}, 2, {self.width}{dtype}))",
            "loss = backward(out)",
            *self.hook_lines(),
            *self.finish(),
        ]

    def wait_late(self) -> list[str]:
        """Handles that are waited for after a forward, twice, or never; of members of a group."""
        if on_device.gathers_anew(self.program):
            return []
        members = [f"model.layers[{index}]" for group in self.groups for index in group]
        unit = self.rng.choice([*members, self.unit()])
        lines = [f"handle = {unit}.unshard(async_op=True)"]
        if self.chance(0.3):
            lines.append(f"other = {self.unit()}.unshard(async_op=True)")
        if self.chance(0.3):
            lines.append("handle.wait()\nhandle.wait()")
        train = self.train()
        if self.chance(0.5):
            train.insert(1, "handle.wait()")
        return [*lines, *train]


CHANGE_BLOCKS = {
    Changes.refuse_optimizer: 1,
    Changes.finalize: 2,
    Changes.share: 1,
    Changes.load_between: 1,
    Changes.other_way_in: 2,
    Changes.wait_late: 2,
}
