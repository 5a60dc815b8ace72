"""What the GPU kernels must give, computed by torch on the CPU; one function per kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_kernels import Kernels, Plan, Side

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIRE, UNIT, PARAMS = 0, 1, 2


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; any NaN equals any other."""
    actual, expected = actual.cpu(), expected.cpu()
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    nan = actual.isnan()
    same = (actual.view(integer) == expected.view(integer)) | nan
    return torch.equal(nan, expected.isnan()) and bool(same.all())


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Float64 ones are float32 numbers: torch would round others twice on the way to 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def line(numel: int) -> tuple[int, int, int]:
    return (1, 1, numel)


# ---- casts ----


def any_bits(dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    if dtype in (torch.bfloat16, torch.float16):
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (numel,), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 65504, 65519.99, 65520, 2**-14, 2**-24, 2**-25, 1e-45])
    return torch.cat([values, edges, -edges, values * 0 + torch.randn(numel)]).to(dtype)


def casts(kernels: Kernels) -> None:
    """Every pair of types over all 16-bit patterns, or many 32-bit ones, at several alignments.

    A float64 source holds float32 values: torch rounds others twice, the kernels once.
    """
    for source in FLOATS:
        for to in FLOATS:
            for shift in (0, 1, 3):
                whole = any_bits(source, 40_000).to(kernels.device)
                src = whole[shift:]
                dst = torch.zeros(src.numel() + 8, dtype=to, device=kernels.device)
                plan = kernels.plan()
                plan.add(line(src.numel()), Side(0, to), Side(1, source))
                plan.seal().move([dst[shift:], src])
                expected = torch.zeros(dst.numel(), dtype=to)
                expected[shift : shift + src.numel()] = src.cpu().to(to)
                assert same_bits(dst, expected), (source, to, shift)


# ---- units ----


@dataclass
class Param:
    """[outer, rows, inner], sharded along rows over `ranks`."""

    outer: int
    rows: int
    inner: int
    dtype: torch.dtype
    wire: torch.dtype
    full: torch.Tensor

    def chunks(self, ranks: int) -> list[torch.Tensor]:
        step = -(-self.rows // ranks)
        parts = [self.full[:, r * step : (r + 1) * step] for r in range(ranks)]
        return [part.contiguous() for part in parts]

    def wire_numel(self, ranks: int) -> int:
        return self.outer * -(-self.rows // ranks) * self.inner


def random_unit(rng: random.Random, seed: int) -> list[Param]:
    unit = []
    for i in range(rng.randint(1, 12)):
        outer, rows = rng.choice([1, 1, 1, rng.randint(1, 5)]), rng.randint(1, 40)
        inner = rng.choice([1, 8, 24, 64, rng.randint(1, 300)])
        dtype = rng.choice([*FLOATS, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        wire = rng.choice(FLOATS) if dtype.is_floating_point else dtype
        full = numbers(outer * rows * inner, dtype, seed + i).view(outer, rows, inner)
        unit.append(Param(outer, rows, inner, dtype, wire, full))
    return unit


def places(sizes: list[int]) -> tuple[list[int], int]:
    """64-byte aligned offsets, and their end."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // 64) * 64
    return offsets, end


def add_chunks(
    plan: Plan, param: Param, ranks: int, whole: Side, wire: Side, to_wire: bool
) -> None:
    """All ranks' chunks between the full parameter and the wire: at most two blocks."""
    step = -(-param.rows // ranks)
    even, last = param.rows // step, param.rows % step
    bytes_of = {side: param.inner * side.dtype.itemsize for side in (whole, wire)}
    for first, count, rows in ((0, even, step), (even, 1, last)):
        w = Side(
            whole.base,
            whole.dtype,
            whole.at + first * step * bytes_of[whole],
            param.rows * bytes_of[whole],
            step * bytes_of[whole],
        )
        c = Side(
            wire.base,
            wire.dtype,
            wire.at + first * wire.plane_stride,
            rows * bytes_of[wire],
            wire.plane_stride,
        )
        shape = (count, param.outer, rows * param.inner)
        plan.add(shape, c if to_wire else w, w if to_wire else c)


def view(memory: torch.Tensor, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return memory[at : at + numel * dtype.itemsize].view(dtype)


def gathers(kernels: Kernels) -> None:
    """Packed on every rank, taken apart on one: the full parameters, cast once."""
    for seed in range(12):
        rng = random.Random(seed)
        unit, ranks = random_unit(rng, seed), rng.randint(1, 6)
        at, pack_bytes = places([p.wire_numel(ranks) * p.wire.itemsize for p in unit])
        full_at, full_bytes = places([p.full.numel() * p.wire.itemsize for p in unit])
        packs = torch.zeros(ranks * pack_bytes, dtype=torch.uint8, device=kernels.device)
        unsharded = torch.zeros(full_bytes, dtype=torch.uint8, device=kernels.device)
        for rank in range(ranks):
            plan = kernels.plan()
            shards = [p.chunks(ranks)[rank].to(kernels.device) for p in unit]
            for i, p in enumerate(unit):
                shape = line(shards[i].numel())
                plan.add(shape, Side(WIRE, p.wire, at[i]), Side(PARAMS + i, p.dtype))
            pack = packs[rank * pack_bytes : (rank + 1) * pack_bytes]
            plan.seal().move([pack, None, *shards])
        plan = kernels.plan()
        for i, p in enumerate(unit):
            whole, wire = Side(UNIT, p.wire, full_at[i]), Side(WIRE, p.wire, at[i], 0, pack_bytes)
            add_chunks(plan, p, ranks, whole, wire, to_wire=False)
        plan.seal().move([packs, unsharded])
        for i, p in enumerate(unit):
            got = view(unsharded, full_at[i], p.full.numel(), p.wire)
            assert same_bits(got, p.full.to(p.wire).flatten()), (seed, i, p.dtype, p.wire)


def reductions(kernels: Kernels) -> None:
    """Gradients staged for all ranks; one rank's part scaled and added to what it had."""
    for seed in range(12):
        rng = random.Random(100 + seed)
        unit = [p for p in random_unit(rng, seed) if p.dtype.is_floating_point]
        ranks, missing = rng.randint(1, 6), rng.randrange(len(unit) + 1)
        at, part_bytes = places([p.wire_numel(ranks) * p.wire.itemsize for p in unit])
        parts = torch.ones(ranks * part_bytes, dtype=torch.uint8, device=kernels.device)
        plan = kernels.plan()
        for i, p in enumerate(unit):
            whole = Side(PARAMS + i, p.dtype)
            add_chunks(plan, p, ranks, whole, Side(WIRE, p.wire, at[i], 0, part_bytes), True)
        grads = [None if i == missing else p.full.to(kernels.device) for i, p in enumerate(unit)]
        plan.seal().move([parts, None, *grads])
        rank, divisor, accumulate = rng.randrange(ranks), rng.choice([1, 3, 8]), seed % 2 == 0
        finish_part(kernels, unit, parts[rank * part_bytes :], at, divisor, accumulate, rank, ranks)
        for i, p in enumerate(unit):
            for r, chunk in enumerate(p.chunks(ranks)):
                got = view(parts, r * part_bytes + at[i], chunk.numel(), p.wire)
                want = torch.zeros_like(chunk) if i == missing else chunk
                assert same_bits(got, want.to(p.wire).flatten()), (seed, i, r)


def finish_part(
    kernels: Kernels,
    unit: list[Param],
    part: torch.Tensor,
    at: list[int],
    divisor: int,
    accumulate: bool,
    rank: int,
    ranks: int,
) -> None:
    plan = kernels.plan()
    sizes = [p.chunks(ranks)[rank].numel() for p in unit]
    olds = [numbers(size, p.dtype, size) for size, p in zip(sizes, unit, strict=True)]
    for i, p in enumerate(unit):
        plan.add(line(sizes[i]), Side(PARAMS + i, p.dtype), Side(WIRE, p.wire, at[i]))
    grads = [old.clone().to(kernels.device) for old in olds]
    plan.seal().finish([part, part, *grads], divisor, accumulate)
    for i, p in enumerate(unit):
        wide = torch.float64 if torch.float64 in (p.dtype, p.wire) else torch.float32
        sent = view(part, at[i], sizes[i], p.wire).cpu().to(wide)
        total = sent / divisor
        total = olds[i].to(wide) + total if accumulate else total
        if wide is torch.float64 and p.dtype in (torch.bfloat16, torch.float16):
            assert torch.allclose(grads[i].cpu().to(wide), total, rtol=2**-7, atol=2**-7)
        else:
            assert same_bits(grads[i], total.to(p.dtype)), (i, p.dtype, p.wire, accumulate)


# ---- optimizers and norms ----


def squares(kernels: Kernels) -> None:
    for dtype in FLOATS:
        tensors = [numbers(n, dtype, n + 1) for n in (1, 7, 512, 513, 5_000, 70_001)]
        placed = [t.to(kernels.device) for t in tensors]
        plan = kernels.plan()
        for i, t in enumerate(tensors):
            plan.add_flat(dtype, t.numel(), [i])
        plan.seal()
        sums = plan.sum_squares(placed, len(tensors)).cpu()
        expected = torch.stack([t.double().square().sum() for t in tensors])
        bound = (
            1e-12 if dtype is torch.float64 else 2e-6
        )  # a lane adds some floats, all else double
        assert torch.allclose(sums, expected, rtol=bound, atol=0), dtype
        assert torch.equal(sums, plan.sum_squares(placed, len(tensors)).cpu())


def adam_differences(kernels: Kernels, decoupled: bool) -> Iterator[tuple[str, int, float]]:
    """Three steps beside torch's foreach optimizer: elements with other bits, largest error."""
    sizes = (1, 5, 512, 4_099, 30_000)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = [torch.nn.Parameter(numbers(n, torch.float32, n).to(kernels.device)) for n in sizes]
    options = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = kind(theirs, foreach=True, **options)
    ours = [p.detach().clone() for p in theirs]
    firsts, seconds = ([torch.zeros_like(p) for p in ours] for _ in range(2))
    plan = kernels.plan()
    for i, n in enumerate(sizes):
        plan.add_flat(torch.float32, n, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
    plan.seal()
    for step in range(1, 4):
        grads = [numbers(n, torch.float32, n + step).to(kernels.device) for n in sizes]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        optimizer.step()
        rows = zip(ours, grads, firsts, seconds, strict=True)
        plan.adam([t for row in rows for t in row], step, [0.01, 0.9, 0.95, 1e-8, 0.1, decoupled])
    for i, p in enumerate(theirs):
        pairs = {"param": (ours[i], p), "exp_avg": (firsts[i], optimizer.state[p]["exp_avg"])}
        pairs["exp_avg_sq"] = (seconds[i], optimizer.state[p]["exp_avg_sq"])
        for name, (mine, other) in pairs.items():
            other = other.detach()
            yield name, int((mine != other).sum()), float((mine - other).abs().max())


def adam(kernels: Kernels) -> None:
    """Close to torch's on any device; on GPUs the same bits are meant, and counted."""
    different = 0
    for decoupled in (True, False):
        for name, count, error in adam_differences(kernels, decoupled):
            assert error <= 2e-6, (name, decoupled, error)
            different += count
    if kernels.device.type == "cuda":
        print(f"  Adam and AdamW beside torch's foreach: {different} elements with other bits")


def many_parameters(kernels: Kernels) -> None:
    """More than one launch can carry addresses for."""
    n = 1_500
    sources = [numbers(1 + i % 70, torch.float32, i).to(kernels.device) for i in range(n)]
    at, end = places([s.numel() * 4 for s in sources])
    dst = torch.zeros(end // 4, device=kernels.device)
    plan = kernels.plan()
    for i, s in enumerate(sources):
        plan.add(line(s.numel()), Side(0, torch.float32, at[i]), Side(1 + i, torch.float32))
    plan.seal().move([dst, *sources])
    for i, s in enumerate(sources):
        assert torch.equal(dst[at[i] // 4 : at[i] // 4 + s.numel()], s), i


def long_stretches(kernels: Kernels) -> None:
    """So many tiles that a warp does several, of one parameter or of two."""
    sizes = [3_000_001, 5, 700_000, 1_024, 40_003]
    sources = [numbers(n, torch.float32, n).to(kernels.device) for n in sizes]
    at, end = places([n * 2 for n in sizes])
    dst = torch.zeros(end // 2, dtype=torch.bfloat16, device=kernels.device)
    pack, norm = kernels.plan(), kernels.plan()
    for i, n in enumerate(sizes):
        pack.add(line(n), Side(0, torch.bfloat16, at[i]), Side(1 + i, torch.float32))
        norm.add_flat(torch.float32, n, [i])
    pack.seal().move([dst, *sources])
    sums = norm.seal().sum_squares(sources, len(sizes)).cpu()
    for i, source in enumerate(sources):
        got = dst[at[i] // 2 : at[i] // 2 + sizes[i]]
        assert same_bits(got, source.to(torch.bfloat16)), i
        expected = float(source.double().square().sum())
        assert abs(float(sums[i]) - expected) <= 2e-6 * expected, i


def capture(kernels: Kernels) -> None:
    """A launch in a CUDA graph, replayed over other contents; nothing to do without a GPU."""
    if kernels.device.type != "cuda":
        return
    src, dst = (torch.zeros(5_000, device=kernels.device) for _ in range(2))
    plan = kernels.plan()
    plan.add(line(5_000), Side(0, torch.float32), Side(1, torch.float32))
    plan.seal()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.move([dst, src])
    src.copy_(numbers(5_000, torch.float32, 1))
    graph.replay()
    assert torch.equal(src, dst)


CASES: list[Callable[[Kernels], None]] = [
    casts,
    gathers,
    reductions,
    squares,
    adam,
    many_parameters,
    long_stretches,
    capture,
]
