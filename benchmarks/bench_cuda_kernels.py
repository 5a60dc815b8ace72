"""GPU kernels against the device's own copies, over few large and many small parameters.

Bytes are those that have to be read and written. `--emulate` runs the program on the host over tiny
units: the figures mean nothing then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import torch  # noqa: E402
from gpu_kernels import LIBRARY, Kernels, Plan, Side, build_helper  # noqa: E402
from gpu_rows import Rows  # noqa: E402

RANKS = 8
ROUNDS = 20
SIZES = [1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 27]  # elements: 1 MiB to 512 MiB of float32


@dataclass
class Job:
    name: str
    moved: int  # bytes
    run: Callable[[], object]


def host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def repeated(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Rounds of it in a graph: launches from Python take longer than small copies."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            run()
    return graph


def device_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / ROUNDS


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of five; on a GPU of averages, without what the host does."""
    if device.type != "cuda":
        return sorted(host_seconds(run) for _ in range(5))[2]
    graph = repeated(run)
    graph.replay()
    return sorted(device_seconds(graph) for _ in range(5))[2]


def flat(kernels: Kernels, numel: int, parts: int, to: torch.dtype, source: torch.dtype) -> Plan:
    """`parts` pieces of one buffer; operands 0 and 1."""
    plan, piece = kernels.plan(), numel // parts
    for i in range(parts):
        at = i * piece
        to_side = Side(0, to, at * to.itemsize)
        plan.add((1, 1, piece), to_side, Side(1, source, at * source.itemsize))
    return plan.seal()


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
    return plan.seal()


def jobs(kernels: Kernels, numel: int, parts: int) -> Iterator[Job]:
    def memory(dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(numel, dtype=dtype, device=kernels.device)

    wide, half = memory(torch.float32), memory(torch.bfloat16)
    other = memory(torch.float32)
    yield Job("copy_ of torch", 8 * numel, lambda: other.copy_(wide))
    pack = flat(kernels, numel, parts, torch.bfloat16, torch.float32)
    yield Job("pack, float32 to bfloat16", 6 * numel, lambda: pack.move([half, wide]))
    copy = flat(kernels, numel, parts, torch.float32, torch.float32)
    yield Job("pack, float32", 8 * numel, lambda: copy.move([other, wide]))
    halves = memory(torch.bfloat16)
    for outer in (1, 16):
        unpack = gather(kernels, numel, parts, outer)
        name = f"unpack, bfloat16, dim {int(outer > 1)}"
        yield Job(name, 4 * numel, lambda unpack=unpack: unpack.move([halves, half]))
    finish = flat(kernels, numel, parts, torch.float32, torch.bfloat16)
    add = "scale and add, bfloat16 to float32"
    yield Job(add, 10 * numel, lambda: finish.finish([wide, half], 8, True))
    norm = kernels.plan()
    norm.add_flat(torch.float32, numel, [0])
    norm.seal()
    yield Job("sum of squares, float32", 4 * numel, lambda: norm.sum_squares([wide], 1))
    states = [wide, other, memory(torch.float32), memory(torch.float32)]
    adam = kernels.plan()
    adam.add_flat(torch.float32, numel, [0, 1, 2, 3])
    adam.seal()
    numbers = [1e-3, 0.9, 0.999, 1e-8, 0.01, 1]
    yield Job("AdamW, float32", 28 * numel, lambda: adam.adam(states, 10, numbers))


def measure(kernels: Kernels, rows: Rows, sizes: list[int], parts: list[int]) -> None:
    for numel in sizes:
        for n in parts:
            copied = 0.0
            for job in jobs(kernels, numel, n):
                rate = job.moved / seconds(job.run, kernels.device) / 1e9
                copied = copied or rate
                rows.figure(
                    "GPU kernels: GB/s, and of torch's copy at the same size",
                    kernel=job.name,
                    mib_of_float32=numel * 4 / 2**20,
                    parameters=n,
                    gb_s=rate,
                    of_copy=rate / copied,
                )


def run(rows: Rows, device_type: str) -> None:
    """As a part of gpu-check."""
    if device_type == "cuda" and not LIBRARY.exists():
        rows.left_out("kernels", "they were not built, since nvcc was not found")
        return
    helper = build_helper(ROOT / "build" / "gpu-check")
    is_cuda = device_type == "cuda"
    kernels = Kernels(helper, LIBRARY if is_cuda else None)
    sizes, parts = (SIZES, [4, 1024]) if is_cuda else ([1 << 14], [4, 16])
    measure(kernels, rows, sizes, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="on the host; figures mean nothing")
    options = parser.parse_args()
    if not options.emulate and not torch.cuda.is_available():
        sys.exit("bench_cuda_kernels: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        run(Rows(Path(folder, "rows"), "copies"), "cpu" if options.emulate else "cuda")


if __name__ == "__main__":
    main()
