"""What scripts do around an optimizer step: clipping, scaling, averages, schedules, own gradients.

All of it happens while the model is sharded: what is done to unsharded parameters is lost.
"""

import re

from differential.lines import Lines

SCHEDULERS = [
    "StepLR(optimizer, 1, 0.5)",
    "ExponentialLR(optimizer, 0.9)",
    "LambdaLR(optimizer, lambda epoch: 0.5 ** epoch)",
    "CosineAnnealingLR(optimizer, 3)",
    "OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)",
]
EACH = "for p in shards.values():\n    "
EACH_GRADIENT = EACH + "if p.grad is not None:\n        "
EACH_WEIGHT = "for p in floating(shards):\n    "
GRADIENTS_BY_HAND = [
    EACH_GRADIENT + "p.grad.mul_(0.5)",
    EACH_GRADIENT + "p.grad = p.grad * 2",
    EACH_GRADIENT + "p.grad = p.grad.detach().clone()",
    EACH_GRADIENT + "p.grad.copy_(p.detach())",
    EACH_GRADIENT + "p.grad.zero_()",
    EACH + "p.grad = torch.ones_like(p) if p.requires_grad else None",
    EACH + "p.grad = p.detach().clone() if p.requires_grad else None",
    EACH + "p.grad = None",
    "next(iter(shards.values())).grad = None",
    "torch._foreach_mul_([p.grad for p in floating(shards) if p.grad is not None], 0.5)",
]
WEIGHTS_BY_HAND = [
    f"with torch.no_grad():\n    {line}"
    for line in (
        "for p in floating(shards):\n        p.mul_(0.9)",
        "for p in floating(shards):\n        p.copy_(p * 0.5)",
        "torch._foreach_mul_(floating(shards), 0.9)",
        "nn.init.constant_(next(iter(shards.values())), 1)",
    )
] + [EACH_WEIGHT + "p.data.mul_(0.9)", EACH_WEIGHT + "local(p).add_(0.125)"]


class Steps(Lines):
    """Blocks around the optimizer."""

    def own_gradients(self) -> list[str]:
        """Gradients that the script writes, before or after a backward."""
        self.steps_others = True
        line = self.rng.choice(GRADIENTS_BY_HAND)
        if self.chance(0.5):
            return ["reshard(model, fsdp)", line, *self.train()]
        return [
            f"out = {self.forward()}",
            self.backward(),
            *self.hook_lines(),
            "reshard(model, fsdp)",
            line,
            *self.finish(),
        ]

    def own_weights(self) -> list[str]:
        return ["reshard(model, fsdp)", self.rng.choice(WEIGHTS_BY_HAND), *self.train()]

    def scale(self) -> list[str]:
        """A scaler; at times a step is left out for an infinite gradient."""
        lines = [
            "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)",
            f"loss = backward({self.forward()}, scaler)",
        ]
        if self.chance(0.3):
            lines.append(
                "p = next(p for p in shards.values() if p.requires_grad)\n"
                "p.grad = torch.full_like(p, float('inf'))"
            )
        if self.chance(0.5):
            lines.append("scaler.unscale_(optimizer)")
        return [
            "optimizer.zero_grad()",
            *lines,
            *self.hook_lines(),
            *(["reshard(model, fsdp)"] if self.stays_unsharded else []),
            "scaler.step(optimizer)",
            "scaler.update()\nscale = scaler.get_scale()",
            "optimizer.zero_grad()",
        ]

    def average(self) -> list[str]:
        lines = [
            "reshard(model, fsdp)",
            "average = [p.detach().clone() for p in floating(shards)]",
            *self.train(),
            "reshard(model, fsdp)",
            self.rng.choice(
                [
                    "torch._foreach_lerp_(average, [p.detach() for p in floating(shards)], 0.25)",
                    "for a, p in zip(average, floating(shards)):\n    a.lerp_(p.detach(), 0.25)",
                    "for a, p in zip(average, floating(shards)):\n"
                    "    a.mul_(0.9).add_(p.detach(), alpha=0.1)",
                ]
            ),
        ]
        if self.chance(0.5):
            lines.append(
                "with torch.no_grad():\n    for a, p in zip(average, floating(shards)):\n"
                "        p.copy_(a)"
            )
        return [*lines, "seen = average"]

    def schedule(self) -> list[str]:
        lines = [f"scheduler = torch.optim.lr_scheduler.{self.rng.choice(SCHEDULERS)}"]
        for _ in range(2):
            lines += [
                *self.train(),
                "scheduler.step()\nrates = [float(g['lr']) for g in optimizer.param_groups]",
            ]
        return lines

    def exchange(self) -> list[str]:
        """A side goes on from what the other one saved."""
        lines = ["reshard(model, fsdp)"]
        if self.chance(0.6):
            lines += [
                "kept = copies(optimizer.state_dict())",
                "optimizer.load_state_dict(copies(elsewhere['kept']))",
            ]
        if self.chance(0.6):
            lines += [
                "saved = {name: value.detach().clone() for name, value in"
                " model.state_dict().items()}",
                "result = model.load_state_dict(copies(elsewhere['saved']))",
            ]
        return [*lines, *self.train()]

    def new_optimizer(self) -> list[str]:
        """Another one in the middle; at times parameters come to it late."""
        if self.chance(0.4):
            return ["reshard(model, fsdp)", self.optimizer(is_any=True), *self.train()]
        kind = self.rng.choice(["SGD", "AdamW", "Adam"])
        late = self.rng.choice(["", ", 'lr': 0.002", ", 'weight_decay': 0.1"])
        # The first optimizer leaves gradients of the others, to which each checkpoint adds.
        self.adds_many |= self.around == "reentrant"
        return [
            "reshard(model, fsdp)",
            "some = list(model.parameters())\n"
            f"optimizer = torch.optim.{kind}(some[:1], lr=0.01, foreach=False)",
            *self.train(),
            f"optimizer.add_param_group({{'params': some[1:]{late}}})",
            *self.train(),
        ]

    def step_in_closure(self) -> list[str]:
        if self.stays_unsharded:
            return []
        return [
            "optimizer.zero_grad()",
            f"loss = optimizer.step(lambda: backward({self.forward()}))",
            *self.hook_lines(),
            "optimizer.zero_grad()",
        ]

    def step_in_backward(self) -> list[str]:
        """One optimizer per parameter, stepped as soon as its gradient is there. A module that ran
        several times is reduced once, by torch each time."""
        is_reduced_once = not self.around and "again" not in self.layers
        if not is_reduced_once or self.has_hooks or self.stays_unsharded:
            return []
        return [
            "reshard(model, fsdp)\noptimizer.zero_grad()\n"
            "handles = step_in_backward(shards, torch.optim.SGD)",
            f"loss = backward({self.forward('')})",
            f"loss = backward({self.forward('')})",
            "for handle in handles:\n    handle.remove()",
        ]

    def step_oddly(self) -> list[str]:
        """Steps that a script would not make, but may."""
        # Torch cannot copy gradients that lie behind others in memory.
        clear = EACH + "p.grad = None\n"
        line = self.rng.choice(
            [
                "optimizer.step()",
                "optimizer.zero_grad()\noptimizer.step()",
                f"{clear}what = attempt(lambda: __import__('copy').deepcopy(optimizer).step())",
                "full = {name: p.full_tensor() for name, p in shards.items()}",
                f"{clear}twin = __import__('copy').deepcopy(shards)",
            ]
        )
        return ["reshard(model, fsdp)", line, *self.train()]

    def freeze(self) -> list[str]:
        """Some parameters. Torch has no dtypes for a unit that is all frozen in a forward."""
        if self.mixes or self.program.has("set_requires_all_reduce", "Policy("):
            return []
        if not self.program.has("out = model("):
            return []
        # What was frozen at set-up and is freed is reduced for itself.
        if self.program.counted and (self.freezes or "frozen" in self.layers):
            return []
        self.steps_others = True
        part = self.rng.choice(["[::2]", "[1::2]", "[:1]", "[-1:]", "[:]"])
        return [
            "reshard(model, fsdp)",
            f"for p in list(shards.values()){part}:\n    p.requires_grad_(False)",
            *self.train(),
            "reshard(model, fsdp)",
            "for p in floating(shards):\n    p.requires_grad_(True)",
        ]

    def second_call(self) -> str:
        self.n_inputs += 1
        return f"second_model(data(rank, {self.n_inputs}, 2, {self.width}))"

    def second_root(self) -> list[str]:
        """Another sharded model beside the first, with an optimizer of its own."""
        if self.has_hooks or self.is_double:
            return []
        lines = []
        if not self.program.has("second_model ="):
            kind = self.rng.choice(["AdamW", "SGD"])
            lines = [
                f"second_model = Net({self.width}, 'linear block')",
                "fsdp.fully_shard(second_model.layers[0])\nfsdp.fully_shard(second_model)\n"
                "second_shards = dict(second_model.named_parameters())",
                f"second_optimizer = torch.optim.{kind}(second_model.parameters(), lr=0.01)",
            ]
        call = self.second_call()
        ways = [[f"out = {call}"], [f"out = [{self.forward()}, {call}]"]]
        if self.output == "tensor" and not self.mixes and not self.program.has("Policy("):
            ways.append([f"out = second_model({self.forward()})"])
        lines += [
            *self.rng.choice(ways),
            "loss = backward(out)",
            "second_optimizer.step()",
            "second_optimizer.zero_grad()",
        ]
        return lines + (self.finish() if re.search(r"\bmodel\(", lines[-4]) else [])


STEP_BLOCKS = {
    Steps.own_gradients: 2,
    Steps.own_weights: 2,
    Steps.scale: 1,
    Steps.average: 1,
    Steps.schedule: 1,
    Steps.exchange: 2,
    Steps.new_optimizer: 1,
    Steps.step_in_closure: 1,
    Steps.step_in_backward: 1,
    Steps.step_oddly: 1,
    Steps.freeze: 2,
    Steps.second_root: 2,
}
