"""The cheapest change that makes a model fit: each is tried with the same model of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_c import _text
from fsdp_c._estimate._evaluate import Estimator
from fsdp_c._estimate._result import Estimate
from fsdp_c._estimate._setting import Setting
from fsdp_c._estimate._table import seconds_text
from fsdp_c.strategy import strategy_named

# Twice as many ranks as often as this; past it the answer is another model, or other hardware.
_DOUBLINGS = 10

Variations = Iterator[tuple[str, Setting]]  # with what to write for each


def change_that_fits(setting: Setting, estimator: Estimator) -> str:
    """The first single change that fits, else the shortest beginning of all of them that does."""
    for change in _CHANGES:
        for said, changed in change(setting):
            found = estimator.evaluate(changed)
            if found.fits:
                return _said([said], found)
    words: list[str] = []
    for change in _CHANGES:
        variations = list(change(setting))
        for said, changed in variations:
            found = estimator.evaluate(changed)
            if found.fits:
                return _said([*words, said], found)
        if variations:
            said, setting = variations[-1]
            words.append(said)
    return ""


def _said(words: list[str], found: Estimate) -> str:
    seconds = seconds_text(found.times.step)
    host = f" and {_text.bytes_text(found.host_memory)} on the host" if found.host_memory else ""
    return f"{' + '.join(words)}: {_text.bytes_text(found.total)}{host}, {seconds} s per step"


def _checkpointing(setting: Setting) -> Variations:
    if not setting.checkpoint:
        yield "checkpoint=True", setting.replaced(checkpoint=True)


def _strategy(setting: Setting) -> Variations:
    for name in ("zero2", "zero3"):
        chosen = strategy_named(name)
        if (chosen.is_sharded, chosen.deepspeed_stage, not chosen.is_hybrid) > (
            setting.strategy.is_sharded,
            setting.strategy.deepspeed_stage,
            not setting.strategy.is_hybrid,
        ):
            yield f'strategy="{name}"', setting.replaced(strategy=chosen, shards=None)


def _precision(setting: Setting) -> Variations:
    order = ["fp32", "bf16", "bf16-true"]
    if setting.precision in order:
        for name in order[order.index(setting.precision) + 1 :]:
            yield f'precision="{name}"', setting.replaced(precision=name)


def _offload(setting: Setting) -> Variations:
    may = setting.strategy.is_sharded and setting.hardware.engine != "core"
    if may and not setting.offload:
        yield "offload=True", setting.replaced(offload=True)


def _ranks(setting: Setting) -> Variations:
    if setting.strategy.is_sharded and not setting.strategy.is_hybrid:
        for k in range(1, _DOUBLINGS + 1):
            world = setting.world_size << k
            yield f"world_size={world}", setting.replaced(world_size=world)


def _batch(setting: Setting) -> Variations:
    batch = setting.batch
    while batch > 1:
        batch //= 2
        yield f"batch={batch}", setting.of_batch(batch)


_CHANGES: list[Callable[[Setting], Variations]] = [
    _checkpointing,
    _strategy,
    _precision,
    _offload,
    _ranks,
    _batch,
]
