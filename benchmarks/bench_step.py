"""A GPT's training step over the same work with no communication, in fp32 and with bf16 parameters.

The floor of a step is what every rank would do if communication cost nothing: zero_grad, forward,
loss and backward of the plain model on the rank's own batch (bf16: a plain bf16 model), and AdamW
over plain fp32 tensors that hold the rank's share of each parameter's rows. It is measured in turn
with the sharded steps, on all ranks at the same time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import measuring
import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Bench, Case, Launch, Row
from torch import nn

# What fsdp_c is built to stay under, as a multiple of the floor, by (precision, ranks).
GOALS = {("fp32", 2): 1.03, ("bf16", 2): 1.06}
PARTS = ("zero_grad", "forward", "backward", "optimizer")
LEARNING_RATE = 1e-4


@dataclass
class Config:
    """29.5 million parameters as it stands."""

    vocabulary: int = 4096
    width: int = 512
    layers: int = 8
    heads: int = 8
    batch: int = 2
    tokens: int = 128


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (b, heads, t, c / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.tokens, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, default=[2])
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--precisions", type=measuring.name_list, default=["fp32", "bf16"])
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name}", type=int, default=value)


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks]


def config_of(args: argparse.Namespace) -> Config:
    return Config(**{name: getattr(args, name) for name in asdict(Config())})


def plain_model(config: Config) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def sharded_model(api: Any, config: Config, mesh: Any, precision: str) -> GPT:
    model = plain_model(config)
    options = {"mesh": mesh}
    if precision == "bf16":
        options["mp_policy"] = api.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    times: list[tuple[int, ...]] | None = None,
) -> torch.Tensor:
    """One step of an ordinary script; the same for the floor but for whose tensors are stepped.

    times: gets the nanoseconds of each part.
    """
    clock = time.perf_counter_ns
    started = clock()
    model.zero_grad()
    cleared = clock()
    loss = loss_of(model, batch)
    computed = clock()
    loss.backward()
    reduced = clock()
    optimizer.step()
    if times is not None:
        ends = (cleared, computed, reduced, clock())
        times.append(tuple(b - a for a, b in zip((started, *ends), ends, strict=False)))
    return loss


def my_chunk(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of this rank, as torch splits a tensor of uneven length; possibly none."""
    parts = tensor.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return parts[rank] if rank < len(parts) else tensor[:0]


def floor_step(plain: nn.Module, batch: Any) -> Callable[..., torch.Tensor]:
    shares = []
    for parameter in plain.parameters():
        share = my_chunk(parameter.detach()).float().clone()
        share.grad = torch.full_like(share, 1e-3)
        shares.append(share)
    return functools.partial(training_step, plain, adamw(shares), batch)


def sharded_gradients(plain: nn.Module) -> list[torch.Tensor]:
    """What a sharded model's gradients must be: this rank's rows of the mean over ranks."""
    wanted = []
    for parameter in plain.parameters():
        mean = parameter.grad.to(torch.float32, copy=True)
        dist.all_reduce(mean)
        wanted.append(my_chunk(mean / dist.get_world_size()).clone())
    return wanted


def verify(plain: nn.Module, models: dict[str, Any], batch: Any, precision: str) -> None:
    """Losses and gradients against the plain model; over further steps, against each other."""
    # bf16 keeps 8 bits, and the plain model's gradients are rounded to them once; the sharded
    # ones are too, before they are summed in fp32.
    exact = {"rtol": 1e-4, "atol": 1e-6}
    tolerance = exact if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-4}
    plain.zero_grad()
    loss = loss_of(plain, batch)
    loss.backward()
    wanted = sharded_gradients(plain)
    losses: dict[str, list[torch.Tensor]] = {}
    for name, (model, optimizer) in models.items():
        what = f"{name}, {precision}"
        first = training_step(model, optimizer, batch).detach()
        measuring.same(f"{what}, loss", first, loss.detach(), **tolerance)
        gradients = [parameter.grad for parameter in model.parameters()]
        measuring.same(f"{what}, gradients", gradients, wanted, **tolerance)
        losses[name] = [training_step(model, optimizer, batch).detach() for _ in range(3)]
    for name, values in losses.items():
        first_name = next(iter(losses))
        what = f"{name} against {first_name}, {precision}, losses of later steps"
        measuring.same(what, values, losses[first_name], **tolerance)


def work(args: argparse.Namespace) -> list[Row]:
    from torch.distributed.device_mesh import init_device_mesh

    config, ranks = config_of(args), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    apis = measuring.implementations(args.impl)
    rows: list[Row] = []
    for precision in args.precisions:
        torch.manual_seed(100 + dist.get_rank())
        shape = (2, config.batch, config.tokens)
        tokens, targets = torch.randint(config.vocabulary, shape).unbind()
        batch = (tokens, targets)
        plain = plain_model(config)
        numel = sum(parameter.numel() for parameter in plain.parameters())
        if precision == "bf16":
            plain = plain.bfloat16()
        models = {}
        for name, api in apis.items():
            model = sharded_model(api, config, mesh, precision)
            models[name] = (model, adamw(model.parameters()))
        verify(plain, models, batch, precision)
        steps = {"floor": floor_step(plain, batch)}
        for name, (model, optimizer) in models.items():
            steps[name] = functools.partial(training_step, model, optimizer, batch)
        parts: dict[str, list[tuple[int, ...]]] = {name: [] for name in steps}
        cases = {n: Case(functools.partial(step, times=parts[n])) for n, step in steps.items()}
        rounds = args.rounds or (5 if args.quick else 15)
        times = measuring.measure(cases, rounds, block_s=0.5, budget_s=12 if args.quick else 60)
        facts = {"precision": precision, "ranks": ranks, "numel": numel, "config": asdict(config)}
        parts_us = {name: parts_of(found) for name, found in parts.items()}
        rows.append({**facts, "times": times, "parts_us": parts_us})
    return rows


def parts_of(steps: list[tuple[int, ...]]) -> dict[str, float]:
    """The median of each part, averaged over ranks."""
    medians = [statistics.median(part) / 1e3 for part in zip(*steps, strict=True)]
    return dict(zip(PARTS, measuring.mean_over_ranks(medians), strict=True))


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    config = config_of(args)
    table = report.Table(
        f"Training step of a GPT with {rows[0]['numel'] / 1e6:.1f}M parameters, "
        f"batch {config.batch} x {config.tokens} tokens per rank",
        ["precision", "ranks", "floor", *args.impl]
        + [f"{name} / floor" for name in args.impl]
        + ["goal", f"{args.impl[0]} / {args.impl[-1]}", "min", "p90", "rounds"],
        note=f"{config.layers} layers of width {config.width}, {config.heads} heads, vocabulary "
        f"{config.vocabulary}, AdamW. floor: the same work with no communication. bf16: bf16 "
        "parameters, fp32 reduction. min, p90: of the last implementation.",
    )
    for row in rows:
        times = {name: row["times"][name]["median_us"] for name in row["times"]}
        last = row["times"][args.impl[-1]]
        goal = GOALS.get((row["precision"], row["ranks"]))
        table.rows.append(
            [row["precision"], str(row["ranks"])]
            + [report.duration(times[name]) for name in ("floor", *args.impl)]
            + [report.ratio(times[name], times["floor"], 3) for name in args.impl]
            + [f"<= {goal}" if goal else ""]
            + [report.ratio(times[args.impl[0]], times[args.impl[-1]])]
            + [report.duration(last["min_us"]), report.duration(last["p90_us"])]
            + [str(last["samples"])]
        )
    return [table, parts_table(args, rows)]


def parts_table(args: argparse.Namespace, rows: list[Row]) -> report.Table:
    table = report.Table(
        "Where the time of such a step goes",
        ["precision", "ranks", "of", *PARTS],
        note="Medians of each part, mean over ranks. A rank that waits for another in a part is "
        "charged there; forward: the loss too.",
    )
    for row in rows:
        for name in ("floor", *args.impl):
            cells = [report.duration(row["parts_us"][name][part]) for part in PARTS]
            table.rows.append([row["precision"], str(row["ranks"]), name, *cells])
    return table


BENCH = Bench("step", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
