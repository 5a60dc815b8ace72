"""An estimate as text."""

from __future__ import annotations

from typing import Any

from fsdp_c._estimate._hardware import GB
from fsdp_c._estimate._memory import PURPOSES
from fsdp_c._estimate._volume import dtype_name

# What a process takes beside its tensors, by engine.
_NOT_COUNTED = {
    "nccl": "the CUDA context, NCCL's buffers, fragmentation",
    "core": "the interpreter, code and scratch of libraries, what malloc keeps of freed tensors (in"
    " measured runs 2 to 25 % of all the above, 49 % for small convolutions)",
}


def text_of(estimate: Any) -> str:
    lines = [_head(estimate), "", "memory of a rank at the worst moment, GB"]
    for name, n_bytes in estimate.memory.items():
        if n_bytes:
            lines.append(f"  {name:14}{n_bytes / GB:12.3f}  {PURPOSES[name]}")
    verdict = "fits" if estimate.fits else "does NOT fit"
    lines.append(
        f"  {'in all':14}{estimate.total / GB:12.3f}  of {estimate.limit / GB:.1f}: {verdict}"
    )
    lines.append(f"  not in it: {_NOT_COUNTED[estimate.setting.hardware.engine]}")
    if estimate.host_memory:
        lines.append(f"  {'on the host':14}{estimate.host_memory / GB:12.3f}  offloaded")
    if not estimate.fits:
        lines += ["", "cheapest change that makes it fit"]
        lines.append(f"  {estimate.advice or 'none was found'}")
    lines += ["", *_traffic(estimate), "", *_times(estimate)]
    return "\n".join([*lines, *estimate.notes])


def _head(estimate: Any) -> str:
    setting = estimate.setting
    hosts = -(-setting.world_size // setting.per_host)
    precision = setting.precision if isinstance(setting.precision, str) else "a policy"
    words = [
        f"{type(setting.model).__name__} of {count(estimate.n_parameters)} parameters,"
        f" {estimate.n_units} units",
        f"{setting.world_size} x {setting.hardware.name} on {hosts} host{'s' * (hosts > 1)}",
        setting.strategy.name
        + (f" ({setting.n_replicas} x {setting.n_shards})" if setting.strategy.is_hybrid else ""),
        precision,
        "x".join(map(str, _input_shape(setting))) + " per rank",
    ]
    if setting.micro_batches > 1:
        words.append(f"{setting.micro_batches} micro-batches")
    if setting.checkpoint:
        words.append("checkpointing")
    if setting.offload:
        words.append("offload")
    return "; ".join(words)


def _input_shape(setting: Any) -> tuple[int, ...]:
    return next(tuple(t.shape) for t in setting.inputs if hasattr(t, "shape"))


def _traffic(estimate: Any) -> list[str]:
    lines = ["collectives of a rank per step"]
    for one in estimate.traffic:
        lines.append(f"  {one.kind:14}{one.count:12,}  {one.received / GB:,.3f} GB received")
    return lines if estimate.traffic else [*lines, "  none"]


def _times(estimate: Any) -> list[str]:
    times, setting = estimate.times, estimate.setting
    lines = ["time of a step, s"]
    for name, seconds, what in (
        ("compute", times.compute, ""),
        ("optimizer", times.optimizer, ""),
        ("exposed", times.exposed, f"of {seconds_text(times.communication)} communication"),
        ("in all", times.step, _speed(estimate)),
    ):
        lines.append(f"  {name:14}{seconds_text(seconds):>12}  {what}".rstrip())
    if len(_input_shape(setting)) == 2:
        tokens = setting.world_size * setting.micro_batches
        for size in _input_shape(setting):
            tokens *= size
        lines.append(f"  {tokens:,} inputs per step, {tokens / times.step:,.0f} per s")
    return lines


def _speed(estimate: Any) -> str:
    setting = estimate.setting
    rate = estimate.model_flops / estimate.times.step
    dtype = dtype_name(setting.compute) if setting.compute is not None else "float32"
    share = rate / setting.hardware.flops.get(dtype, setting.hardware.flops["float32"])
    return f"{rate / 1e12:,.3g} TFLOP/s per rank without recomputation, {share:.0%} of the peak"


def seconds_text(seconds: float) -> str:
    return f"{seconds:,.3f}" if seconds >= 0.1 else f"{seconds:.3g}"


def count(n: int) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= scale:
            return f"{n / scale:.2f} {letter}"
    return str(n)
