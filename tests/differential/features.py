"""Random programs with features of fully_shard that few scripts use: layouts, subclasses, watchers.

`python -m tests.differential --seeds 0:100 --ranks 4 --features`. Left out is what torch refuses or
gets wrong; each place says what.
"""

import re
import textwrap

import torch
import torch.distributed.fsdp as torch_fsdp
from parity import Tolerance
from torch.distributed.fsdp._fully_shard import _fsdp_common

from differential import on_device
from differential.generate import Writer
from differential.program import Program

# Of each kind at most one: how parameters lie, what they are, who reduces them, who watches.
LAYOUTS = ("tensor parallel", "dp_mesh_dims", "replicate", "int", "two meshes")
TENSORS = ("scaled extension", "kept extension", "subclass", "complex")
COLLECTIVES = ("all-reduce hook", "custom all-gather", "custom reduce-scatter")
WATCHERS = ("dispatch mode", "replaced methods")
KINDS = (LAYOUTS, TENSORS, COLLECTIVES, WATCHERS)
NAMES = [name for kind in KINDS for name in kind]
CLASSES = {"scaled extension": "Scaled", "kept extension": "Kept", "subclass": "Wrapped"}
# Blocks whose columns two ranks divide, since torch takes the size of activations from one rank;
# and what DTensors of everything go through.
PARALLEL_LAYERS = "even thin recompute wrapped linear norm".split()
DTENSOR_LAYERS = "block linear thin recompute".split()
EVEN_LAYERS = "linear norm recurrent tanh".split()
OTHER_LAYERS = (
    "block block linear linear norm tied tiny unused frozen nested tuple dict thin recompute again"
).split()
MESHES = {
    "tensor parallel": {2: [(2, 1), (1, 2), (1, 2, 1)], 4: [(2, 2), (2, 2), (1, 2, 2), (2, 1, 2)]},
    "dp_mesh_dims": {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1), (2, 2, 1)]},
}
DTYPES = [
    ("None", "None"),
    ("None", "None"),
    ("torch.bfloat16", "torch.float32"),
    ("torch.bfloat16", "None"),
    ("None", "torch.bfloat16"),
]


def make_program(seed: int, world: int) -> Program:
    return FeatureWriter(seed, world).write()


def missing() -> set[str]:
    """What the installed torch lacks."""
    found = set()
    if not hasattr(torch_fsdp, "DataParallelMeshDims"):
        found.add("dp_mesh_dims")
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        found.add("two meshes")
    return found


class FeatureWriter(Writer):
    """A setting with features in the place of the usual one's, and blocks that all of them take."""

    def __init__(self, seed: int, world: int) -> None:
        super().__init__(seed, world)
        self.features = self.pick_features()
        self.program.features = tuple(self.features)
        self.runs_again = False  # a layer, in one of the forwards
        self.leaves_out = False  # a layer of a unit that others are in, perhaps
        self.program.counted = False
        self.program.installed = self.has("replicate")  # or torch's would replicate on both sides
        self.is_double = self.is_meta = self.ignores = False
        self.stem, self.output, self.around = "linear", "tensor", ""
        self.width = self.rng.choice([3, 4, 4, 6])
        self.mesh = ()
        self.dtypes = [self.rng.choice(DTYPES)]
        self.pick_layers()
        self.pick_units()
        self.inner = []
        self.is_split = False
        if self.has("dp_mesh_dims", "tensor parallel"):
            self.mesh = self.rng.choice(MESHES[self.layout][world])
        elif not self.has("int", "two meshes", "replicate") and (
            self.has("all-reduce hook") or self.chance(0.3)
        ):
            self.mesh = self.pick_mesh()
        self.watched = self.rng.choice(["first", "later", "all"])

    def has(self, *names: str) -> bool:
        return any(name in self.features for name in names)

    @property
    def layout(self) -> str:
        return next((name for name in LAYOUTS if name in self.features), "")

    @property
    def tensor(self) -> str:
        return next((name for name in TENSORS if name in self.features), "")

    # --- the setting ------------------------------------------------------------------------------

    def pick_features(self) -> list[str]:
        """One to three that torch runs together."""
        n = self.rng.choice([1, 1, 2, 2, 3])
        world = self.program.world
        lacking = missing() | ({"int"} if world != 4 else set())
        kinds = self.rng.sample(KINDS, n)
        found = [self.rng.choice([name for name in kind if name not in lacking]) for kind in kinds]
        return [name for name in NAMES if name in found and not self.is_refused(name, found)]

    def is_refused(self, name: str, found: list[str]) -> bool:
        """Of two that torch cannot run together, which one goes."""
        return any(other in found for other in REFUSED_BESIDE.get(name, ()))

    def pick_layers(self) -> None:
        choices = {
            "tensor parallel": PARALLEL_LAYERS,
            "dp_mesh_dims": DTENSOR_LAYERS,
            "int": EVEN_LAYERS,
        }.get(self.layout, OTHER_LAYERS)
        if self.layout == "int":
            self.width = 4  # torch registers wrong shards where rows do not divide
        self.layers = [self.rng.choice(choices) for _ in range(self.rng.randint(1, 4))]
        self.layers[0] = "block" if self.layers[0] == "again" else self.layers[0]
        if self.has("complex"):
            self.dtypes = [DTYPES[0]]  # torch casts to real dtypes, and sums in no others
            for _ in range(self.rng.randint(1, 2)):
                self.layers.insert(self.rng.randint(1, len(self.layers)), "waves")
        if self.has("dp_mesh_dims"):
            self.has_own = False  # a product of DTensors and tensors
        self.adds_many = True

    @property
    def shard_size(self) -> int:
        if self.layout in MESHES and self.mesh:
            return self.mesh[-2]
        return super().shard_size

    @property
    def is_hsdp(self) -> bool:
        return self.layout not in MESHES and len(self.mesh) == 2

    def tolerance(self) -> Tolerance:
        names = {name for pair in self.dtypes for name in pair}
        is_half = "torch.bfloat16" in names or self.has("scaled extension", "kept extension")
        if is_half:
            self.program.rounds = True
            eps = torch.finfo(torch.bfloat16).eps
            return Tolerance(scaled=4 * (self.program.world + 1) * eps, realign=True)
        return Tolerance(relative=1e-4, scaled=1e-4, realign=True)

    # --- lines ------------------------------------------------------------------------------------

    def write(self) -> Program:
        self.write_setup()
        blocks = [block for block, weight in FEATURE_BLOCKS.items() for _ in range(weight)]
        for _ in range(self.rng.randint(1, 4)):
            if written := self.rng.choice(blocks)(self):
                self.program.blocks.append(written)
        self.program.blocks.append(self.train())
        self.program.tolerance = self.tolerance()
        self.watch()
        return self.program

    def watch(self) -> None:
        """Some blocks run under a mode, or while a tool has replaced methods."""
        blocks = self.program.blocks
        chosen = {
            "first": range(1),
            "later": range(1, len(blocks)),
            "all": range(len(blocks)),
        }[self.watched]
        for index in chosen:
            if self.has("dispatch mode"):
                blocks[index] = [inside("Mode()", line) for line in blocks[index]]
            elif self.has("replaced methods"):
                words = "replaced_methods(model, fsdp, calls)"
                blocks[index] = ["calls = set()", *(inside(words, line) for line in blocks[index])]

    def write_setup(self) -> None:
        add = self.program.setup.append
        words = f"{self.width}, {' '.join(self.layers)!r}"
        add(f"model = Net({words}{'' if self.has_own else ', has_own=False'})")
        if self.freezes and not self.mixes:
            index = self.rng.randrange(len(self.layers))
            add(self.rng.choice(FREEZING).format(index))
        self.write_layout()
        if self.tensor in CLASSES:
            every = ", every=2" if self.chance(0.3) else ""
            add(f"n_converted = convert(model, {CLASSES[self.tensor]}{every})")
        options = self.unit_options()
        self.replicates_root = self.has("replicate") and self.chance(0.5)
        for module in [*self.units(), "model"]:
            add(self.shard_line(module, options))
        self.write_collectives()
        add("shards = dict(model.named_parameters())")
        add(self.optimizer())

    def write_layout(self) -> None:
        add = self.program.setup.append
        if self.has("tensor parallel"):
            names = ("replicate", "dp", "tp")[-len(self.mesh) :]
            add(f"mesh = cached_mesh({self.mesh}, {names})")
            add("n_parallel = parallelize(model, mesh['tp'])")
            add(f"rank = data_rank(mesh, *{names[:-1]})")
        elif self.has("dp_mesh_dims"):
            names = ("rep", "dp", "tp")[-len(self.mesh) :]
            add(f"mesh = cached_mesh({self.mesh}, {names})\nrank = data_rank(mesh, *{names[:-1]})")
            inner = self.rng.choice(["Replicate()", "Shard(0)"])
            placements = ", ".join(["Replicate()"] * (len(names) - 1) + [inner])
            add(f"spread(model, mesh, [{placements}])")

    def unit_options(self):  # noqa: ANN201
        common = ""
        if self.has("tensor parallel"):
            names = ("replicate", "dp")[-(len(self.mesh) - 1) :]
            common = f", mesh=mesh[{names if len(names) > 1 else names[0]!r}]"
        elif self.has("dp_mesh_dims"):
            dims = self.rng.choice(["shard='dp'", "shard='dp'", "replicate='dp'"])
            dims = "shard='dp'" if "extension" in self.tensor else dims  # as for `replicate`
            dims = dims if len(self.mesh) == 2 else "shard='dp', replicate='rep'"
            common = f", mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims({dims})"
        elif self.mesh:
            common = f", mesh=cached_mesh({self.mesh}, {('r', 's')[-len(self.mesh) :]})"
        if self.has("two meshes"):
            common += ", shard_placement_fn=vectors_apart(world)"
        if self.dtypes[0] != DTYPES[0]:
            common += f", mp_policy=fsdp.MixedPrecisionPolicy({', '.join(self.dtypes[0])})"
        may_offload = not self.features or self.layout == "int"
        if may_offload and self.chance(0.1):
            common += ", offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)"

        def options(is_replicated: bool) -> str:
            if is_replicated:
                return common
            value = self.rng.choice(["None", "True", "False", "True"])
            if self.has("int"):
                value = self.rng.choice(["2", "2", "True"])
            return common + ("" if value == "None" else f", reshard_after_forward={value}")

        return options

    def shard_line(self, module: str, options) -> str:  # noqa: ANN001
        replicated = self.has("replicate") and (
            self.replicates_root if module == "model" else self.chance(0.7)
        )
        function = "replicate" if replicated else "fsdp.fully_shard"
        return f"{function}({module}{options(replicated)})"

    def write_collectives(self) -> None:
        """Of some unit, or of all."""
        calls = {
            "all-reduce hook": "set_all_reduce_hook(reduce_hook(noted, 0.5))",
            "custom all-gather": "set_custom_all_gather(AllGather(noted))",
            "custom reduce-scatter": "set_custom_reduce_scatter(ReduceScatter(noted))",
        }
        for name in COLLECTIVES:
            if self.has(name):
                chosen = self.rng.choice([["model"], *[[u] for u in self.units()], self.units()])
                lines = [f"{unit}.{calls[name]}" for unit in chosen if not unit.startswith("[")]
                self.program.setup.append("\n".join(["noted = []", *lines]))

    def set_something(self) -> list[str]:
        """Setters about shards are refused where a unit below is replicated; and where a shard
        group has one rank torch divides by a factor of the user's twice."""
        lines = super().set_something()
        is_alone = self.has("replicate") or "MeshDims(replicate=" in "".join(self.program.setup)
        is_refused = self.has("replicate") and "set_reshard_after_forward" in lines[-1]
        is_refused = is_refused or (is_alone and "set_gradient_divide_factor" in "".join(lines))
        return [] if is_refused else lines

    def evaluate(self) -> list[str]:
        """Torch cannot use what it has made in inference mode: a unit that runs late is one."""
        return [line.replace("inference_mode", "no_grad") for line in super().evaluate()]

    def meanwhile(self) -> list[str]:
        """After an evaluation there torch gathers once more, behind a unit's backward."""
        lines = super().meanwhile()
        self.runs_again = self.runs_again or "no_grad" in "".join(lines)
        return lines

    def hook_lines(self) -> list[str]:
        """Of a unit that runs several times torch reduces each time, and the core once for all."""
        if self.has(*COLLECTIVES):
            calls = "noted"
            if self.leaves_out or on_device.sums_whole_units(self.program):
                calls = f"without_sizes({calls})"
            if self.runs_again or "again" in self.layers:
                calls = f"set({calls})"
            return [f"calls_of_collectives = sorted({calls})\nnoted.clear()"]
        return []

    def use(self) -> str:
        words = super().use()
        layers = re.findall(r"\d+", words)
        self.runs_again = self.runs_again or len(set(layers)) < len(layers)
        self.leaves_out = self.leaves_out or (on_device.is_used() and words != "")
        return words

    def clip(self) -> str:
        """Torch cannot take a norm over several meshes, nor of subclasses."""
        if self.layout in ("tensor parallel", "two meshes", "replicate") or self.tensor:
            return "n_gradients = sum(p.grad is not None for p in shards.values())"
        return super().clip()

    def pick_units(self) -> None:
        """Torch takes no complex parameters beside real ones in a unit."""
        super().pick_units()
        waves = [index for index, name in enumerate(self.layers) if name == "waves"]
        self.groups = [group for group in self.groups if not set(group).intersection(waves)]
        self.singles = sorted({*self.singles, *waves})

    def units(self) -> list[str]:
        if self.has("replicate"):  # of one module each
            return [f"model.layers[{index}]" for index in self.singles]
        return super().units()

    def optimizer(self, is_any: bool = False) -> str:
        # Torch's foreach needs tensors of one mesh, and of one kind.
        choices = [
            "SGD({}, lr=0.05, foreach=False)",
            "SGD({}, lr=0.02, momentum=0.9, foreach=False)",
        ]
        if not self.tensor:
            choices.append("AdamW({}, lr=0.01, foreach=False)")
        words = self.rng.choice(choices).format("model.parameters()")
        return f"optimizer = torch.optim.{words}"


def inside(context: str, line: str) -> str:
    """The line under a context, if it runs the model."""
    if not any(call in line for call in ("model(", "backward(", "unshard(", "reshard(")):
        return line
    return f"with {context}:\n{textwrap.indent(line, '    ')}"


FREEZING = [
    "model.layers[{}].requires_grad_(False)",
    "next(model.layers[{}].parameters()).requires_grad_(False)",
    "model.stem.requires_grad_(False)",
]
# A feature goes where one of the others is there.
REFUSED_BESIDE: dict[str, tuple[str, ...]] = {
    # torch asks for the gather of all ranks, and then gathers nothing; from slices it gathers none.
    "scaled extension": ("replicate", "int"),
    "kept extension": ("replicate", "int"),
    # plain activations; torch registers wrong shards where rows do not divide.
    "complex": ("tensor parallel", "dp_mesh_dims", "int"),
    # torch has no setters of these for replicated units, nor for several meshes.
    "all-reduce hook": ("replicate", "two meshes"),
    "custom all-gather": ("replicate", "two meshes"),
    "custom reduce-scatter": ("replicate", "two meshes"),
}
FEATURE_BLOCKS = {
    FeatureWriter.train: 8,
    FeatureWriter.evaluate: 2,
    FeatureWriter.two_forwards: 2,
    FeatureWriter.hold: 4,
    FeatureWriter.unshard: 2,
    FeatureWriter.set_something: 3,
    FeatureWriter.retain: 1,
    FeatureWriter.input_gradient: 1,
    FeatureWriter.clear_late: 1,
    FeatureWriter.save: 2,
    FeatureWriter.schedule: 1,
}
