"""Estimates: what they rest on, what they say, what they refuse; no ranks."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Block
from torch import Tensor, nn

import fsdp_c
from fsdp_c._estimate import _models, _stacks, _time, _trace
from fsdp_c._estimate._hardware import HARDWARE

MATRIX = 256 * 256 * 4


def small_gpt(**given: int) -> nn.Module:
    sizes = {"layers": 7, "hidden": 64, "heads": 4, "vocabulary": 101, "sequence": 32} | given
    return _models.build(_models.CONFIGS["gpt"].replaced(**sizes))


def chain(n: int = 8) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(n)))


def segments_of(model: nn.Module, monkeypatch: Any, runs_all: bool, **options: Any) -> _trace.Trace:
    with monkeypatch.context() as patch:
        if runs_all:
            patch.setattr(_stacks, "stacks_of", lambda model: {})
        inputs = (torch.zeros(2, 32, dtype=torch.long, device="meta"),)
        return _trace.trace_step(model, inputs, lambda y: y.sum(), list(model.blocks), **options)


def test_repeated_blocks_are_traced_once(monkeypatch) -> None:
    """The short trace says exactly what a trace of all blocks says."""
    for options in (
        {"rules": _trace.Rules(torch.bfloat16, borrowed_bytes=1 << 20)},
        {"rules": _trace.Rules(keeps_gradients=True)},
    ):
        for checkpointed in (False, True):
            model = small_gpt()
            options["checkpointed"] = list(model.blocks) if checkpointed else []
            short = segments_of(model, monkeypatch, False, **options)
            assert short == segments_of(model, monkeypatch, True, **options)
            assert len(model.blocks) == 7 and all("forward" not in vars(b) for b in model.blocks)
            assert all(p.is_meta and p.grad is None for p in model.parameters())


def test_blocks_that_differ_are_all_traced(monkeypatch) -> None:
    model = small_gpt()
    model.blocks[4].heads = 8
    assert _stacks.stacks_of(model) == {}

    class Odd(nn.Module):
        """Equal blocks that are called differently."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(64, 64) for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x) if i % 2 else block(block(x))
            return x

    with torch.device("meta"):
        odd = Odd()
    x = torch.zeros(3, 64)
    found = _trace.trace_step(odd, (x,), torch.Tensor.sum, [], _trace.Rules())
    assert found.flops == (7 + 4) * 2 * 3 * (2 * 3 * 64 * 64)


class Twins(nn.Linear):
    """Two outputs of one call."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y.sin(), y.cos()


def test_outputs_of_one_call_begin_one_backward() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Twins(64, 32), Twins(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.b(sum(self.a(x))))

    with torch.device("meta"):
        model = Pairs()
    found = _trace.trace_step(
        model, (torch.zeros(3, 64),), torch.Tensor.sum, [model.a, model.b], _trace.Rules()
    )
    for name in "ab":
        assert found.calls("forward", name) == found.calls("backward", name) == 1
    moved = fsdp_c.estimate(
        model, world_size=2, inputs=torch.zeros(3, 64), units=Twins, precision="fp32"
    )
    assert {one.kind: one.count for one in moved.traffic} == {"all-gather": 4, "reduce-scatter": 2}


def test_small_gradients_wait_for_the_next_unit() -> None:
    """Up to a size that of one unit is alive with the next one's: no longer, and no more."""

    def peak(borrowed_bytes: int) -> int:
        model = chain(4)
        rules = _trace.Rules(borrowed_bytes=borrowed_bytes)
        x = torch.zeros(2, 256)
        return _trace.trace_step(model, (x,), torch.Tensor.sum, list(model), rules).peak

    assert peak(MATRIX - 1) == peak(0)
    assert peak(MATRIX) == peak(10 * MATRIX) == peak(0) + MATRIX


def test_flops_and_activations_of_a_chain() -> None:
    """Of products of matrices these are known: 6 per weight and row; the inputs are kept."""
    found = fsdp_c.estimate(
        chain(), world_size=4, inputs=torch.zeros(512, 256), precision="fp32", units=nn.Linear
    )
    assert found.model_flops == 8 * 6 * 512 * 256 * 256 - 2 * 512 * 256 * 256  # x needs no gradient
    row = 512 * 256 * 4
    # All inputs but the first, which is the caller's, the output, and its square's input.
    assert 7 * row <= found.memory["activations"] <= 9 * row
    assert found.memory["parameters"] == found.memory["gradients"] == 8 * MATRIX // 4
    assert found.memory["optimizer"] == 2 * 8 * MATRIX // 4 + 8 * 4
    assert found.n_parameters == 8 * 256 * 256 and found.n_units == 8 and found.fits
    again = fsdp_c.estimate(
        chain(),
        world_size=4,
        inputs=torch.zeros(512, 256),
        precision="fp32",
        units=nn.Linear,
        checkpoint=True,
        micro_batches=3,
    )
    assert again.model_flops == 3 * found.model_flops


def test_strategies_move_what_theory_says() -> None:
    model_bytes = 8 * MATRIX
    make = functools.partial(
        fsdp_c.estimate,
        chain(),
        inputs=torch.zeros(4, 256),
        units=nn.Linear,
        precision="fp32",
        hardware="a100",
    )
    for strategy, expected in (
        ("ddp", {"all-reduce": (8, 2)}),
        ("zero1", {"all-gather": (8, 1), "reduce-scatter": (8, 1)}),
        ("zero2", {"all-gather": (8, 1), "reduce-scatter": (8, 1)}),
        ("zero3", {"all-gather": (16, 2), "reduce-scatter": (8, 1)}),
    ):
        found = make(world_size=4, strategy=strategy)
        got = {one.kind: (one.count, one.received) for one in found.traffic}
        assert got == {k: (n, f * model_bytes * 3 // 4) for k, (n, f) in expected.items()}
        assert (found.memory["parameters"] == model_bytes) == (strategy == "ddp")
    hybrid = make(world_size=16, strategy="hybrid")
    assert [(one.kind, one.received) for one in hybrid.traffic] == [
        ("all-gather", 2 * model_bytes * 7 // 8),
        ("reduce-scatter", model_bytes * 7 // 8),
        ("all-reduce", model_bytes // 8),
    ]
    assert "hybrid (2 x 8)" in str(hybrid)
    # Whole parameters from forward to backward, or only while a unit runs, with one more ahead.
    assert make(world_size=4, strategy="zero2").memory["gather slots"] == model_bytes
    assert make(world_size=4, strategy="zero3").memory["gather slots"] == 2 * MATRIX
    casts = make(world_size=4, strategy="ddp", precision="bf16", units=None)
    assert casts.memory["gather slots"] == model_bytes // 2, "no unit ahead where none is gathered"
    # Gradients of two micro-batches: added up whole, or sent one by one.
    sent = [
        sum(one.received for one in make(world_size=4, strategy=name, micro_batches=2).traffic)
        for name in ("zero1", "zero2", "zero3")
    ]
    assert sent == [n * model_bytes * 3 // 4 for n in (3, 4, 6)]


def test_a_trillion_parameters() -> None:
    model = _models.build(_models.CONFIGS["gpt-1t"])
    found = fsdp_c.estimate(model, world_size=4096, seq=2048, hardware="h100", checkpoint=True)
    assert 1.0e12 < found.n_parameters < 1.02e12
    text = str(found)
    assert "1.01 T parameters" in text and "4096 x h100 on 512 hosts" in text
    # 6 FLOPs per parameter and token, and attention's.
    tokens = 2048
    expected = 6 * found.n_parameters * tokens + 12 * 128 * 25600 * tokens**2
    assert found.model_flops == pytest.approx(expected, rel=0.01)


def test_what_makes_it_fit() -> None:
    """One change if one is enough, in the order of their price; else several."""
    a100 = HARDWARE["a100"]

    def advice(memory: float, **options: Any) -> str:
        hardware = replace(a100, memory=memory)
        given = {"world_size": 8, "precision": "fp32", "batch": 8, "seq": 32} | options
        found = fsdp_c.estimate(small_gpt(), hardware=hardware, **given)
        assert found.fits == (found.advice == ""), found
        return found.advice.partition(":")[0]

    def total(**options: Any) -> int:
        given = {"world_size": 8, "precision": "fp32", "batch": 8, "seq": 32} | options
        return fsdp_c.estimate(small_gpt(), hardware=a100, **given).total

    assert advice(total()) == ""
    assert advice(total() - 1) == "checkpoint=True"
    few = {"strategy": "ddp", "batch": 1, "checkpoint": True}
    assert advice(total(**few) * 0.6, **few).startswith('strategy="zero')
    assert "checkpoint=True + " in advice(total() / 6)
    assert "none was found" in str(
        fsdp_c.estimate(small_gpt(), world_size=8, seq=32, hardware=tiny(a100))
    )


def tiny(hardware: fsdp_c.Hardware) -> fsdp_c.Hardware:
    return replace(hardware, memory=1000)


def test_rings_and_streams() -> None:
    h100 = HARDWARE["h100"]
    ring = _time.ring_seconds
    assert ring(1 << 30, 1, 8, h100) == ring(0, 8, 8, h100) == 0
    large = 64 * 10**9
    assert ring(large, 8, 8, h100) == pytest.approx(large * 7 / 8 / h100.link, rel=0.01)
    # Eight ports of a host carry a share each; one device a host has one port.
    assert ring(large, 16, 8, h100) == pytest.approx(large * 15 / 16 / h100.link, rel=0.01)
    assert ring(large, 2, 1, h100) == pytest.approx(large / 2 / h100.network, rel=0.01)
    assert ring(1, 8, 8, h100) < 15e-6 < ring(1, 1024, 8, h100)
    model = small_gpt(hidden=1024, layers=12)
    times = [
        fsdp_c.estimate(model, world_size=8, seq=32, batch=batch).times for batch in (1, 4, 64)
    ]
    # The same collectives; more work hides more of them, and never all: the ends have no cover.
    assert len({one.communication for one in times}) == 1
    assert times[0].exposed > times[1].exposed > times[2].exposed > 0
    assert all(one.exposed <= one.communication for one in times)
    alone = fsdp_c.estimate(model, world_size=1, seq=32).times
    assert alone.communication == alone.exposed == 0 and alone.step > alone.compute


def test_a_run_on_few_ranks_scales_the_others() -> None:
    """Its step comes out as measured; elsewhere work has that speed, and links have theirs."""
    model = small_gpt(hidden=256)
    core = replace(HARDWARE["a100"], engine="core", per_host=4, cores=2)
    for hardware, strategy, precision in (
        (HARDWARE["a100"], "zero3", "bf16"),
        (HARDWARE["a100"], "hybrid", "fp32"),
        (core, "zero3", "fp32"),
    ):
        make = functools.partial(
            fsdp_c.estimate,
            model,
            seq=32,
            batch=256,
            hardware=hardware,
            strategy=strategy,
            precision=precision,
            shards=8 if strategy == "hybrid" else None,
        )
        few = make(world_size=4, shards=4 if strategy == "hybrid" else None)
        many = make(world_size=32)
        for slower in (0.9, 3.0):
            seconds = few.step_seconds * slower
            again = make(world_size=4, shards=few.setting.shards, measured=(4, seconds))
            assert again.step_seconds == pytest.approx(seconds, rel=1e-6)
            there = make(world_size=32, measured=(4, seconds))
            factor = again.times.compute / few.times.compute
            assert f"work is taken to need {factor:.2f} of the time" in str(there)
            assert there.times.compute == pytest.approx(many.times.compute * factor)
            assert there.times.optimizer == pytest.approx(many.times.optimizer * factor)
            links = factor if hardware is core else 1.0  # the core's copies are work
            rails = sum(one.sent for one in many.traffic) / hardware.network
            assert there.times.communication - rails == pytest.approx(
                (many.times.communication - rails) * links
            )
            assert there.memory == many.memory and there.traffic == many.traffic
    assert "work is taken to need" not in str(many)
    # What makes it fit is priced at the same speed.
    options: dict[str, Any] = {"world_size": 4, "seq": 32, "batch": 8, "precision": "fp32"}
    memory = fsdp_c.estimate(model, **options).total - 1
    options["hardware"] = replace(HARDWARE["a100"], memory=memory)
    plain, slow = (fsdp_c.estimate(model, **options, measured=m) for m in (None, (4, 0.01)))
    assert plain.advice.partition(",")[0] == slow.advice.partition(",")[0]
    assert float(slow.advice.split()[-4]) > 10 * float(plain.advice.split()[-4])
    for wrong in (3, (0, 1.0), (4, -1.0), (4, float("nan")), (True, 1.0), (4, "1 s"), (4.0, 1.0)):
        with pytest.raises(ValueError, match=r"measured=.*: pass the ranks and the seconds"):
            fsdp_c.estimate(model, **options, measured=wrong)
    for wrong in ((4, 1e-9), (4, 1e9)):
        with pytest.raises(
            ValueError, match=r"takes .* and its collectives alone .*: no speed of work"
        ):
            fsdp_c.estimate(model, **options, measured=wrong)


def test_models_as_they_come() -> None:
    """Real parameters are neither read nor changed; hooks, kwargs and ties work."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.blocks = nn.ModuleList(Block(16, 32) for _ in range(5))
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight
            self.blocks[1].up.weight.requires_grad_(False)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, tokens: Tensor, more: Tensor) -> dict[str, Tensor]:
            x = self.embedding(tokens) * self.scale.sum() * more
            for block in self.blocks:
                x = block(x)
            return {"logits": self.head(x)}

    model = Tied()
    before = [(p, p.clone()) for p in model.parameters()]
    found = fsdp_c.estimate(
        model, world_size=2, inputs=(torch.zeros(2, 9, dtype=torch.long), torch.ones(1))
    )
    assert all(
        p is q and torch.equal(p, c) for p, (q, c) in zip(model.parameters(), before, strict=True)
    )
    assert found.memory["parameters"] - 12 == sum(
        -(-p.shape[0] // 2) * (p.numel() // p.shape[0]) * 4 for p in model.parameters()
    )
    assert found.memory["gradients"] < found.memory["parameters"]


def test_mistakes() -> None:
    model = small_gpt()
    good: dict[str, Any] = {"world_size": 8, "seq": 32}
    for options, text in (
        ({"strategy": "zero4"}, "unknown strategy 'zero4'"),
        ({"hardware": "h1000"}, "unknown hardware 'h1000': use one of h100"),
        ({"precision": "int3"}, "precision='int3': use one of fp32"),
        ({"inputs": torch.ones(1)}, "either seq= .* or inputs="),
        ({"seq": None}, "either seq= .* or inputs="),
        ({"world_size": 0}, "world_size=0: pass a whole number, at least 1"),
        ({"world_size": 2.0}, "world_size=2.0: pass a whole number"),
        ({"world_size": True}, "world_size=True: pass a whole number"),
        ({"batch": 0}, "batch=0: pass a whole number"),
        ({"seq": -1}, "seq=-1: pass a whole number"),
        ({"seq": 2.5}, "seq=2.5: pass a whole number"),
        ({"loss": lambda logits: logits}, "cannot be traced .* a loss= that makes one number"),
        (
            {"loss": lambda logits: logits[logits > 0].sum()},
            "depend on data .*nonzero.* fixed sizes",
        ),
        ({"strategy": "hybrid", "shards": 0}, "shards=0: pass a whole number"),
        ({"checkpoint": "Blok"}, "checkpoint='Blok' matches no module"),
        ({"shards": 4}, "for hybrid strategies, not zero3"),
        ({"strategy": "hybrid", "shards": 3}, "do not divide into shard groups of 3"),
        ({"strategy": "ddp", "offload": True}, '"ddp" has no shards'),
        ({"units": "Blok"}, "matches no module"),
        ({"seq": 33}, "GPT cannot be traced on fake tensors"),
    ):
        with pytest.raises(ValueError, match=text):
            fsdp_c.estimate(model, **(good | options))
    with pytest.raises(ValueError, match="no parameter of ReLU requires a gradient"):
        fsdp_c.estimate(nn.ReLU(), world_size=1, inputs=torch.ones(1))
    with pytest.raises(TypeError, match="optimizer=1: pass a class"):
        fsdp_c.estimate(model, **good, optimizer=1)
    with pytest.raises(TypeError, match="expects a module, not int"):
        fsdp_c.estimate(3, **good)
    for options, text in (
        ({"loss": 3}, "loss=3: pass a function"),
        ({"offload": "cpu"}, "offload='cpu': pass True or False"),
        ({"seq": None, "inputs": 3}, "no tensor, but int: pass the tensor"),
        ({"seq": None, "inputs": {"x": torch.ones(1)}}, "no tensor, but dict: pass the tensor"),
    ):
        with pytest.raises(TypeError, match=text):
            fsdp_c.estimate(model, **(good | options))
