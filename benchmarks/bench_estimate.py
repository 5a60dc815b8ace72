"""Estimates made before a run against the run: memory, bytes of collectives, time of a step.

Each model is estimated on the meta device and then trained on 1 to 4 ranks. Memory is compared
with what was counted in the run: what `stats` says is held between two steps, and the most that
torch's allocator had lent out during one. The peak of the process (PSS) above the same process
without a model stands beside it: it has what malloc keeps of freed tensors, and libraries' code.
Times are estimated with rates that are measured on the spot, before the model is made, and with a
step on 2 ranks as `measured=`; what it then says of 3 and 4 ranks, which take turns on 2 cores, is
compared.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import measuring
import report
from bench_memory import Sampler
from measuring import Bench, Launch, Row

MIB = 1 << 20
MEASURED_ON = 2
# Of `Hardware`, what a rank measures.
RATES = ("flops", "bandwidth", "per_op")
# Estimated over counted bytes; that a run moves exactly what was estimated has no tolerance.
MEMORY_TOLERANCE = 0.03


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=measuring.int_list, help="default: 1 to 4; of variants 2 or 4"
    )
    parser.add_argument("--models", type=measuring.name_list, default=[*MODELS, *VARIANTS])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=int, default=4, help="of widths; 1 is tiny")
    parser.add_argument("--model", help=argparse.SUPPRESS)


def launches(args: argparse.Namespace) -> list[Launch]:
    return [
        Launch(ranks, ["--model", name])
        for name in args.models
        for ranks in args.ranks or worlds(name)
    ]


def worlds(name: str) -> list[int]:
    if name in MODELS:
        return [1, 2, 3, 4]
    return [4] if "hybrid" in name else [2]


# ---- models: a function of the scale gives the module, its inputs on the meta device, options ----


def gpt(scale: int) -> tuple[Any, Any, Row]:
    import torch

    from fsdp_c._estimate import _models

    sizes = {"layers": 6, "hidden": 128 * scale, "heads": 8, "vocabulary": 2048 * scale}
    model = _models.build(_models.CONFIGS["gpt"].replaced(**sizes, sequence=128))
    return model, torch.empty(2 * scale, 128, dtype=torch.long, device="meta"), {}


def gpt_frozen(scale: int) -> tuple[Any, Any, Row]:
    """The embedding and half of the blocks do not learn."""
    model, tokens, options = gpt(scale)
    for part in (model.embedding, *model.blocks[:3]):
        part.requires_grad_(False)
    return model, tokens, options


def gpt_checkpointed(scale: int) -> tuple[Any, Any, Row]:
    model, tokens, _ = gpt(scale)
    return model, tokens, {"checkpoint": True}


def gpt_tied(scale: int) -> tuple[Any, Any, Row]:
    model, tokens, options = gpt(scale)
    model.head.weight = model.embedding.weight
    return model, tokens, options


def gpt_with(options: Row, scale: int) -> tuple[Any, Any, Row]:
    model, tokens, _ = gpt(scale)
    return model, tokens, options


def mlp(scale: int) -> tuple[Any, Any, Row]:
    import torch
    from torch import nn

    width = 512 * scale
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(5)
        ]
        return nn.Sequential(*blocks), torch.empty(64 * scale, width), {}


def convolutions(scale: int) -> tuple[Any, Any, Row]:
    import torch
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

    width = 16 * scale
    with torch.device("meta"):
        widths = [3, width, width, 2 * width, 2 * width, 4 * width]
        pairs = zip(widths, widths[1:], strict=False)
        model = nn.Sequential(*(block(*pair) for pair in pairs))
        return model, torch.empty(2 * scale, 3, 8 * scale, 8 * scale), {}


MODELS = {
    "gpt": gpt,
    "gpt_frozen": gpt_frozen,
    "gpt_checkpointed": gpt_checkpointed,
    "mlp": mlp,
    "convolutions": convolutions,
}
# Of the GPT, where its kind alone would tell nothing about time.
VARIANTS = {
    "gpt_tied": gpt_tied,
    **{
        f"gpt_{name}": functools.partial(gpt_with, {"strategy": name})
        for name in ("ddp", "zero1", "zero2", "hybrid", "hybrid_zero2")
    },
    "gpt_bf16": functools.partial(gpt_with, {"precision": "bf16"}),
    "gpt_zero2_bf16": functools.partial(gpt_with, {"strategy": "zero2", "precision": "bf16"}),
}


# ---- a rank ----


def host(ranks: int) -> Any:
    """What an estimate of this machine needs for memory; its rates are placeholders."""
    import fsdp_c

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return fsdp_c.Hardware(
        "this host",
        engine="core",
        memory=memory,
        flops={"float32": 1e11},
        bandwidth=1e10,
        per_host=ranks,
        link=1e10,
        link_kind="memory",
        network=1e9,
        host_link=1e10,
        cores=len(os.sched_getaffinity(0)),
    )


@functools.cache
def estimated(name: str, ranks: int, scale: int) -> Any:
    import torch

    import fsdp_c

    model, inputs, options = made(name, scale)
    shards = {"shards": ranks // 2} if "hybrid" in options["strategy"] else {}
    return fsdp_c.estimate(
        model,
        world_size=ranks,
        hardware=host(ranks),
        inputs=inputs,
        loss=loss_of(inputs),
        optimizer=torch.optim.AdamW,
        **options,
        **shards,
    )


def made(name: str, scale: int) -> tuple[Any, Any, Row]:
    model, inputs, options = (MODELS | VARIANTS)[name](scale)
    return model, inputs, {"strategy": "zero3", "precision": "fp32"} | options


def loss_of(inputs: Any) -> Any:
    from fsdp_c._estimate import _setting

    return _setting.square_loss if inputs.is_floating_point() else _setting.token_loss


def trained(name: str, scale: int, n_steps: int, sampler: Sampler | None = None) -> Row:
    """Trains the model for some steps; what was held, moved and how long the steps took."""
    import torch
    import torch.distributed as dist

    import fsdp_c

    model, inputs, options = made(name, scale)
    if "hybrid" in options["strategy"]:
        options["mesh"] = (2, dist.get_world_size() // 2)
    fsdp_c.shard(model, **options)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)
    is_tokens = not inputs.is_floating_point()
    data = torch.zeros(inputs.shape, dtype=inputs.dtype) if is_tokens else torch.randn(inputs.shape)
    loss = loss_of(inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def forward_backward() -> None:
        optimizer.zero_grad()
        loss(model(data)).backward()

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        forward_backward()
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    step()
    before = fsdp_c.stats(model).traffic_total
    step()
    held = fsdp_c.stats(model, optimizer)
    moved = held.traffic_total - before
    peak = (0.0, 0)
    if sampler is not None:
        peak = sampler.peak()
        sampler.close()  # it takes time from the ranks, and locks their memory as it looks
        dist.barrier()
    seconds = [step() for _ in range(n_steps)]
    return {
        "held": held.rank,
        "lent": most_lent(forward_backward) if sampler is not None else 0,
        "traffic": {
            "all-gather": moved.gathered,
            "reduce-scatter": moved.reduced,
            "all-reduce": moved.all_reduced,
        },
        "messages": moved.gathers + moved.reductions + moved.all_reductions,
        "peak_mib": peak[0],
        "samples": peak[1],
        "seconds": min(seconds, default=0.0),
    }


def most_lent(step: Callable[[], None]) -> int:
    """Bytes of tensors that a step makes, at the moment when most of them live."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = most = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        live += n_bytes
        most = max(most, live)
    return most


def work(args: argparse.Namespace) -> list[Row]:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    rates = own_rates()
    trained(args.model, 1, 0)  # loads code and makes pools, which are not what is measured
    sampler = Sampler(0.002)
    sampler.peak()
    empty, _ = sampler.peak()
    found = trained(args.model, args.scale, args.steps, sampler)
    found["peak_mib"] -= empty
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    row = {"model": args.model, "ranks": ranks, "scale": args.scale, "rates": rates}
    return [row | {"by_rank": gathered}]


def own_rates() -> Row:
    """What one rank alone reaches."""
    import torch.distributed as dist

    from fsdp_c._estimate import _measure

    rates = asdict(_measure.this_host()) if dist.get_rank() == 0 else {}
    dist.barrier()
    return {name: rates[name] for name in RATES if rates}


# ---- tables ----


def held(estimate: Any) -> dict[str, int]:
    purposes = [name for name in estimate.memory if name not in ("activations", "in backward")]
    return {name: estimate.memory[name] for name in purposes}


def counted_bytes(row: Row) -> tuple[int, int]:
    """Between two steps, and on top within one; of the rank that has most."""
    parts = [(sum(one["held"].values()), one["lent"]) for one in row["by_rank"]]
    return max(parts, key=sum)


def memory_row(row: Row) -> list[str]:
    estimate = estimated(row["model"], row["ranks"], row["scale"])
    first = row["by_rank"][0]
    between, lent = counted_bytes(row)
    peak = max(one["peak_mib"] for one in row["by_rank"])
    planned = sum(held(estimate).values())
    received = {one.kind: one.received for one in estimate.traffic}
    counted = {kind: n for kind, n in first["traffic"].items() if n}
    messages = sum(one.count for one in estimate.traffic)
    exact = received == counted and messages == first["messages"]
    return [
        row["model"],
        str(row["ranks"]),
        report.number(planned / MIB),
        report.number(between / MIB),
        report.number((estimate.total - planned) / MIB),
        report.number(lent / MIB),
        report.ratio(estimate.total, between + lent, 3),
        report.number(peak),
        report.ratio(peak * MIB, between + lent, 3),
        report.number(sum(counted.values()) / MIB),
        "equal" if exact else f"{sum(received.values()) / MIB:.3f}",
    ]


def step_seconds(row: Row, near: Row, measured: tuple[int, float] | None = None) -> float:
    """Of a row's model and ranks, with the rates of another row."""
    import fsdp_c

    setting = estimated(row["model"], row["ranks"], row["scale"]).setting
    model, inputs, options = made(row["model"], row["scale"])
    found = fsdp_c.estimate(
        model,
        world_size=row["ranks"],
        hardware=replace(
            setting.hardware, per_host=max(row["ranks"], MEASURED_ON), **near["rates"]
        ),
        inputs=inputs,
        loss=setting.loss,
        optimizer=setting.optimizer,
        measured=measured,
        **options,
    )
    return found.step_seconds


def time_table(rows: list[Row]) -> report.Table | None:
    on = {row["model"]: row for row in rows if row["ranks"] == MEASURED_ON}
    timed = [row for row in rows if row["model"] in on and row["ranks"] >= MEASURED_ON]
    if not timed:
        return None
    table = report.Table(
        "Time of a step, seconds, estimated for 2 ranks and more from rates, and from a run on 2",
        ["model", "ranks", "measured", "from rates", "over measured", "from a run on 2"]
        + ["over measured"],
        note="from rates: those that a rank measured alone before it made the model. from a run on"
        " 2: the same with measured=(2, seconds). measured: fastest step of the slowest rank."
        " Ranks beyond the cores take turns.",
    )
    for row in timed:
        near = on[row["model"]]
        from_rates, from_run = step_seconds(row, near), None
        if row is not near:
            from_run = step_seconds(row, near, (MEASURED_ON, took(near)))
        table.rows.append(
            [row["model"], str(row["ranks"]), report.number(took(row), 3)]
            + [report.number(from_rates, 3), report.ratio(from_rates, took(row))]
            + [report.number(from_run, 3), report.ratio(from_run, took(row))]
        )
    return table


def took(row: Row) -> float:
    return max(one["seconds"] for one in row["by_rank"])


def tables(args: argparse.Namespace, rows: list[Row]) -> list[report.Table]:
    table = report.Table(
        "Memory of a rank, MiB, and bytes that collectives bring it in a step, MiB",
        ["model", "ranks", "held, estimated", "counted", "in a step, estimated", "counted"]
        + ["estimated / counted", "peak PSS", "PSS / counted", "received", "estimated"],
        note="held: between two steps, with gradients; counted by stats. in a step: activations, "
        "whole gradients and temporaries on top, at the worst moment; counted by torch's allocator."
        " PSS: above the same process before the model was made; beyond what was counted it has "
        "what malloc keeps of freed tensors, and code. received: by the core's own count; equal: "
        "the estimate has the same bytes and messages.",
    )
    table.rows = [memory_row(row) for row in rows]
    times = time_table(rows)
    return [table] if times is None else [table, times]


def check(rows: list[Row]) -> None:
    for row in rows:
        estimate = estimated(row["model"], row["ranks"], row["scale"])
        received = {one.kind: one.received for one in estimate.traffic}
        counted = {kind: n for kind, n in row["by_rank"][0]["traffic"].items() if n}
        ratio = estimate.total / sum(counted_bytes(row))
        if abs(ratio - 1) > MEMORY_TOLERANCE:
            raise measuring.VerificationError(
                f"verification failed: {row['model']} on {row['ranks']} ranks: estimated memory is"
                f" {ratio:.3f} of what the run had"
            )
        if received != counted:
            raise measuring.VerificationError(
                f"verification failed: {row['model']} on {row['ranks']} ranks: collectives brought"
                f" {counted}, estimated were {received}"
            )


BENCH = Bench("estimate", __file__, __doc__ or "", launches, work, tables, arguments, check)

if __name__ == "__main__":
    measuring.main(BENCH)
