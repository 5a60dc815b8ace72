"""Training over several hosts: a GPT's step over the same work without communication, what
sharding adds to a step of many small units, and backward's gathers from all ranks or from a host's.

Hosts are network, process and mount spaces of this machine (tests/support/hosts.py), whose ranks
share its cores: what is measured is work and latency; with --rate also how much of the time on the
wire is hidden behind computation.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bench_host_overhead
import bench_step
import measuring
import report
from measuring import Bench, Case, Launch, Row

CALLBACK = "fsdp_c, group's collectives"
LARGE, N_LARGE = 1024, 8
# What fsdp_c is built to stay under, by hosts: of the floor, and microseconds per unit.
GOALS = {(1, 1): (1.45, 400), (2, 2): (1.25, 600)}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=worlds, help='ranks of each host; default "1,1;2,2"')
    parser.add_argument("--layers", type=int, default=bench_step.Config.layers)
    parser.add_argument("--units", type=int, default=50)
    parser.add_argument("--budget-s", type=float, help="of each part of a row")
    parser.add_argument("--rate", help='of what a host sends, as tc has it: "1gbit"; default: any')


def worlds(text: str) -> list[tuple[int, ...]]:
    return [tuple(measuring.int_list(part)) for part in text.split(";")]


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(sum(hosts), hosts=hosts) for hosts in args.hosts or [(1, 1), (2, 2)]]


@contextmanager
def transport(kind: str) -> Iterator[None]:
    os.environ["FSDP_C_TRANSPORT"] = kind
    try:
        yield
    finally:
        del os.environ["FSDP_C_TRANSPORT"]


def ways(args: argparse.Namespace) -> dict[str, tuple[Any, Any, str]]:
    """Of each case: the implementation, a mesh of its own, and the transport to ask for."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    found = {}
    for name, api in measuring.implementations(args.impl).items():
        found[name] = (api, DeviceMesh.from_group(dist.new_group(), "cpu"), "auto")
        if name == "fsdp_c":
            found[CALLBACK] = (api, DeviceMesh.from_group(dist.new_group(), "cpu"), "callback")
    return found


def budget_of(args: argparse.Namespace) -> float:
    return args.budget_s or (10 if args.quick else 40)


def time_steps(args: argparse.Namespace, cases: dict[str, Any]) -> dict[str, Row]:
    import torch
    import torch.distributed as dist

    config = bench_step.Config(layers=args.layers)
    torch.manual_seed(100 + dist.get_rank())
    batch = torch.randint(config.vocabulary, (2, config.batch, config.tokens)).unbind()
    plain = bench_step.plain_model(config)
    models = {}
    for name, (api, mesh, kind) in cases.items():
        model = bench_step.sharded_model(api, config, mesh, "fp32")
        models[name] = (model, bench_step.adamw(model.parameters()))
        with transport(kind):
            bench_step.training_step(*models[name], batch)  # chooses the transport
    with torch.no_grad():  # all begin with the same weights again
        for model, _ in models.values():
            for ours, first in zip(model.parameters(), plain.parameters(), strict=True):
                measuring.local(ours).copy_(bench_step.my_chunk(first))
    models = {name: (m, bench_step.adamw(m.parameters())) for name, (m, _) in models.items()}
    bench_step.verify(plain, models, batch, "fp32")
    steps = {"floor": bench_step.floor_step(plain, batch)}
    for name, (model, optimizer) in models.items():
        steps[name] = functools.partial(bench_step.training_step, model, optimizer, batch)
    timed = {name: Case(step) for name, step in steps.items()}
    return measuring.measure(timed, rounds=40, block_s=0.5, budget_s=budget_of(args))


def time_units(args: argparse.Namespace, cases: dict[str, Any]) -> dict[str, Row]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(4, bench_host_overhead.WIDTH, requires_grad=True)
    plain = bench_host_overhead.net(args.units)
    models = {}
    for name, (api, mesh, kind) in cases.items():
        models[name] = bench_host_overhead.sharded_net(api, args.units, mesh)
        with transport(kind):
            models[name](x)
    bench_host_overhead.verify(plain, models, x, n_steps=2)
    timed = {name: bench_host_overhead.train_case(model, x) for name, model in models.items()}
    base = bench_host_overhead.train_case(plain, x)
    return measuring.measure_added(base, timed, budget_of(args) / len(timed), 0.5)


def reshards(impl: list[str]) -> dict[str, tuple[str, bool]]:
    """Of each column: the implementation, and whether forward reshards to the host's ranks."""
    return {
        f"{name}, {where}": (name, on_host)
        for name in impl
        for where, on_host in (("all ranks", False), ("host", True))
    }


def time_reshards(args: argparse.Namespace, cases: dict[str, Any], per_host: int) -> dict[str, Row]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(4, LARGE, requires_grad=True)
    steps = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for column, (name, on_host) in reshards(args.impl).items():
        api, mesh, _ = cases[name]
        torch.manual_seed(0)
        layers = [torch.nn.Linear(LARGE, LARGE, bias=False) for _ in range(N_LARGE)]
        model = torch.nn.Sequential(*layers)
        for layer in model:
            api.fully_shard(layer, mesh=mesh, reshard_after_forward=per_host if on_host else True)
        api.fully_shard(model, mesh=mesh)
        steps[column] = bench_host_overhead.train_case(model, x)
        for _ in range(2):
            steps[column].before()
            steps[column].step()
        gradients[column] = [measuring.local(p.grad).clone() for p in model.parameters()]
        measuring.same(f"{column}, gradients", gradients[column], next(iter(gradients.values())))
    return measuring.measure(steps, rounds=40, block_s=0.5, budget_s=budget_of(args))


def limit_rate(rate: str, hosts: tuple[int, ...]) -> None:
    import namespaces
    import torch.distributed as dist

    if dist.get_rank() in [sum(hosts[:host]) for host in range(len(hosts))]:
        namespaces.limit_rate(rate)
    dist.barrier()


def work(args: argparse.Namespace) -> list[Row]:
    hosts = next(launch.hosts for launch in launches(args) if launch.is_this())
    if args.rate:
        limit_rate(args.rate, hosts)
    cases = ways(args)
    rows: list[Row] = [
        {"what": "step", "hosts": hosts, "times": time_steps(args, cases)},
        {"what": "units", "hosts": hosts, "units": args.units, "times": time_units(args, cases)},
    ]
    if set(hosts) == {hosts[0]} and hosts[0] > 1:
        times = time_reshards(args, cases, hosts[0])
        rows.append({"what": "reshards", "hosts": hosts, "times": times})
    return rows


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    names = [
        name for impl in args.impl for name in ([impl, CALLBACK] if impl == "fsdp_c" else [impl])
    ]
    steps = report.Table(
        "Training step of a GPT over hosts, over the same work without communication (fp32)",
        ["hosts x ranks", "floor", *[f"{name} / floor" for name in names], "goal", "samples"],
        note="The GPT of bench_step.py, 2 x 128 tokens a rank. One machine is all hosts"
        + (f", each of which sends at most {args.rate}." if args.rate else "."),
    )
    units = report.Table(
        f"Host us per unit and step that sharding adds, {args.units} x Linear(16, 16)",
        ["hosts x ranks", "plain", *names, "goal", "pairs"],
        note="Forward and backward, of the slowest rank, as in bench_host_overhead.py.",
    )
    columns = reshards(args.impl)
    gathers = report.Table(
        f"Step of {N_LARGE} x Linear({LARGE}, {LARGE}), by where backward gathers from",
        ["hosts x ranks", *columns, "samples"],
        note="Forward and backward. host: reshard_after_forward=<ranks of a host>.",
    )
    for row in rows:
        where = " + ".join(map(str, row["hosts"]))
        goal = GOALS.get(tuple(row["hosts"]), ("", ""))
        goals = [f"<= {value}" if value else "" for value in goal]
        times = row["times"]
        if row["what"] == "reshards":
            took = [report.duration(times[column]["median_us"]) for column in columns]
            gathers.rows.append([where, *took, str(times[next(iter(columns))]["samples"])])
            continue
        samples = str(times[args.impl[-1]]["samples"])
        if row["what"] == "step":
            floor = times["floor"]["median_us"]
            over = [report.ratio(times[name]["median_us"], floor) for name in names]
            steps.rows.append([where, report.duration(floor), *over, goals[0], samples])
        else:
            added = [report.number(times[name]["median_us"] / row["units"], 0) for name in names]
            plain = report.number(times[args.impl[-1]]["base_us"] / row["units"], 0)
            units.rows.append([where, plain, *added, goals[1], samples])
    return [steps, units, *([gathers] if gathers.rows else [])]


BENCH = Bench("hosts", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
