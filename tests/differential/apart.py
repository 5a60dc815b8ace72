"""Random programs whose ranks differ, which torch's fully_shard cannot run.

The unsharded model is the judge.

In a program that is right each rank uses units of its own choice and takes its loss where it
likes, from the output or from inner layers. In one that is not, a rank leaves step: all ranks
have to raise an error that names one.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from models import data
from parity import leaves, local, own_part
from torch import Tensor, nn

from differential.nets import Net
from differential.ways import TRANSPORTS, WAYS, Trial

# Without buffers and chance, which the judge's one model could not have for each rank.
LAYERS = "block linear norm tied tiny unused nested tuple dict thin recompute listed".split()
# Parts of layers whose outputs a loss may take, and which always run where the layer does.
PARTS = {
    "block": ("up", "down"),
    "thin": ("up", "down"),
    "tied": ("first",),
    "unused": ("used",),
    "nested": ("inner", "outer.up"),
    "tuple": ("left", "right"),
    "dict": ("right",),
    "recompute": ("body.up",),
    "linear": ("",),
    "norm": ("",),
}
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.05),
    lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    lambda params: torch.optim.AdamW(params, lr=0.01),
]
CLOSE = 1e-9  # float64, a few hundred additions
REFUSED = 3  # the exit code of who got an error that names a rank
TIMEOUT_S = 40


@dataclass
class Batch:
    """What one rank does with one micro-batch."""

    rows: int
    use: tuple[int, ...]
    kept: tuple[str, ...] = ()
    has_output: bool = True


@dataclass
class Program:
    seed: int
    world: int
    transport: str
    width: int
    layers: list[str]
    options: dict[str, Any]
    units: list[str]  # names of modules, innermost first; the root's is ""
    policies: dict[str, Any]
    mesh: tuple[int, ...]
    optimizer: int
    # By step, micro-batch and rank; no micro-batches: a forward without gradients on all ranks.
    steps: list[list[list[Batch]]] = field(default_factory=list)
    way: str = ""
    odd_rank: int = 0
    odd_step: int = 0


def make_program(seed: int, world: int, transport: str) -> Program:
    rng = random.Random(f"{seed} {world} {transport}")
    layers = [rng.choice(LAYERS) for _ in range(rng.randint(2, 5))]
    options = {"stem": rng.choice(["linear", "linear", "identity"])}
    options["around"] = rng.choice(["", "", "", "recompute"])
    options["has_own"] = rng.random() < 0.7
    units = [f"layers.{i}" for i in range(len(layers)) if rng.random() < 0.8]
    units = [
        name
        for unit in units
        for name in (unit + ".inner", unit)
        if not name.endswith("inner") or (layers[int(unit[7:])] == "nested" and rng.random() < 0.5)
    ]
    meshes = {4: [(4,), (2, 2), (2, 2)]}.get(world, [(world,)])
    program = Program(
        seed,
        world,
        transport,
        rng.choice([3, 4, 6]),
        layers,
        options,
        [*units, ""],
        {"reshard_after_forward": rng.choice([None, True, False])},
        rng.choice(meshes),
        rng.randrange(len(OPTIMIZERS)),
    )
    # Over messages all ranks use the same units, and mostly take their losses from their ends.
    is_free = transport == "shared memory"
    for _ in range(rng.randint(2, 5)):
        n = rng.choice([0, 1, 1, 1, 1, 2, 3])
        program.steps.append([draw_batches(rng, program, is_free) for _ in range(n)])
    if len(unit_names(program)) > 1 and rng.random() < 0.35:
        program.way = rng.choice(sorted(WAYS))
        program.odd_rank, program.odd_step = rng.randrange(world), rng.randrange(3)
    return program


def draw_batches(rng: random.Random, program: Program, is_free: bool) -> list[Batch]:
    n = len(program.layers)

    def draw_use() -> tuple[int, ...]:
        return tuple(rng.sample(range(n), rng.randint(1, n)) if rng.random() < 0.5 else range(n))

    def draw_inner(use: tuple[int, ...]) -> tuple[tuple[str, ...], bool]:
        names = [
            f"layers.{i}.{part}".rstrip(".")
            for i in use
            for part in PARTS.get(program.layers[i], ())
        ]
        if not names or rng.random() < 0.5:
            return (), True
        return tuple(rng.sample(names, rng.randint(1, min(2, len(names))))), rng.random() < 0.5

    if is_free:
        batches = []
        for _ in range(program.world):
            use = draw_use()
            batches.append(Batch(rng.randint(1, 4), use, *draw_inner(use)))
        return batches
    use = draw_use()
    inner = draw_inner(use)
    return [
        Batch(rng.randint(1, 4), use, *(draw_inner(use) if rng.random() < 0.2 else inner))
        for _ in range(program.world)
    ]


def unit_names(program: Program) -> list[str]:
    """Units that can be called by themselves, one after the other."""
    tensors = {"block", "linear", "norm", "tied", "thin", "nested"}
    return [
        name
        for name in program.units
        if name and name.count(".") == 1 and program.layers[int(name[7:])] in tensors
    ]


def inputs(program: Program, rank: int, number: int, rows: int = 2) -> Tensor:
    return data(rank, number, rows, program.width, dtype=torch.float64)


def loss_of(model: nn.Module, program: Program, rank: int, number: int, batch: Batch) -> Tensor:
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: kept.setdefault(name, out) is None or None

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in batch.kept]
    out = model(inputs(program, rank, number, batch.rows), use=batch.use)
    for handle in handles:
        handle.remove()
    parts = [*(leaves(out) if batch.has_output else []), *kept.values()]
    weights = (part.square().mean() + part.sum() * 0.1 for part in parts if part.requires_grad)
    return torch.stack(list(weights)).sum()


def build(program: Program) -> nn.Module:
    torch.manual_seed(program.seed)
    return Net(program.width, " ".join(program.layers), **program.options).double()


def shard(model: nn.Module, program: Program) -> None:
    names = ("replicate", "shard")[-len(program.mesh) :]
    mesh = harness.cached_mesh(program.mesh, names)
    for name in program.units:
        fsdp = harness.implementation()
        fsdp.fully_shard(model.get_submodule(name), mesh=mesh, **program.policies)


def differing_values(shards: dict[str, Any], plain: nn.Module) -> str:
    """The first parameter, or gradient, that is not the judge's."""
    judges = dict(plain.named_parameters())
    for name, shard in shards.items():
        pairs = [(name, shard, judges[name])]
        if (shard.grad is None) != (judges[name].grad is None):
            has = {True: "None", False: "a gradient"}
            return f"{name}.grad is {has[shard.grad is None]}, the judge's is not"
        if shard.grad is not None:
            pairs.append((f"{name}.grad", shard.grad, judges[name].grad))
        for what, mine, judge in pairs:
            own, expected = local(mine), own_part(judge, shard)
            if not torch.allclose(own, expected, rtol=CLOSE, atol=CLOSE):
                return f"{what} is off by {(own - expected).abs().max().item():.2g}"
    return ""


class Right:
    """A rank's model and the judge's, through a program that is right."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.plain, self.model = build(program), build(program)
        shard(self.model, program)
        self.shards = dict(self.model.named_parameters())
        make = OPTIMIZERS[program.optimizer]
        self.optimizer, self.judge = make(self.shards.values()), make(self.plain.parameters())
        self.number = 0

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(inputs(self.program, self.rank, self.number))

    def step(self, batches: list[list[Batch]]) -> str:
        """What is wrong after it."""
        for index, by_rank in enumerate(batches):
            self.number += 1
            self.model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = loss_of(self.model, self.program, self.rank, self.number, by_rank[self.rank])
            loss.backward()
            for rank, batch in enumerate(by_rank):
                part = loss_of(self.plain, self.program, rank, self.number, batch)
                (part / self.program.world).backward()
        self.optimizer.step()
        self.judge.step()
        text = differing_values(self.shards, self.plain)
        self.optimizer.zero_grad()
        self.judge.zero_grad()
        return text

    def run(self) -> str:
        """What is wrong."""
        for index, batches in enumerate(self.program.steps):
            if not batches:
                self.evaluate()
            elif text := self.step(batches):
                self.evaluate()  # over messages who is a unit short may step once, and is told here
                return f"after step {index}: {text}"
        self.evaluate()  # the ranks meet
        return ""


def run_wrong(rank: int, program: Program) -> str:
    """What goes unnoticed of a rank that leaves step."""
    model = build(program)
    shard(model, program)
    units = [model.get_submodule(name) for name in unit_names(program)]
    trial = Trial(model, build(program), units, lambda step: inputs(program, rank, step))
    for step in range(program.odd_step + 4):
        is_odd = step == program.odd_step and rank == program.odd_rank
        (WAYS[program.way] if is_odd else Trial.step)(trial, step)
    return f"{program.way} on rank {program.odd_rank} in step {program.odd_step} is silent"


def run_program(rank: int, n_ranks: int, program: Program) -> str:
    """The body of the ranks: what is wrong. Who gets an error ends, as a script does."""
    print(program, flush=True)
    try:
        return run_wrong(rank, program) if program.way else Right(rank, program).run()
    except RuntimeError as error:
        if "rank" not in str(error):
            raise
        print(error, flush=True)
        os._exit(REFUSED)


def judge(program: Program) -> tuple[str, str]:
    """What is wrong with a seed, and how its ranks ended: "right" or "error"."""
    env = TRANSPORTS[program.transport]
    try:
        outcomes = harness.run_ranks(
            run_program, program.world, program, env=env, fresh=True, timeout=TIMEOUT_S
        )
    except harness.RankFailure as failure:
        return str(failure), "hangs"
    codes = {outcome.exit_code for outcome in outcomes}
    may_refuse = program.way or program.transport != "shared memory"
    texts = [f"rank {o.rank}: {o.value or o.error}" for o in outcomes if o.value or o.error]
    if codes == {REFUSED} and may_refuse:
        return "", "error"
    if codes == {0} and not texts:
        return "", "right"
    outputs = [f"rank {outcome.rank}: {outcome.output[-2000:]}" for outcome in outcomes]
    return "\n".join([f"exit codes {codes}", *texts, *outputs]), "wrong"


def run(seeds: list[int], world: int, transport: str) -> tuple[list[str], dict[str, int]]:
    """What is wrong with seeds, and how many ended in which way."""
    wrong: list[str] = []
    ends: dict[str, int] = {}
    for seed in seeds:
        text, end = judge(make_program(seed, world, transport))
        ends[end] = ends.get(end, 0) + 1
        if text:
            wrong.append(f"seed {seed} on {world} ranks over {transport}: {text}")
    return wrong, ends
