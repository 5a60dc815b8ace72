"""GPU kernels against torch's copies, over few large and many small parameters.

Bytes are those that have to be read and written. Nothing that a launch uses, tables of plans
included, is in the L2 when it begins: launches go round several sets of buffers, torch's too.
`--emulate` runs the program on the host over tiny units: the figures mean nothing then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import torch  # noqa: E402
from gpu_kernels import LIBRARY, Kernels, Plan, Side, build_helper  # noqa: E402
from gpu_rows import Rows  # noqa: E402

RANKS = 8
ROUNDS = 20
SIZES = [1, 4, 16, 64, 512]  # MiB of float32
WIDE, HALF = torch.float32, torch.bfloat16


@dataclass
class Job:
    name: str
    moved: int  # bytes
    operands: list[torch.dtype]
    run: Callable[[Sequence[torch.Tensor]], object]
    plan: Plan | None = None


def cold_bytes(device: torch.device) -> int:
    """Four times what the L2 holds: nothing is left there of what was used so many bytes ago."""
    if device.type != "cuda":
        return 0
    return 4 * torch.cuda.get_device_properties(device).L2_cache_size


def host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def repeated(run: Callable[[int], object], rounds: int) -> torch.cuda.CUDAGraph:
    """Rounds of it in a graph: launches from Python take longer than small copies."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            run(i)
    return graph


def device_seconds(graph: torch.cuda.CUDAGraph, other: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    other.zero_()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def seconds(job: Job, numel: int, device: torch.device) -> float:
    """The median of five; on a GPU of averages, without what the host does."""
    cold = cold_bytes(device)
    n_sets = max(2, -(-cold // job.moved))
    rounds = max(ROUNDS, n_sets) if device.type == "cuda" else 1
    sets = [
        [torch.rand(numel, device=device).to(kind) for kind in job.operands]
        for _ in range(min(n_sets, rounds))
    ]
    if job.plan is not None:
        job.plan.seal(rounds)
    if device.type != "cuda":
        return sorted(host_seconds(lambda: job.run(sets[0])) for _ in range(5))[2]
    graph = repeated(lambda i: job.run(sets[i % n_sets]), rounds)
    other = torch.empty(cold, dtype=torch.uint8, device=device)
    device_seconds(graph, other)
    return sorted(device_seconds(graph, other) for _ in range(5))[2] / rounds


def flat(kernels: Kernels, numel: int, parts: int, to: torch.dtype, source: torch.dtype) -> Plan:
    """`parts` pieces of one buffer; operands 0 and 1."""
    plan, piece = kernels.plan(), numel // parts
    for i in range(parts):
        at = i * piece
        to_side = Side(0, to, at * to.itemsize)
        plan.add((1, 1, piece), to_side, Side(1, source, at * source.itemsize))
    return plan


def gather(kernels: Kernels, numel: int, parts: int, outer: int) -> Plan:
    """Rank-major packs of bfloat16 parameters to full ones, sharded on dim 0 or (outer > 1) 1."""
    plan, kind = kernels.plan(), torch.bfloat16
    piece, size = numel // parts, kind.itemsize
    chunk = piece // RANKS
    row = chunk // outer
    for i in range(parts):
        to = Side(0, kind, i * piece * size, RANKS * row * size, row * size)
        source = Side(1, kind, i * chunk * size, row * size, numel // RANKS * size)
        plan.add((RANKS, outer, row), to, source)
    return plan


def torch_copies(moved: int) -> Iterator[Job]:
    yield Job("copy_ of torch", moved, [WIDE, WIDE], lambda m: m[0].copy_(m[1]))
    yield Job("neg of torch", moved, [WIDE, WIDE], lambda m: torch.neg(m[1], out=m[0]))


def jobs(kernels: Kernels, numel: int, parts: int) -> Iterator[Job]:
    pack = flat(kernels, numel, parts, HALF, WIDE)
    yield Job("pack, float32 to bfloat16", 6 * numel, [HALF, WIDE], pack.move, pack)
    copy = flat(kernels, numel, parts, WIDE, WIDE)
    yield Job("pack, float32", 8 * numel, [WIDE, WIDE], copy.move, copy)
    for outer in (1, 16):
        unpack = gather(kernels, numel, parts, outer)
        name = f"unpack, bfloat16, dim {int(outer > 1)}"
        yield Job(name, 4 * numel, [HALF, HALF], unpack.move, unpack)
    sums = flat(kernels, numel, parts, WIDE, HALF)
    add = "scale and add, bfloat16 to float32"
    yield Job(add, 10 * numel, [WIDE, HALF], lambda m: sums.finish(m, 8, True), sums)
    norm, adam = kernels.plan(), kernels.plan()
    for i in range(parts):
        norm.add_flat(WIDE, numel // parts, [0], i * (numel // parts) * 4)
        adam.add_flat(WIDE, numel // parts, [0, 1, 2, 3], i * (numel // parts) * 4)
    name = "sum of squares, float32"
    yield Job(name, 4 * numel, [WIDE], lambda m: norm.sum_squares(m, parts), norm)
    numbers = [1e-3, 0.9, 0.999, 1e-8, 0.01, 1]
    yield Job("AdamW, float32", 28 * numel, [WIDE] * 4, lambda m: adam.adam(m, 10, numbers), adam)


def measure(kernels: Kernels, rows: Rows, sizes: list[int], parts: list[int]) -> None:
    """Sizes in elements. Jobs are held to the faster copy of torch that moves as many bytes, sums
    also to torch's."""
    device = kernels.device
    copied: dict[int, float] = {}

    def rate_of(job: Job, numel: int) -> float:
        return job.moved / seconds(job, numel, device) / 1e9

    def copy_rate(moved: int) -> float:
        if moved not in copied:
            copied[moved] = max(rate_of(job, moved // 8) for job in torch_copies(moved))
        return copied[moved]

    for numel in sizes:
        total = Job("sum of torch, float32", 4 * numel, [WIDE], lambda m: m[0].sum())
        todo = [(1, total), *((n, job) for n in parts for job in jobs(kernels, numel, n))]
        for n, job in todo:
            rate = rate_of(job, numel)
            rows.figure(
                "GPU kernels: GB/s, and of torch's faster copy of as many bytes",
                kernel=job.name,
                mib_of_float32=numel * 4 / 2**20,
                parameters=n,
                gb_s=rate,
                of_copy=rate / copy_rate(job.moved),
            )


def run(rows: Rows, device_type: str, mib: Sequence[int] = SIZES) -> None:
    """As a part of gpu-check."""
    if device_type == "cuda" and not LIBRARY.exists():
        rows.left_out("kernels", "they were not built, since nvcc was not found")
        return
    helper = build_helper(ROOT / "build" / "gpu-check")
    is_cuda = device_type == "cuda"
    kernels = Kernels(helper, LIBRARY if is_cuda else None)
    sizes, parts = [m << 18 for m in mib], [4, 1024]
    sizes, parts = (sizes, parts) if is_cuda else ([1 << 14], [4, 16])
    measure(kernels, rows, sizes, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="on the host; figures mean nothing")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="MiB of float32")
    options = parser.parse_args()
    if not options.emulate and not torch.cuda.is_available():
        sys.exit("bench_cuda_kernels: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        run(
            Rows(Path(folder, "rows"), "copies"),
            "cpu" if options.emulate else "cuda",
            options.sizes,
        )


if __name__ == "__main__":
    main()
