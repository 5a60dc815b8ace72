"""An estimate as text."""

from __future__ import annotations

from typing import Any

from fsdp_c import _text
from fsdp_c._estimate._measure import HERE
from fsdp_c._estimate._memory import PURPOSES
from fsdp_c._estimate._volume import dtype_name

# What a process takes beside its tensors, by engine.
_NOT_COUNTED = {
    "nccl": "the CUDA context, NCCL's buffers, fragmentation",
    "core": "the interpreter, code and scratch of libraries, what malloc keeps of freed tensors (in"
    " measured runs 2 to 25 % of all the above, 49 % for small convolutions)",
}


def text_of(estimate: Any) -> str:
    lines = [_head(estimate), "", "memory of a rank at the worst moment"]
    for name, n_bytes in estimate.memory.items():
        if n_bytes:
            lines.append(_text.row(name, PURPOSES[name], n_bytes))
    verdict = "fits" if estimate.fits else "does NOT fit"
    limit = _text.bytes_text(estimate.limit)
    lines.append(
        _text.row("in all", f"of {limit}{_shared(estimate.setting)}: {verdict}", estimate.total)
    )
    lines.append(f"  not in it: {_NOT_COUNTED[estimate.setting.hardware.engine]}")
    if estimate.host_memory:
        lines.append(_text.row("on the host", "offloaded", estimate.host_memory))
    if not estimate.fits:
        lines += ["", "cheapest change that makes it fit"]
        lines.append(f"  {estimate.advice or 'none was found'}")
    lines += ["", *_traffic(estimate), "", *_times(estimate)]
    return "\n".join([*lines, *estimate.notes])


def _head(estimate: Any) -> str:
    setting = estimate.setting
    precision = setting.precision if isinstance(setting.precision, str) else "a policy"
    words = [
        f"{type(setting.model).__name__} of {count(estimate.n_parameters)} parameters,"
        f" {estimate.n_units} units",
        _where(setting),
        setting.strategy.name
        + (f" ({setting.n_replicas} x {setting.n_shards})" if setting.strategy.is_hybrid else ""),
        precision,
        ", ".join("x".join(map(str, shape)) for shape in _input_shapes(setting)) + " per rank",
    ]
    if setting.micro_batches > 1:
        words.append(f"{setting.micro_batches} micro-batches")
    if setting.checkpoint:
        words.append("checkpointing")
    if setting.offload:
        words.append("offload")
    return "; ".join(words)


def _where(setting: Any) -> str:
    """What the ranks run on."""
    n, name = setting.world_size, setting.hardware.name
    hosts = -(-n // setting.per_host)
    if name != HERE:
        return f"{n} x {name} on {hosts} host{'s' * (hosts > 1)}"
    ranks = f"{n} CPU rank{'s' * (n > 1)}"
    return f"{ranks} on {f'{hosts} hosts like this one' if hosts > 1 else 'this host'}"


def _shared(setting: Any) -> str:
    """How the memory of a host becomes that of a rank."""
    if setting.hardware.engine != "core" or setting.per_host == 1:
        return ""
    whole = _text.bytes_text(setting.hardware.memory)
    return f", a host's {whole} among the {setting.per_host} ranks on it"


def _input_shapes(setting: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in setting.inputs if hasattr(t, "shape")]


def _traffic(estimate: Any) -> list[str]:
    lines = ["collectives of a rank per step"]
    for one in estimate.traffic:
        lines.append(_text.row(one.kind, f"received by {one.count:,} of them", one.received))
    sent = sum(one.sent for one in estimate.traffic)
    if sent:
        lines.append(_text.row("to other hosts", "sent over rails by all of them", sent))
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
        lines.append(f"  {name:18}{seconds_text(seconds):>14}  {what}".rstrip())
    first = next(t for t in setting.inputs if hasattr(t, "shape"))
    if first.ndim:  # token ids of shape (batch, length), or a batch of whatever else
        is_tokens = first.ndim == 2 and not first.is_floating_point()
        each, word = (first.numel(), "tokens") if is_tokens else (first.shape[0], "samples")
        n = setting.world_size * setting.micro_batches * each
        lines.append(f"  {n:,} {word} per step, {n / times.step:,.0f} per s")
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
