"""The random model of a program, and how it is sharded."""

import random

import torch
from parity import Tolerance

from differential.program import Program

# Few, because DTensor thinks long about each new shape.
WIDTHS = (1, 2, 3, 3, 4, 4)
# (param_dtype, reduce_dtype) of a policy.
DTYPES: list[tuple[str, str]] = [
    ("None", "None"),
    ("torch.bfloat16", "torch.float32"),
    ("torch.bfloat16", "None"),
    ("None", "torch.bfloat16"),
    ("torch.float64", "torch.float32"),
    ("torch.float16", "torch.float32"),
    ("None", "torch.float64"),
]
N_CHEAP_OPTIMIZERS = 3
# DTensor cannot step Rprop, Adafactor and fused SGD.
OPTIMIZERS = [
    "SGD({}, lr=0.05, foreach=False)",
    "SGD({}, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False)",
    "AdamW({}, lr=0.01, foreach=False)",
    "SGD({}, lr=0.02, momentum=0.5, nesterov=True, foreach=True)",
    "SGD({}, lr=0.02, maximize=True)",
    "AdamW({}, lr=0.01)",
    "SGD({}, lr=0.02, momentum=0.9)",
    "AdamW({}, lr=0.01, fused=True)",
    "Adam({}, lr=0.01, foreach=True, amsgrad=True)",
    "RMSprop({}, lr=0.01)",
    "Adagrad({}, lr=0.01, foreach=False)",
    "Adam({}, lr=0.01, weight_decay=0.1, foreach=False)",
    "Adam({}, lr=0.01, maximize=True)",
    "Adam({}, lr=torch.tensor(0.01), foreach=False)",
    "AdamW({}, lr=torch.tensor(0.01), fused=True)",
    "Adam({}, lr=0.01, betas=(0.0, 0.5), eps=1e-4)",
    "AdamW({}, lr=0.01, amsgrad=True, foreach=False)",
    "SGD({}, lr=0.02, momentum=0.9, dampening=0.5, foreach=False)",
    "SGD({}, lr=torch.tensor(0.02), foreach=False)",
    "RMSprop({}, lr=0.01, momentum=0.5, centered=True, foreach=False)",
    "Adagrad({}, lr=0.01, lr_decay=0.1)",
    "NAdam({}, lr=0.01)",
    "RAdam({}, lr=0.01, foreach=False)",
    "Adamax({}, lr=0.01, foreach=False)",
    "Adadelta({}, lr=0.1, foreach=False)",
    "ASGD({}, lr=0.01, foreach=False)",
]
LAYER_NAMES = (
    "block block block linear linear norm tied tiny unused frozen buffered recurrent nested nested"
    " tuple dict dataclass thin recompute reentrant tanh dropout again convolved attention lstm"
    " listed weighted wrapped composed inplace several"
).split()
# Layers all of whose parameters have as many rows as the model is wide.
EVEN_ROWS = frozenset(
    "linear norm tied buffered recurrent tuple dict dataclass tanh dropout again several".split()
)
HOOKS = [
    "register_forward_pre_hook(lambda module, args: (args[0] * 2,))",
    "register_forward_hook(lambda module, args, out: args[0] + leaves(out)[0])",
    "register_full_backward_hook(lambda module, grad_in, grad_out: None)",
    "register_forward_hook(lambda module, args, out: [leaf.register_hook(lambda grad: grad * 2)"
    " for leaf in leaves(out) if leaf.requires_grad] and None)",
]


class Setting:
    """What the lines of set-up decide."""

    def __init__(self, seed: int, world: int) -> None:
        self.rng = random.Random(seed)
        self.program = Program(seed, world, counted=self.chance(0.06))
        self.n_inputs = 0
        choose = self.rng.choice
        self.width = choose(WIDTHS)
        self.layers = [choose(LAYER_NAMES) for _ in range(self.rng.randint(1, 4))]
        self.around = choose(["", "", "", "", "recompute", "reentrant"])
        for index, name in enumerate(self.layers):
            # Torch leaves units unsharded that ran twice in reentrant checkpoints, and reduces each
            # checkpoint's gradients for themselves.
            is_reentrant = "reentrant" in (self.around, self.layers[0])
            if name == "again" and (index == 0 or is_reentrant):
                self.layers[index] = "linear"
        self.stem = choose(["linear", "linear", "linear", "identity", "embedding", "bounded"])
        self.output = choose(["tensor", "tensor", "tuple", "dict", "dataclass"])
        self.has_own = not self.chance(0.15)
        self.pick_units()
        if self.around or self.singles or self.groups or self.inner:
            # Torch loses the hook on a unit's output that is written to; so do checkpoints.
            self.layers = ["tanh" if name == "inplace" else name for name in self.layers]
        self.dtypes = [choose([DTYPES[0]] * 5 + DTYPES)]
        # A layer only takes another dtype where its own unit casts.
        self.is_split = len(self.singles) == len(self.layers) and not self.inner
        if self.is_split and self.chance(0.3):
            self.dtypes = self.rng.sample([pair for pair in DTYPES if pair[0] != "None"], 2)
        self.mesh = self.pick_mesh()
        self.is_double = not self.mixes and self.chance(0.08)
        self.has_hooks = self.ignores = self.adds_many = False
        self.program.installed = self.chance(0.1)
        # to_empty unties what was tied.
        self.is_meta = "tied" not in self.layers and self.chance(0.1)
        self.freezes = self.chance(0.15)
        self.steps_others = False  # parameters that backward has not reached
        self.roots = ["model"]
        hidden = {"tuple", "dict", "dataclass"}.intersection(self.layers)
        if self.around == "reentrant":
            self.program.counted = False  # torch gathers for a backward that may not come
        is_first = self.stem == "identity" and "reentrant" in (self.around, *self.layers)
        if is_first or (self.around == "reentrant" and hidden):
            # Such a checkpoint hides the gradients of containers, and has none if its input has
            # none. A root all of whose outputs are hidden stays unsharded, where torch would fail
            # in backward.
            self.has_own = True
        if "recurrent" in self.layers or "tied" in self.layers:
            self.adds_many = True

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick_units(self) -> None:
        """Layers are units of their own, share one, or belong to the root's."""
        free = [index for index, name in enumerate(self.layers) if name != "again"]
        self.groups: list[list[int]] = []
        while len(free) > 1 and self.chance(0.15):
            group = sorted(self.rng.sample(free, self.rng.randint(2, min(3, len(free)))))
            self.groups.append(group)
            free = [index for index in free if index not in group]
        self.singles = [index for index in free if self.chance(0.75)]
        self.inner = [
            index
            for index, name in enumerate(self.layers)
            if name in ("nested", "several") and self.chance(0.5)
        ]

    def pick_mesh(self) -> tuple[int, ...]:
        world = self.program.world
        shapes = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (2, 2), (4, 1)]}
        return self.rng.choice([*shapes[world], (world,)]) if self.chance(0.35) else ()

    @property
    def is_hsdp(self) -> bool:
        return len(self.mesh) == 2

    @property
    def shard_size(self) -> int:
        return self.mesh[-1] if self.mesh else self.program.world

    @property
    def mixes(self) -> bool:
        return any(dtypes != DTYPES[0] for dtypes in self.dtypes)

    @property
    def takes_tokens(self) -> bool:
        return self.stem in ("embedding", "bounded")

    def tolerance(self) -> Tolerance:
        names = {name for pair in self.dtypes for name in pair}
        if "torch.float16" in names or "torch.bfloat16" in names:
            # Torch rounds each addition to the dtype, and the quotient; held gradients add more.
            self.program.rounds = True
            eps = torch.finfo(torch.bfloat16).eps
            return Tolerance(scaled=4 * (self.program.world + 1) * eps, realign=True)
        if self.program.world > 2 or self.adds_many:
            # The order of three and more addends is free.
            return Tolerance(relative=1e-4, scaled=1e-4, realign=True)
        if "torch.float64" in (reduce for _, reduce in self.dtypes) and not self.is_double:
            # Torch rounds a sum before it adds it to a gradient that is there, we afterwards.
            return Tolerance(relative=5e-7, scaled=5e-7, realign=True)
        return Tolerance()

    # --- lines ------------------------------------------------------------------------------------

    def write_setup(self) -> None:
        add = self.program.setup.append
        defaults = {"stem": "linear", "output": "tensor", "around": "", "has_own": True}
        given = {name: getattr(self, name) for name in defaults}
        words = [str(self.width), repr(" ".join(self.layers))]
        words += [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]
        self.write_model(f"model = Net({', '.join(words)})")
        # Before the first forward only: torch keeps the dtypes that it finds there.
        double_at = self.rng.choice(["before", "after"]) if self.is_double else ""
        if double_at == "before":
            add("model.double()")
        hook = f"model.layers[{self.rng.randrange(len(self.layers))}].{self.rng.choice(HOOKS)}"
        hook_at = self.rng.choice(["before", "after"]) if self.chance(0.1) else ""
        if hook_at == "before":
            add(hook)
        options = self.unit_options()
        for module in self.units():
            add(f"fsdp.fully_shard({module}{options()})")
        add(f"fsdp.fully_shard(model{options(is_root=True)})")
        if hook_at == "after":
            add(hook)
        if double_at == "after":
            add("model.double()")
        if self.is_meta:
            add("model.to_empty(device='cpu')\nfill(model)")
        if self.chance(0.15):
            add("fsdp.register_fsdp_forward_method(model, 'encode')")
        add("shards = dict(model.named_parameters())")
        add(self.optimizer())
        # A module that ran several times is reduced once, by torch each time: so are its hooks.
        if not self.around and "again" not in self.layers and self.chance(0.1):
            self.has_hooks = True
            add("log = []")
            add("log_gradients(shards, log)")

    def write_model(self, line: str) -> None:
        add = self.program.setup.append
        if self.is_meta:
            add(f"with torch.device('meta'):\n    {line}")
            return
        add(line)
        if self.chance(0.1):
            add("model = __import__('copy').deepcopy(model)")
        if self.freezes:
            index = self.rng.randrange(len(self.layers))
            add(f"model.layers[{index}].requires_grad_(False)")

    def optimizer(self, is_any: bool = False) -> str:
        # Each rank's DTensor has to learn each optimizer anew.
        is_any = is_any or self.chance(0.35 / self.program.world)
        choices = OPTIMIZERS if is_any else OPTIMIZERS[:N_CHEAP_OPTIMIZERS]
        if self.ignores:  # foreach takes tensors of one kind
            choices = [words for words in choices if "foreach=False" in words]
        if "frozen" in self.layers:  # fused takes no integers
            choices = [words for words in choices if "fused=True" not in words]
        parameters = "two_groups(model)" if self.chance(0.15) else "model.parameters()"
        return f"optimizer = torch.optim.{self.rng.choice(choices).format(parameters)}"

    def unit_options(self):  # noqa: ANN201
        """What all units of the model are given; gives a function that adds the rest."""
        rng = self.rng
        common = ""
        if self.mesh:
            names = ("r", "s")[-len(self.mesh) :]
            common = f", mesh=cached_mesh({self.mesh}, {names})"
        output = ""
        if self.chance(0.15):
            output = rng.choice([", torch.float32", ", torch.float64", ", torch.bfloat16"])
        outputs_all = self.is_split and all(param != "None" for param, _ in self.dtypes)
        if self.chance(0.12):
            common += ", offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)"
        if self.chance(0.15):
            common += f", shard_placement_fn=columns({self.shard_size})"
        # Ignored parameters are not cast, and clipping refuses them beside sharded ones.
        if not self.mixes and self.stem == "linear" and not self.is_meta and self.chance(0.12):
            self.ignores = True
        ignored = ", ignored_params={model.stem.weight}" if self.ignores else ""
        # Torch registers wrong shards for an int where rows do not divide, and fails for dim 1.
        int_ok = self.shard_size == 4 and self.width % 4 == 0 and "columns" not in common
        rows_divide = not self.takes_tokens and EVEN_ROWS.issuperset(self.layers)

        def options(is_root: bool = False) -> str:
            value = rng.choice(["None", "True", "False", "True"])
            if int_ok and self.chance(0.1) and rows_divide:
                value = "2"
            words = common
            param, reduce = rng.choice(self.dtypes)
            out_dtype = output if is_root or outputs_all else ""
            if self.mixes or out_dtype:
                policy = f"fsdp.MixedPrecisionPolicy({param}, {reduce}{out_dtype})"
                # Some scripts take copies of a configuration.
                policy = f"__import__('copy').deepcopy({policy})" if self.chance(0.1) else policy
                words += f", mp_policy={policy}"
            words += "" if value == "None" else f", reshard_after_forward={value}"
            return words + (ignored if is_root else "")

        return options

    def units(self) -> list[str]:
        """The modules to shard before the root, innermost first."""
        found = ["model.stem"] if self.takes_tokens and self.chance(0.3) else []
        found += [f"model.layers[{index}].inner" for index in self.inner]
        lists = [[f"model.layers[{index}]" for index in group] for group in self.groups]
        found += [f"[{', '.join(names)}]" for names in lists]
        return found + [f"model.layers[{index}]" for index in self.singles]

    def unit(self) -> str:
        """Some unit, by name; units of several modules are none."""
        return self.rng.choice([f"model.layers[{index}]" for index in self.singles] + ["model"])
