"""What goes on around a forward and a backward: hooks of all kinds, other ways to call a module."""

from differential import on_device
from differential.changes import Changes

SAVED = [
    "torch.autograd.graph.save_on_cpu()",
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)",
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)",
    "torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda pack: pack[0] * 1)",
]
# Each notes its call; they belong to the process, so that one line has to remove them again.
GLOBAL_HOOKS = [
    "forward_pre_hook(lambda m, a: calls.append(type(m).__name__))",
    "forward_hook(lambda m, a, out: calls.append(type(m).__name__))",
    "forward_hook(lambda m, a, out: out * 2 if isinstance(out, torch.Tensor) else None)",
    "full_backward_hook(lambda m, g, out: calls.append(type(m).__name__))",
    "full_backward_pre_hook(lambda m, g: calls.append(type(m).__name__))",
]
PARAMETER_HOOKS = [
    "register_hook(lambda grad: grad * 0.5)",
    "register_hook(lambda grad: calls.append(grad.dtype))",
    "register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))",
    "register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
]
PARTS = ["{}", "dict(model.named_buffers())", "dict(model.named_parameters())"]


class Contexts(Changes):
    """Blocks whose forward or backward runs in something."""

    def saved_tensors(self) -> list[str]:
        """What autograd saves goes through functions of the script."""
        return [
            f"with {self.rng.choice(SAVED)}:\n    out = {self.forward()}",
            self.backward(),
            *self.hook_lines(),
            *self.finish(),
        ]

    def grad_of_shards(self) -> list[str]:
        """No graph leads to them: nothing happens, or an error."""
        if self.takes_tokens:
            return []
        inputs = self.rng.choice(["[*shards.values()]", "[x, *shards.values()]"])
        return [
            f"x = {self.x()}.requires_grad_()",
            f"out = model(x{self.use()})",
            "grads = torch.autograd.grad(total(out),"
            f" [p for p in {inputs} if p.requires_grad], allow_unused=True)",
            "reshard(model, fsdp)",
            *self.train(),
        ]

    def global_hooks(self) -> list[str]:
        hook = self.rng.choice(GLOBAL_HOOKS)
        return [
            "calls = []\n"
            f"handle = nn.modules.module.register_module_{hook}\n"
            "try:\n"
            f"    out = {self.forward()}\n"
            "    loss = backward(out)\n"
            "finally:\n"
            "    handle.remove()",
            "called = list(calls)",
            *self.hook_lines(),
            *self.finish(),
        ]

    def parameter_hooks(self) -> list[str]:
        """On unsharded parameters, which are the same objects in each forward."""
        if self.around == "reentrant" or self.has_hooks or on_device.gathers_anew(self.program):
            return []
        unit, hook = self.unit(), self.rng.choice(PARAMETER_HOOKS)
        return [
            "calls = []",
            f"{unit}.unshard()",
            f"handles = [p.{hook} for p in {unit}.parameters() if p.requires_grad"
            " and not hasattr(p, 'placements')]",
            *(["reshard(model, fsdp)"] if self.chance(0.5) else []),
            f"out = {self.forward()}",
            self.backward(),
            "called = sorted(calls, key=str)",
            "for handle in handles:\n    handle.remove()",
            *self.finish(),
        ]

    def functional(self) -> list[str]:
        """Parameters that are given are those that are registered anyway; they are put back, and
        torch takes what it finds for unsharded parameters until the next reshard."""
        parts = self.rng.choice(PARTS)
        reshards = ["reshard(model, fsdp)"] if parts == PARTS[-1] else []
        return [
            *reshards,
            f"out = torch.func.functional_call(model, {parts}, ({self.x()},))",
            *reshards,
            *self.rng.choice([[], ["loss = backward(out)", *self.hook_lines(), *self.finish()]]),
        ]

    def grow(self) -> list[str]:
        """A layer is added: plain, whose gradients are each rank's own, or a root of its own."""
        if self.mixes or self.is_double or self.has_hooks or self.around or self.is_meta:
            return []
        is_sharded = self.chance(0.5)
        lines = [f"added = nn.Linear({self.width}, {self.width})"]
        if is_sharded:
            lines.append("fsdp.fully_shard(added)")
            self.roots.append("added")
        else:
            self.ignores = True  # clipping and foreach take tensors of one kind
        self.layers.append("linear")
        self.steps_others = True
        return [
            "reshard(model, fsdp)",
            "\n".join([*lines, "model.layers.append(added)"]),
            "shards = dict(model.named_parameters())",
            *([self.optimizer()] if self.ignores or self.chance(0.7) else []),
            *self.train(),
        ]

    def copy_around(self) -> list[str]:
        """Copies of what may be copied: torch's gradients may not."""
        clear = "for p in shards.values():\n    p.grad = None\n"
        return [
            "reshard(model, fsdp)",
            self.rng.choice(
                [
                    "copied = __import__('copy').deepcopy(model.state_dict())",
                    f"{clear}copied = __import__('copy').deepcopy(shards)",
                    "copied = __import__('copy').deepcopy(optimizer.state_dict())",
                    "copied = __import__('copy').copy(next(iter(shards.values())))",
                ]
            ),
            *self.train(),
        ]


CONTEXT_BLOCKS = {
    Contexts.saved_tensors: 2,
    Contexts.grad_of_shards: 1,
    Contexts.global_hooks: 2,
    Contexts.parameter_hooks: 2,
    Contexts.functional: 2,
    Contexts.grow: 2,
    Contexts.copy_around: 1,
}
