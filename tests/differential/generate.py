"""Writes a random program for a seed: a model, how it is sharded, and what is done with it.

Left out is what torch itself gets wrong, silently or not, where fsdp_c gives the right result:
each place says what.
"""

from differential import on_device
from differential.changes import CHANGE_BLOCKS
from differential.contexts import CONTEXT_BLOCKS, Contexts
from differential.program import WORLDS, Program
from differential.steps import STEP_BLOCKS

REFUSED = [
    "fsdp.fully_shard(model)",
    "fsdp.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))",
    "fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward='x')",
    "fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward=1.5)",
    "fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward=7)",
    "fsdp.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: 'x')",
    "model.set_reshard_after_forward(1)",
    "model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])",
    "model.set_modules_to_backward_prefetch([nn.Linear(2, 2)])",
    "model.set_reduce_scatter_max_input_buffers(0)",
    "model.set_reduce_scatter_max_input_buffers(True)",
    "fsdp.register_fsdp_forward_method(model, 'nothing')",
    "__import__('copy').deepcopy(model)",
    "model(1, 2, 3)",
    "model.load_state_dict({'nothing': 1})",
    "fsdp.MixedPrecisionPolicy(nothing=1)",
    "fsdp.fully_shard(3)",
]


def make_program(seed: int, world: int | None = None) -> Program:
    return Writer(seed, world or WORLDS[seed % len(WORLDS)]).write()


class Writer(Contexts):
    """Writes blocks of lines; each chooses freely among what the setting allows."""

    def write(self) -> Program:
        self.write_setup()
        blocks = [block for block, weight in BLOCKS.items() for _ in range(weight)]
        if self.chance(0.06) and (written := self.replace()):
            self.program.blocks.append(written)
        for _ in range(self.rng.randint(1, 4)):
            written = self.rng.choice(blocks)(self)
            if written:
                self.program.blocks.append(written)
        self.program.blocks.append(self.train())
        self.program.tolerance = self.tolerance()
        return self.program

    # --- blocks -----------------------------------------------------------------------------------

    def evaluate(self) -> list[str]:
        # Only torch's order of prefetches has forwards without gradients: it gathers more often.
        if self.program.counted and self.groups:
            return []
        forward = self.forward()
        # Torch makes what it lacks in inference mode, and cannot use it elsewhere.
        may_infer = self.program.has("loss = backward") and not self.program.has("columns(")
        mode = "inference_mode" if may_infer and self.chance(0.3) else "no_grad"
        return self.rng.choice(
            [
                [f"with torch.{mode}():\n    out = {forward}"],
                [
                    "model.eval()",
                    f"with torch.no_grad():\n    out = {forward}",
                    "model.train()",
                ],
                [f"out = {forward}"],  # a graph that is dropped
            ]
        )

    def two_forwards(self) -> list[str]:
        self.adds_many = True
        if self.has_hooks or self.around == "reentrant":
            return []  # torch leaves units unsharded that ran twice in reentrant checkpoints
        if self.chance(0.5):
            return [
                f"out = [{self.forward()}, {self.forward()}]",
                "loss = backward(out)",
                *self.finish(),
            ]
        first = self.rng.choice(["first", "second"])
        second = {"first": "second", "second": "first"}[first]
        return [
            f"first = {self.forward()}",
            f"second = {self.forward()}",
            f"loss = backward({first})",
            f"loss = backward({second})",
            *self.finish(),
        ]

    def hold(self) -> list[str]:
        """Micro-batches without reduction. With a reduce dtype torch refuses held gradients of
        some parameters and fresh ones of others."""
        self.adds_many = True
        # Where some are held, what runs twice is reduced once, by torch each time.
        same = "" if self.mixes or self.is_hsdp or self.program.counted else None
        recurse = ", recurse=False" if self.chance(0.2) else ""
        setter = "set_requires_gradient_sync"
        if self.is_hsdp and self.chance(0.6):
            setter = "set_requires_all_reduce"
            # Torch adds partial sums by position: the same parameters must take part each time.
            # Reentrant checkpoints reduce the modules of a unit one by one.
            if self.program.has("requires_grad_(") or (self.groups and self.around == "reentrant"):
                return []
        last = self.chance(0.3) and not on_device.gradients_come_late(self.program)
        last = last and not self.program.counted  # torch gathers what the forward before has used
        part = self.unit() if self.chance(0.3) else "model"
        lines = [f"{part}.{setter}(False{recurse})"]
        if last:
            lines.append("model.set_is_last_backward(False)")
        for _ in range(self.rng.randint(1, 2)):
            lines += [f"out = {self.forward(same)}", "loss = backward(out)"]
        lines.append(f"{part}.{setter}(True{recurse})")
        if last:
            lines.append("model.set_is_last_backward(True)")
        lines += [f"out = {self.forward(same)}", "loss = backward(out)"]
        return lines + self.hook_lines() + self.finish()

    def unshard(self) -> list[str]:
        if on_device.gathers_anew(self.program):
            return []
        unit = self.unit()
        lines = [f"{unit}.unshard()"]
        if self.chance(0.5):
            lines = [f"handle = {unit}.unshard(async_op=True)", "handle.wait()"]
        if self.chance(0.3):
            lines.append("held = {n: p.detach().clone() for n, p in model.named_parameters()}")
        if self.chance(0.5):
            return [*lines, f"{unit}.reshard()"]
        return [*lines, *self.train()]

    def save(self) -> list[str]:
        """State dicts; only while sharded, where torch's own does not reshard."""
        lines = ["reshard(model, fsdp)", "state = model.state_dict()"]
        if self.chance(0.5):
            lines += [
                "state = {name: value.detach().clone() * 1.5 if value.is_floating_point() else"
                " value.clone() for name, value in state.items()}",
                "result = model.load_state_dict(state)",
            ]
        elif not self.has_hooks and not self.ignores and self.chance(0.4):
            lines += [
                "state = {name: value.detach().clone() for name, value in state.items()}",
                "result = model.load_state_dict(state, assign=True)",
                "shards = dict(model.named_parameters())",
                self.optimizer(),
            ]
        elif self.chance(0.5):
            lines.append("state = optimizer.state_dict()")
            if self.chance(0.5):
                lines.append("optimizer.load_state_dict(copies(state))")
        return lines

    def save_full(self) -> list[str]:
        """Through torch's functions for whole state dicts."""
        lines = [
            "reshard(model, fsdp)",
            "full = StateDictOptions(full_state_dict=True)",
            "state = get_model_state_dict(model, options=full)",
        ]
        if self.chance(0.5):
            lines.append("result = set_model_state_dict(model, state, options=full)")
        return lines

    def set_something(self) -> list[str]:
        unit = self.unit()
        boolean = self.rng.choice(["True", "False"])
        recurse = self.rng.choice(["", ", recurse=False"])
        lines = [
            [f"{unit}.set_reshard_after_forward({boolean}{recurse})"],
            [f"{unit}.set_reshard_after_backward({boolean}{recurse})"],
            [f"model.set_modules_to_forward_prefetch([{unit}])"],
            [f"model.set_modules_to_backward_prefetch([{unit}])"],
            [f"model._set_unshard_async_op({boolean})"],
            [f"model.set_reduce_scatter_max_input_buffers({self.rng.randint(1, 3)})"],
            [f"{unit}.set_force_sum_reduction_for_comms({boolean})"],
        ]
        # Over gloo torch takes the factor of its own average, or any with plain sums; it divides
        # twice where a shard group has one rank.
        if self.shard_size > 1:
            lines.append([f"{unit}.set_gradient_divide_factor({float(self.shard_size)})"])
            factor = self.rng.choice(["1.0", "3.0", "0.5"])
            lines.append(
                [
                    f"{unit}.set_force_sum_reduction_for_comms(True)",
                    f"{unit}.set_gradient_divide_factor({factor})",
                    *self.train(),
                    f"{unit}.set_gradient_divide_factor({float(self.shard_size)})",
                ]
            )
        return ["reshard(model, fsdp)", *self.rng.choice(lines)]

    def toggle(self) -> list[str]:
        """Freezes or frees parameters. Torch loses what is done to unsharded ones, and has no
        dtypes for a unit that was all frozen in its first forward."""
        if self.program.has("set_requires_all_reduce") or self.freezes:
            return []
        names = {"block": "up.weight", "nested": "outer.down.bias", "tuple": "left.weight"}
        found = [i for i, name in enumerate(self.layers) if name in names]
        if not found:
            return []
        index = self.rng.choice(found)
        name = f"layers.{index}.{names[self.layers[index]]}"
        return [
            "reshard(model, fsdp)",
            f"shards[{name!r}].requires_grad_(not shards[{name!r}].requires_grad)",
        ]

    def refuse(self) -> list[str]:
        line = self.rng.choice(REFUSED)
        # A forward that failed leaves things until a reset, as in `fail`.
        resets = ["model.reset_iter_state()"] if line == "model(1, 2, 3)" else []
        return [line, "reshard(model, fsdp)", *resets]

    def fail(self) -> list[str]:
        """An exception of the model. What a failed pass leaves is torch's affair until a reset;
        what of its gradients has arrived, too."""
        position = self.rng.randrange(len(self.layers))
        where = self.rng.choice(["forward", "backward"])
        call = f"model({self.x()}, fail_in_{where}={position})"
        fn = f"backward({call})" if where == "backward" else call
        return [
            # The reset of torch 2.13 keeps gradients of parameters that are unsharded. Without one
            # torch's roots miss the end of their next backward.
            "\n".join(
                [
                    f"where = planned(lambda: {fn})",
                    "model.zero_grad()",
                    *(f"{root}.reset_iter_state()" for root in self.roots),
                    "optimizer.zero_grad()",
                ]
            ),
            *(["log.clear()"] if self.has_hooks else []),
        ]

    def fail_and_go_on(self) -> list[str]:
        """An exception in forward that the script passes over."""
        if self.has_hooks:
            return []
        position = self.rng.randrange(len(self.layers))
        return [
            f"where = planned(lambda: model({self.x()}, fail_in_forward={position}))\n"
            f"out = {self.forward('')}\nloss = backward(out)",
            *self.finish(),
        ]

    def retain(self) -> list[str]:
        # Torch's second backward does not find the weight of a convolution.
        if self.has_hooks or self.around or {"reentrant", "convolved"}.intersection(self.layers):
            return []
        self.adds_many = True
        return [
            f"out = {self.forward()}",
            "loss = backward(out, retain_graph=True)",
            "loss = backward(out)",
            *self.finish(),
        ]

    def twice(self) -> list[str]:
        """The model's output is its input again."""
        is_fit = self.output == "tensor" and not self.takes_tokens
        if not is_fit or self.has_hooks or self.groups or self.around:
            return []
        self.adds_many = True
        use = self.use()
        return [
            f"out = model(model({self.x()}{use}){use})",
            "loss = backward(out)",
            *self.finish(),
        ]

    def input_gradient(self) -> list[str]:
        if self.takes_tokens:
            return []
        lines = [f"x = {self.x()}.requires_grad_()", f"out = model(x{self.use()})"]
        if self.chance(0.3):
            return [*lines, "grad = torch.autograd.grad(total(out), x)"]
        if self.chance(0.2):
            return [*lines, "total(out).backward(inputs=[x])\ngrad = x.grad"]
        return [*lines, "loss = backward(out)", "grad = x.grad", *self.hook_lines(), *self.finish()]

    def autocast(self) -> list[str]:
        if self.mixes or self.around or self.is_double:
            return []
        return [
            f"with torch.autocast('cpu', torch.bfloat16):\n    out = {self.forward()}",
            "loss = backward(out)",
            *self.hook_lines(),
            *self.finish(),
        ]

    def alone(self) -> list[str]:
        """A unit, or a registered method of the model, called by itself; after the root has run."""
        if not self.program.has("out = model("):
            return []
        # A reentrant checkpoint hides the gradients of containers.
        is_hidden = self.around == "reentrant"
        if self.program.has("register_fsdp_forward_method(model, 'encode')") and not is_hidden:
            call = f"model.encode({self.x()})"
        else:
            dtype = ", dtype=torch.float64" if self.is_double else ""
            self.n_inputs += 1
            call = f"{self.unit()}(data(rank, {self.n_inputs}, 2, {self.width}{dtype}))"
            if self.takes_tokens and call.startswith("model("):
                return []
        if self.chance(0.3):
            return [f"with torch.no_grad():\n    out = {call}"]
        return [f"out = {call}", "loss = backward(out)", *self.hook_lines(), *self.finish()]

    def clear_late(self) -> list[str]:
        """Gradients are cleared between forward and backward."""
        return [
            f"out = {self.forward()}",
            "optimizer.zero_grad()",
            "loss = backward(out)",
            *self.hook_lines(),
            *self.finish(),
        ]


BLOCKS = {
    **STEP_BLOCKS,
    **CHANGE_BLOCKS,
    **CONTEXT_BLOCKS,
    Writer.train: 8,
    Writer.evaluate: 3,
    Writer.two_forwards: 2,
    Writer.hold: 4,
    Writer.unshard: 2,
    Writer.save: 2,
    Writer.set_something: 4,
    Writer.toggle: 2,
    Writer.refuse: 1,
    Writer.fail: 1,
    Writer.fail_and_go_on: 1,
    Writer.retain: 1,
    Writer.twice: 1,
    Writer.input_gradient: 1,
    Writer.autocast: 1,
    Writer.clear_late: 1,
    Writer.alone: 1,
    Writer.save_full: 1,
}
