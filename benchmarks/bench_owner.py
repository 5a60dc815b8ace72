"""Whole matrices at one owner each, against gathering all of them everywhere; and a step of Muon.

The simple way calls `full_tensor()` on every sharded matrix, on every rank, and keeps this rank's
rows of the results. `memcpy` copies once, on every rank at the same time, the bytes that it
receives and does not have: the memory bandwidth that a gather to owners is bound by.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from pathlib import Path
from typing import Any

import measuring
import report
from measuring import Bench, Case, Launch, Row

MUON = Path(__file__).resolve().parent.parent / "examples" / "06_muon.py"
LEARNING_RATE = 1e-3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=measuring.int_list, default=[2])
    parser.add_argument("--layers", type=int, help="of a GPT, four matrices each; default 4")
    parser.add_argument("--width", type=int, help="default 512")
    parser.add_argument("--rounds", type=int, default=12, help="most rounds of each case")


def launches(args: argparse.Namespace) -> list[Launch]:
    return [Launch(ranks) for ranks in args.ranks]


def model_of(layers: int, width: int) -> Any:
    """The matrices of a GPT's blocks, sharded, with gradients."""
    import torch
    from torch import nn

    import fsdp_c

    torch.manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    model = nn.ParameterList(
        nn.Parameter(torch.randn(shape) * 0.02) for _ in range(layers) for shape in shapes
    )
    fsdp_c.fully_shard(model)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().normal_(0, 1e-3, generator=generator)
    return model


def owned_muon(parameters: list[Any]) -> Any:
    """The step of the example."""
    spec = importlib.util.spec_from_file_location("example_muon", MUON)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.OwnedMuon(parameters, lr=LEARNING_RATE).step


def simple_muon(parameters: list[Any]) -> Any:
    """Every rank gathers and steps every matrix."""
    import torch
    from torch import nn

    wholes = [nn.Parameter(parameter.full_tensor().clone()) for parameter in parameters]
    optimizer = torch.optim.Muon(wholes, lr=LEARNING_RATE)

    def step() -> None:
        for parameter, whole in zip(parameters, wholes, strict=True):
            whole.grad = parameter.grad.full_tensor()
        optimizer.step()
        take_rows(parameters, wholes)

    return step


def take_rows(parameters: list[Any], wholes: list[Any]) -> None:
    import torch.distributed as dist

    for parameter, whole in zip(parameters, wholes, strict=True):
        rows = whole.detach().chunk(dist.get_world_size())[dist.get_rank()]
        parameter.to_local().detach().copy_(rows)


def to_owner(parameters: list[Any]) -> None:
    import fsdp_c

    fsdp_c.gather_to_owner(parameters)


def to_owner_again(parameters: list[Any]) -> Any:
    """The same in the memory of the time before, as a training loop does it."""
    import fsdp_c

    owned = fsdp_c.gather_to_owner(parameters)
    return functools.partial(fsdp_c.gather_to_owner, parameters, into=owned)


def there_and_back(parameters: list[Any]) -> None:
    import fsdp_c

    fsdp_c.scatter_from_owner(fsdp_c.gather_to_owner(parameters))


def everywhere(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.full_tensor()


def everywhere_and_back(parameters: list[Any]) -> None:
    take_rows(parameters, [parameter.full_tensor() for parameter in parameters])


def copy_case(numel: int) -> Case:
    import torch

    source, target = torch.ones(numel), torch.zeros(numel)
    return Case(functools.partial(target.copy_, source))


def verify(layers: int, width: int) -> None:
    """Gathered tensors are full_tensor()'s, and both ways of Muon leave the same weights."""
    import fsdp_c

    model = model_of(layers, width)
    before = [parameter.to_local().detach().clone() for parameter in model]
    owned = fsdp_c.gather_to_owner(list(model))
    wholes = [parameter.full_tensor() for parameter in model]
    for index, whole in owned.items():
        measuring.same("gather_to_owner", whole, wholes[index], rtol=0, atol=0)
    fsdp_c.scatter_from_owner(owned)
    measuring.same("scatter_from_owner", [p.to_local() for p in model], before, rtol=0, atol=0)
    other = model_of(layers, width)
    owned_muon(list(model))()
    simple_muon(list(other))()
    measuring.same("Muon", list(model), list(other))


def work(args: argparse.Namespace) -> list[Row]:
    import torch
    import torch.distributed as dist

    layers = args.layers or (1 if args.quick else 4)
    width = args.width or (256 if args.quick else 512)
    verify(1, min(width, 128))
    ranks = dist.get_world_size()
    models = [model_of(layers, width) for _ in range(3)]
    parameters, same, others = (list(model) for model in models)
    numel = sum(parameter.numel() for parameter in parameters)
    # Of the whole tensors that a rank owns, it has its own rows.
    arriving = numel * (ranks - 1) // ranks // ranks
    groups = {
        "gather": {
            "memcpy": copy_case(arriving),
            "simple": Case(functools.partial(everywhere, parameters)),
            "owner": Case(functools.partial(to_owner, parameters)),
        },
        "gather, into": {
            "memcpy": copy_case(arriving),
            "simple": Case(functools.partial(everywhere, parameters)),
            "owner": Case(to_owner_again(parameters)),
        },
        "gather and scatter": {
            "memcpy": copy_case(2 * arriving),
            "simple": Case(functools.partial(everywhere_and_back, parameters)),
            "owner": Case(functools.partial(there_and_back, parameters)),
        },
        "Muon step": {
            "adamw": Case(torch.optim.AdamW(others, lr=LEARNING_RATE).step),
            "simple": Case(simple_muon(same)),
            "owner": Case(owned_muon(parameters)),
        },
    }
    rows: list[Row] = []
    for name, cases in groups.items():
        times = measuring.measure(cases, args.rounds, budget_s=5 if args.quick else 20)
        facts = {"row": name, "ranks": ranks, "matrices": len(parameters), "bytes": 4 * numel}
        rows.append({**facts, "times": times})
    return rows


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    first = rows[0]
    table = report.Table(
        f"{first['matrices']} matrices, {report.size_text(first['bytes'])} of fp32 in all, median",
        ["call", "ranks", "memcpy", "AdamW", "full_tensor", "owner", "full_tensor / owner"]
        + ["owner / memcpy", "owner / AdamW", "min", "p90"],
        note="full_tensor: every matrix on every rank. owner: gather_to_owner, scatter_from_owner;"
        " into: memory of an earlier gather is used again. memcpy: what arrives at a rank,"
        " copied once. AdamW: its step of the same shards. min,"
        " p90: of owner.",
    )
    for row in rows:
        times = {name: values["median_us"] for name, values in row["times"].items()}
        table.rows.append(
            [row["row"], str(row["ranks"])]
            + [report.duration(times.get(name)) for name in ("memcpy", "adamw", "simple", "owner")]
            + [report.ratio(times["simple"], times["owner"])]
            + [report.ratio(times["owner"], times.get(name)) for name in ("memcpy", "adamw")]
            + [report.duration(row["times"]["owner"][key]) for key in ("min_us", "p90_us")]
        )
    return [table]


BENCH = Bench("owner", __file__, __doc__ or "", launches, work, tables, arguments=arguments)

if __name__ == "__main__":
    measuring.main(BENCH)
