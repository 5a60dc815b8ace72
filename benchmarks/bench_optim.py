"""Optimizer steps and gradient clipping over sharded parameters, beside plain tensors.

`plain` are tensors of the sizes that a rank's shards have, stepped by the same optimizer: what the
arithmetic costs without sharding. Each implementation's updates are first compared with its bits.
Many small parameters show the cost of each, a large one that of its bytes: there torch's fused CPU
kernels step the plain tensor, and `copy` copies as many bytes as a step has to read and write.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import measuring
import report
from measuring import Bench, Case, Launch, Row

WIDTH = 64
NORM = 1e-3
# Bytes that are read or written for an element of one large parameter.
LARGE_BYTES = {"AdamW": 28, "SGD, momentum": 20, "clip_grad_norm_": 12}
# What fsdp_c is built to stay under, as a multiple of plain tensors.
GENERAL_GOAL = 1.1  # of every class, and of all clipping
GOALS = {
    "AdamW": 0.3,
    "AdamW, 2 groups": 0.5,
    "clip_grad_norm_": 0.3,
    "clip_grad_norm_, finite": GENERAL_GOAL,
    "clip_grad_norm_, inf": GENERAL_GOAL,
    "clip_grad_norm_, bf16": GENERAL_GOAL,
    "clip_grad_norm_, bf16, finite": GENERAL_GOAL,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, help="default 1,2")
    parser.add_argument("--units", type=int, default=10)
    parser.add_argument("--layers", type=int, default=30, help="of a unit")
    parser.add_argument("--large", type=int, default=8 << 20, help="elements of a large shard")
    parser.add_argument("--rounds", type=int, help="most rounds of each case")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks or [1, 2]]


def net(n_units: int, n_layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    units = [[nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)] for _ in range(n_units)]
    return nn.Sequential(*[nn.Sequential(*layers) for layers in units])


def parameters_of(
    name: str, args: argparse.Namespace, models: list[Any], is_bf16: bool = False
) -> list[Any]:
    """Parameters with gradients; plain ones are copies of the shards of torch's.

    Their model goes to `models`, to be kept as long as they are used.
    """
    model = net(args.units, args.layers)
    return with_gradients(name, model.bfloat16() if is_bf16 else model, models)


def large_parameters_of(name: str, args: argparse.Namespace, models: list[Any]) -> list[Any]:
    """The same of one matrix, whose shards have `--large` elements."""
    import torch.distributed as dist
    from torch import nn

    rows = max(args.large // WIDTH, 1) * dist.get_world_size()
    return with_gradients(name, nn.Sequential(nn.Linear(WIDTH, rows, bias=False)), models)


def with_gradients(name: str, model: Any, models: list[Any]) -> list[Any]:
    import torch
    from torch import nn

    api = measuring.implementations(["torch" if name == "plain" else name]).popitem()[1]
    for block in model:
        api.fully_shard(block)
    api.fully_shard(model)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()
    ordinary_gradients(model)
    models.append(model)
    if name != "plain":
        return list(model.parameters())
    plain = []
    for parameter in model.parameters():
        plain.append(nn.Parameter(parameter.to_local().detach().clone()))
        plain[-1].grad = parameter.grad.to_local().clone()
    return plain


def ordinary_gradients(model: Any) -> None:
    """Those of so deep a net vanish, and arithmetic on denormal numbers takes far longer."""
    import torch

    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.grad.to_local().normal_(0, 1e-3, generator=generator)


def groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Decay for matrices, none for the rest, as language models are trained."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def makers() -> dict[str, Callable[[list[Any]], Callable[[], Any]]]:
    """Name of a row to what makes its step from parameters."""
    from torch import optim

    return {
        "AdamW": lambda p: optim.AdamW(p, lr=1e-4).step,
        "AdamW, 2 groups": lambda p: optim.AdamW(groups(p), lr=1e-4).step,
        "AdamW, foreach": lambda p: optim.AdamW(p, lr=1e-4, foreach=True).step,
        "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-4, fused=True).step,
        "SGD, momentum": lambda p: optim.SGD(p, lr=1e-4, momentum=0.9).step,
        "RMSprop": lambda p: optim.RMSprop(p, lr=1e-4).step,
        "clip_grad_norm_": clipping(),
        "clip_grad_norm_, finite": clipping(error_if_nonfinite=True),
        "clip_grad_norm_, inf": clipping(norm_type=math.inf),
        "clip_grad_norm_, bf16": clipping(),
        "clip_grad_norm_, bf16, finite": clipping(error_if_nonfinite=True),
    }


def clipping(**options: Any) -> Callable[[list[Any]], Callable[[], Any]]:
    from torch import nn

    return lambda p: lambda: nn.utils.clip_grad_norm_(p, NORM, **options)


def large_makers() -> dict[str, Callable[[list[Any], str], Callable[[], Any]]]:
    from torch import nn, optim

    def options(name: str) -> dict[str, Any]:
        return {"fused": True} if name == "plain" else {}

    return {
        "AdamW": lambda p, name: optim.AdamW(p, lr=1e-4, **options(name)).step,
        "SGD, momentum": lambda p, name: optim.SGD(p, lr=1e-4, momentum=0.9, **options(name)).step,
        "clip_grad_norm_": lambda p, name: lambda: nn.utils.clip_grad_norm_(p, NORM),
    }


def class_makers() -> dict[str, Callable[[list[Any]], Callable[[], Any]]]:
    """Every class of torch.optim for dense gradients, in every variant."""
    from torch import optim

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "Adadelta": (optim.Adadelta, {}),
        "Adagrad": (optim.Adagrad, {}),
        "Adamax": (optim.Adamax, {}),
        "AMSGrad": (optim.Adam, {"amsgrad": True}),
        "ASGD": (optim.ASGD, {}),
        "NAdam": (optim.NAdam, {}),
        "RAdam": (optim.RAdam, {}),
        "RMSprop": (optim.RMSprop, {}),
        "Rprop": (optim.Rprop, {}),
        "SGD, maximize": (optim.SGD, {"momentum": 0.9, "maximize": True}),
    }
    found = {"Adafactor": lambda p: optim.Adafactor(p, lr=1e-4).step}
    for name, (cls, options) in kinds.items():
        has_fused = cls in (optim.Adagrad, optim.Adam, optim.SGD)
        for variant in ("", "foreach", "fused") if has_fused else ("", "foreach"):
            chosen = {**options, variant: True} if variant else options
            found[f"{name}, {variant}".rstrip(", ")] = functools.partial(step_of, cls, chosen)
    return found


def step_of(cls: Any, options: dict[str, Any], parameters: list[Any]) -> Callable[[], Any]:
    return cls(parameters, lr=1e-4, **options).step


def copying(n_bytes: int) -> Callable[[], Any]:
    """Reads half of them and writes half."""
    import torch

    source, target = (torch.ones(n_bytes // 2, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


def large_work(args: argparse.Namespace) -> list[Row]:
    import torch.distributed as dist

    rows: list[Row] = []
    for row, make in large_makers().items():
        models: list[Any] = []
        cases = {"copy": Case(copying(LARGE_BYTES[row] * args.large))}
        for name in ("plain", args.impl[-1]):
            parameters = large_parameters_of(name, args, models)
            cases[name] = Case(make(parameters, name), before(row, name, parameters))
        times = measuring.measure(
            cases, args.rounds or 12, block_s=0.1, budget_s=2 if args.quick else 8
        )
        facts = {"row": row, "ranks": dist.get_world_size(), "large": args.large}
        rows.append({**facts, "times": times})
    return rows


def class_work(args: argparse.Namespace) -> list[Row]:
    import torch
    import torch.distributed as dist

    rows: list[Row] = []
    models: list[Any] = []
    everyone = {name: parameters_of(name, args, models) for name in ("plain", *args.impl)}
    start = [p.detach().clone() for p in everyone["plain"]]
    for row, make in class_makers().items():
        cases = {}
        for name, parameters in everyone.items():
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    measuring.local(parameter).copy_(value)
            step = make(parameters)
            if is_accepted(step):
                cases[name] = Case(step)
        verify(row, {name: everyone[name] for name in cases}, "plain")
        times = measuring.measure(
            cases, args.rounds or 12, block_s=0.02, budget_s=0.3 if args.quick else 1.5
        )
        rows.append({"class": row, "ranks": dist.get_world_size(), "times": times})
    return rows


def is_accepted(step: Callable[[], Any], n_steps: int = 2) -> bool:
    """Takes the first steps; False where an operator is not to be had for DTensors."""
    try:
        for _ in range(n_steps):
            step()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def before(row: str, name: str, parameters: list[Any]) -> Callable[[], None]:
    """What is not timed: clipped gradients grow again, or there were nothing to multiply.

    Ranks meet after that, so that their skew is not charged. Local tensors are looked up once:
    hundreds of new objects a step would leave their collection as garbage to what is timed.
    """
    import torch
    import torch.distributed as dist

    gradients = [measuring.local(p.grad) for p in parameters]

    def prepare() -> None:
        use_clipping_of(name)
        if row.startswith("clip_grad_norm_"):
            torch._foreach_mul_(gradients, 2.0)
            dist.barrier()

    return prepare


def use_clipping_of(name: str) -> None:
    """torch's functions as they are, or as fsdp_c changes them for everyone."""
    norms = sys.modules.get("fsdp_c._optim._clip_grad_norm")
    if norms is not None:
        (norms.install if name == "fsdp_c" else norms.uninstall)()


def verify(row: str, everyone: dict[str, list[Any]], judge: str) -> None:
    """After the same calls all have the judge's bits; a norm over ranks is not plain tensors'."""
    names = [name for name in everyone if name not in (judge, "plain")]
    for name in names:
        what = f"{name}, {row}"
        values = [[p.detach() for p in everyone[n]] for n in (name, judge)]
        grads = [[p.grad for p in everyone[n]] for n in (name, judge)]
        measuring.same(f"{what}, parameters", *values, rtol=0, atol=0)
        measuring.same(f"{what}, gradients", *grads, rtol=0, atol=0)


def work(args: argparse.Namespace) -> list[Row]:
    import torch.distributed as dist

    rows: list[Row] = []
    for row, make in makers().items():
        models: list[Any] = []
        everyone = {
            name: parameters_of(name, args, models, is_bf16="bf16" in row)
            for name in ("plain", *args.impl)
        }
        cases = {
            name: Case(make(parameters), before(row, name, parameters))
            for name, parameters in everyone.items()
        }
        for case in cases.values():
            for _ in range(3):
                case.before()
                case.step()
        is_local = not row.startswith("clip_grad_norm_") or dist.get_world_size() == 1
        verify(row, everyone, "plain" if is_local else args.impl[0])
        times = measuring.measure(
            cases, args.rounds or 12, block_s=0.1, budget_s=3 if args.quick else 8
        )
        rows.append({"row": row, "ranks": dist.get_world_size(), "times": times})
    is_first = dist.get_world_size() == launches(args)[0].ranks
    return rows + large_work(args) + (class_work(args) if is_first else [])


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    last = args.impl[-1]
    table = report.Table(
        f"{2 * args.units * args.layers} parameters, {WIDTH} x {WIDTH} and {WIDTH}, fp32 but for"
        " bf16, median",
        ["call", "ranks", "plain", *args.impl]
        + [f"{name} / plain" for name in args.impl]
        + ["goal", "min", "p90"],
        note="min, p90: of the last implementation. finite: error_if_nonfinite=True.",
    )
    for row in (row for row in rows if "row" in row and "large" not in row):
        times = {name: values["median_us"] for name, values in row["times"].items()}
        goal = GOALS.get(row["row"])
        table.rows.append(
            [row["row"], str(row["ranks"])]
            + [report.duration(times[name]) for name in ("plain", *args.impl)]
            + [report.ratio(times[name], times["plain"]) for name in args.impl]
            + [f"<= {goal}" if goal else ""]
            + [report.duration(row["times"][last][key]) for key in ("min_us", "p90_us")]
        )
    large = [row for row in rows if "large" in row]
    return [table, large_table(args, large), class_table(args, [r for r in rows if "class" in r])]


def large_table(args: argparse.Namespace, rows: list[Row]) -> report.Table:
    last = args.impl[-1]
    table = report.Table(
        f"One parameter with {args.large} elements of fp32 on each rank, median",
        ["call", "ranks", "copy", "torch", last, f"{last} / torch", f"{last} / copy", "GB/s"],
        note="torch: its fused CPU kernel over a plain tensor, or clip_grad_norm_ of one. copy: of"
        " as many bytes as have to be read and written. GB/s: of these, on each rank.",
    )
    for row in rows:
        times = {name: values["median_us"] for name, values in row["times"].items()}
        speed = LARGE_BYTES[row["row"]] * row["large"] / times[last] / 1e3
        table.rows.append(
            [row["row"], str(row["ranks"])]
            + [report.duration(times[name]) for name in ("copy", "plain", last)]
            + [report.ratio(times[last], times[name]) for name in ("plain", "copy")]
            + [report.number(speed)]
        )
    return table


def class_table(args: argparse.Namespace, rows: list[Row]) -> report.Table:
    table = report.Table(
        f"step() of every class over {2 * args.units * args.layers} parameters, median",
        ["class", "ranks", "plain", *args.impl]
        + [f"{name} / plain" for name in args.impl]
        + ["goal"],
        note="-: an operator of torch's does not take DTensors.",
    )
    for row in rows:
        times = {name: values["median_us"] for name, values in row["times"].items()}
        plain = times["plain"]
        found = [times.get(name) for name in args.impl]
        table.rows.append(
            [row["class"], str(row["ranks"]), report.duration(plain)]
            + ["-" if time is None else report.duration(time) for time in found]
            + ["-" if time is None else report.ratio(time, plain) for time in found]
            + [f"<= {GENERAL_GOAL}"]
        )
    return table


BENCH = Bench("optim", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
