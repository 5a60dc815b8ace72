"""Host time that sharding adds to a step, per unit: many tiny linear layers, nothing else counts.

The figure is (sharded step - step of the plain module) / units, for forward + backward and for a
forward under no_grad: the median over pairs of neighbouring blocks, of the slowest rank's steps.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import measuring
import report
from measuring import Bench, Case, Launch, Row

WIDTH = 16
# Microseconds per unit and step that fsdp_c is built to stay under, by (mode, units, ranks).
GOALS = {
    **{("train", units, 1): 10 for units in (10, 100, 1000)},
    **{("train", units, 2): 15 for units in (10, 100, 1000)},
    ("no_grad", 100, 1): 5,
    ("no_grad", 100, 2): 10,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--units", type=measuring.int_list, help="default 10,100,1000")
    parser.add_argument("--ranks", type=measuring.int_list, help="default 1,2,4")
    parser.add_argument(
        "--over-messages", action="store_true", help="the process group's collectives"
    )
    parser.add_argument("--pairs", type=int, help="most pairs of blocks, per row")
    parser.add_argument("--budget-s", type=float, help="of each implementation, per row")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks or ([1, 2] if args.quick else [1, 2, 4])]


def net(n_units: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(n_units)])


def sharded_net(api: Any, n_units: int, mesh: Any) -> Any:
    model = net(n_units)
    for module in model:
        api.fully_shard(module, mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    return model


def train_case(model: Any, x: Any) -> Case:
    parameters = list(model.parameters())

    def before() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return Case(lambda: model(x).sum().backward(), before)


def no_grad_case(model: Any, x: Any) -> Case:
    import torch

    def step() -> None:
        with torch.no_grad():
            model(x)

    return Case(step)


def verify(plain: Any, models: dict[str, Any], x: Any, n_steps: int) -> None:
    """Outputs, gradients and the parameters' effect agree over steps that change the parameters."""
    import torch
    import torch.distributed as dist

    cases = {name: train_case(model, x) for name, model in {"plain": plain, **models}.items()}
    for step in range(n_steps):
        outputs, input_grads = {}, {}
        for name, model in {"plain": plain, **models}.items():
            cases[name].before()
            outputs[name] = model(x)
            outputs[name].sum().backward()
            input_grads[name] = x.grad
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        # The layers' rows divide by every number of ranks, so that a rank's part is a plain chunk.
        rank, ranks = dist.get_rank(), dist.get_world_size()
        wanted = [parameter.grad.chunk(ranks)[rank] for parameter in plain.parameters()]
        for name, model in models.items():
            what = f"{name}, step {step}"
            measuring.same(f"{what}, output", outputs[name], outputs["plain"])
            measuring.same(f"{what}, input's gradient", input_grads[name], input_grads["plain"])
            gradients = [parameter.grad for parameter in model.parameters()]
            measuring.same(f"{what}, gradients", gradients, wanted)
        for model in (plain, *models.values()):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        dist.barrier()
    with torch.no_grad():
        for name, model in models.items():
            measuring.same(f"{name}, forward under no_grad", model(x), plain(x))


def work(args: argparse.Namespace) -> list[Row]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if args.over_messages:
        os.environ["FSDP_C_TRANSPORT"] = "callback"
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    apis = measuring.implementations(args.impl)
    rows: list[Row] = []
    for n_units in args.units or ([10, 100] if args.quick else [10, 100, 1000]):
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(4, WIDTH, requires_grad=True)
        plain = net(n_units)
        models = {name: sharded_net(api, n_units, mesh) for name, api in apis.items()}
        verify(plain, models, x, n_steps=1 if n_units * ranks > 1000 else 3)
        budget_s = args.budget_s or (1.5 if args.quick else 8)
        pairs = args.pairs or (6 if args.quick else 400)
        for mode, case in (("train", train_case), ("no_grad", no_grad_case)):
            cases = {name: case(model, x) for name, model in models.items()}
            counting = {name: api.stats for name, api in apis.items() if hasattr(api, "stats")}
            for name, stats in counting.items():
                stats(models[name], reset=True)
            times = measuring.measure_added(case(plain, x), cases, budget_s, 0.05, pairs)
            for name, stats in counting.items():
                per_step_us = stats(models[name]).waits.seconds_per_step * 1e6
                times[name]["waited_us"] = measuring.mean_over_ranks([per_step_us])[0]
            rows.append({"mode": mode, "units": n_units, "ranks": ranks, "times": times})
    return rows


def per_unit(row: Row, name: str, statistic: str = "median_us") -> float:
    return row["times"][name][statistic] / row["units"]


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    titles = {"train": "forward + backward", "no_grad": "forward under no_grad"}
    over = ", over the process group's collectives" if args.over_messages else ""
    last = args.impl[-1]
    found = []
    for mode, title in titles.items():
        table = report.Table(
            f"Host us per unit and step over the plain module: {title}, n x Linear(16, 16){over}",
            ["units", "ranks", "plain", *args.impl, "ratio", "goal"]
            + ["p10", "p90", "waited", "pairs"],
            note="plain: us per unit of the unsharded module, on the slowest rank, beside the last "
            "implementation. ratio: first over last implementation. Of the last: p10, p90 of its "
            "pairs; waited: what ranks waited for each other, mean of all steps; number of pairs.",
        )
        for row in (row for row in rows if row["mode"] == mode):
            added = [per_unit(row, name) for name in args.impl]
            goal = GOALS.get((mode, row["units"], row["ranks"]))
            if args.over_messages:
                goal = None  # they are latency of collectives
            waited = "waited_us" in row["times"][last]
            plain = report.number(per_unit(row, last, "base_us"))
            table.rows.append(
                [str(row["units"]), str(row["ranks"]), plain]
                + [report.number(value) for value in added]
                + [report.ratio(added[0], added[-1], 1), f"<= {goal}" if goal else ""]
                + [report.number(per_unit(row, last, key)) for key in ("p10_us", "p90_us")]
                + [report.number(per_unit(row, last, "waited_us")) if waited else "-"]
                + [str(row["times"][last]["samples"])]
            )
        found.append(table)
    return found


BENCH = Bench("host_overhead", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
