"""Host time that each feature of fully_shard adds to a step, per unit, and what runs it.

The figure is (sharded step - step of the same model without sharding) / units, forward + backward.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import feature_cases
import measuring
import report
from feature_cases import CASES, Feature
from measuring import Bench, Case, Launch, Row


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=measuring.name_list, help=f"of {', '.join(CASES)}")
    parser.add_argument("--units", type=int, default=40, help="default 40")
    parser.add_argument("--pairs", type=int, help="most pairs of blocks, per row")
    parser.add_argument("--budget-s", type=float, help="of each implementation, per row")


def launches(args: argparse.Namespace) -> list[Launch]:
    """One for each number of ranks and environment: transports are chosen once per process."""
    unknown = set(args.only or []) - set(CASES)
    if unknown:
        raise RuntimeError(f"no feature is called {', '.join(sorted(unknown))}: {list(CASES)}")
    together: dict[tuple[int, str, tuple[str, ...]], list[str]] = {}
    for name in args.only or CASES:
        feature, impls = CASES[name], tuple(args.impl)
        for some in [(impl,) for impl in impls] if feature.apart else [impls]:
            together.setdefault((feature.ranks, feature.transport, some), []).append(name)
    return [
        Launch(ranks, ["--only", ",".join(found), "--impl", ",".join(impls)])
        for (ranks, _, impls), found in together.items()
    ]


def work(args: argparse.Namespace) -> list[Row]:
    apis = measuring.implementations(args.impl)
    rows = []
    for name in args.only:
        feature = CASES[name]
        if feature.transport:
            os.environ["FSDP_C_TRANSPORT"] = feature.transport
        if reason := feature.missing():
            rows.append({"feature": name, "missing": reason, "units": args.units, "times": {}})
        else:
            rows.append(measure(feature, apis, args) | {"feature": name})
    return rows


def measure(feature: Feature, apis: dict[str, Any], args: argparse.Namespace) -> Row:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + feature.data_rank())
    x = torch.randn(4, feature_cases.WIDTH, requires_grad=True)
    plain = feature.plain(args.units)
    models = {name: feature.sharded(api, args.units) for name, api in apis.items()}
    for name, model in models.items():
        with feature.first():
            model(x).sum().backward()
        verify(name, feature, model, x, args.units)
    cases = {name: case(feature, model, x) for name, model in models.items()}
    if feature.calls:
        cases["calls"] = case(feature, feature.calling(args.units), x)
    budget_s = args.budget_s or (1 if args.quick else 6)
    pairs = args.pairs or (4 if args.quick else 200)
    times = measuring.measure_added(case(feature, plain, x), cases, budget_s, 0.05, pairs)
    ran_on = {
        name: api.explain(models[name]).units[0].road
        for name, api in apis.items()
        if hasattr(api, "explain")
    }
    return {"units": args.units, "ranks": dist.get_world_size(), "times": times, "ran on": ran_on}


def case(feature: Feature, model: Any, x: Any) -> Case:
    parameters = list(model.parameters())

    def before() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    def step() -> None:
        with feature.around():
            model(x).sum().backward()

    return Case(step, before)


def verify(name: str, feature: Feature, model: Any, x: Any, n_units: int) -> None:
    """Outputs, gradients and the parameters' effect over steps, against the model unsharded."""
    import torch
    import torch.distributed as dist

    plain, ranks = feature.plain(n_units), dist.get_world_size(feature.data_group())
    for step in range(2):
        found = []
        for one in (plain, model):
            run = case(feature, one, x)
            run.before()
            with feature.around():
                out = one(x)
                out.sum().backward()
            found.append((out.detach(), x.grad))
        for parameter in plain.parameters():
            gradient = measuring.local(parameter.grad)
            dist.all_reduce(gradient, group=feature.data_group())
            gradient /= ranks
        gradients = [[whole(p.grad) for p in one.parameters()] for one in (plain, model)]
        for what, want, got in (
            ("output", found[0][:1], found[1][:1]),
            ("input's gradient", found[0][1:], found[1][1:]),
            ("gradients", *gradients),
        ):
            near(f"{name}, step {step}, {what}", got, want, feature.tolerance)
        with torch.no_grad():
            for one in (plain, model):
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
        dist.barrier()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def near(what: str, got: Any, want: Any, tolerance: float) -> None:
    """Tensors differ by no more than a part of the largest value."""
    with measuring.verifying(what):
        for mine, other in zip(got, want, strict=True):
            error = (mine.float() - other.float()).abs().max().item()
            largest = other.float().abs().max().item()
            # Where every gradient below is near zero, so are roundings of it.
            if not error <= tolerance * largest + 1e-12:
                raise AssertionError(f"off by {error:.2g}, the largest value is {largest:.2g}")


def per_unit(row: Row, name: str, statistic: str = "median_us") -> float | None:
    return row["times"][name][statistic] / row["units"] if name in row["times"] else None


def joined(rows: list[Row]) -> list[Row]:
    """One row for each feature, whose implementations may have run apart."""
    found: dict[str, Row] = {}
    for row in rows:
        one = found.setdefault(row["feature"], row | {"times": {}, "ran on": {}})
        one["times"].update(row["times"])
        one["ran on"].update(row.get("ran on", {}))
    return list(found.values())


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    last = args.impl[-1]
    table = report.Table(
        f"Host us per unit and step over the same model without sharding, {args.units} x "
        "Linear(16, 16), forward + backward",
        ["feature", "ranks", "plain", "calls", *args.impl, "to reach", "p10", "p90", "pairs"]
        + ["runs on"],
        note="plain: us per unit of the model without sharding (with tensor parallelism or DTensors"
        " where the feature needs them). calls: us per unit of that model with the calls of the"
        " process group that the feature makes, of units' sizes, and nothing else. p10, p90, pairs,"
        f" runs on: of {last}.",
    )
    for row in joined(rows):
        feature = CASES[row["feature"]]
        if "missing" in row:
            cells = ["-"] * (len(args.impl) + 2) + [feature.goal, "-", "-", "-", row["missing"]]
        else:
            cells = [report.number(per_unit(row, last, "base_us"))]
            cells += [report.number(per_unit(row, name)) for name in ("calls", *args.impl)]
            cells += [feature.goal]
            cells += [report.number(per_unit(row, last, key)) for key in ("p10_us", "p90_us")]
            cells += [str(row["times"][last]["samples"]), row["ran on"].get(last, "-")]
        table.rows.append([feature.title, str(feature.ranks), *cells])
    return [table]


BENCH = Bench("features", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
