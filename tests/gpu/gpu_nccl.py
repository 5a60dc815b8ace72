"""NCCL's groups on a GPU: one rank, and two and three ranks on one device, which NCCL has to allow.

`run()` starts the ranks as processes and kills them after a time; `python gpu_nccl.py RANK RANKS
STORE` is one of them. Needs a build of the extension.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import gpu_ranks
import torch
import torch.distributed as dist
from gpu_rows import Rows

MANY_RANKS_SINCE = 23003


def run_rank(rank: int, n_ranks: int, store: str) -> None:
    from fsdp_c._comm import _nccl

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    group = _nccl.group_for(dist.group.WORLD, device)
    if rank == 0:
        print(f"  {group.text}; {_nccl.describe()}", flush=True)
    stream = torch.cuda.Stream()
    for step in range(3):
        with torch.cuda.stream(stream):
            check_step(group, stream, rank, n_ranks, step)
    if n_ranks > 1:
        with torch.cuda.stream(stream):
            for width in (256, 1024, 4096):
                found = time_ways(
                    group, rank, n_ranks, width, device, stream.cuda_stream, stream.synchronize
                )
                if rank == 0:
                    print(f"  a block of width {width}: {found}", flush=True)
    group.close()
    dist.destroy_process_group()


def check_step(group, stream: torch.cuda.Stream, rank: int, n_ranks: int, step: int) -> None:
    whole = torch.zeros(n_ranks, 1 << 16, device="cuda")
    whole[rank] = rank + step
    group.collect(
        what="all_gather", outputs=[whole], inputs=[], stream=stream.cuda_stream, unit="layers.0"
    )
    outputs = [torch.zeros(n_ranks, size, device="cuda") for size in (64, 4096)]
    inputs = [torch.full((out.shape[1],), rank + 0.5, device="cuda") for out in outputs]
    group.collect(
        what="all_gather_each",
        outputs=outputs,
        inputs=inputs,
        stream=stream.cuda_stream,
        unit="layers.1",
    )
    part = torch.zeros(512, dtype=torch.bfloat16, device="cuda")
    summands = torch.ones(512 * n_ranks, dtype=torch.bfloat16, device="cuda")
    group.collect(
        what="reduce_scatter",
        outputs=[part],
        inputs=[summands],
        stream=stream.cuda_stream,
        unit="layers.1",
    )
    total = torch.tensor([1.0, rank], device="cuda")
    group.collect(
        what="all_reduce", outputs=[total], inputs=[], stream=stream.cuda_stream, unit="layers.0"
    )
    event = stream.record_event()
    group.wait(is_ready=event.query, what="gpu-check")
    ranks = torch.arange(n_ranks, device="cuda")[:, None]
    assert torch.equal(whole, (ranks + step).float().expand_as(whole))
    assert all(torch.equal(out, (ranks + 0.5).expand_as(out)) for out in outputs)
    assert torch.equal(part, torch.full_like(part, n_ranks))
    assert total.tolist() == [n_ranks, n_ranks * (n_ranks - 1) / 2]


def time_ways(
    group,
    rank: int,
    n_ranks: int,
    width: int,
    device: torch.device,
    stream: int,
    settle: Callable[[], None],
    n_samples: int = 20,
) -> str:
    """Gathers of a transformer block's parameters in bfloat16, in both ways; says the medians.

    Staged: packed, one all-gather, copied out. Direct: an all-gather per parameter, in one group.
    """
    rows = [width] * 4 + [4 * width] * 2 + [1] * 4  # of `width`, but for the vectors
    sizes = [n * width // n_ranks for n in rows]
    shards = [torch.full((n,), i + rank / 2, device=device).bfloat16() for i, n in enumerate(sizes)]
    outputs = {
        way: [torch.zeros(n_ranks, n, dtype=torch.bfloat16, device=device) for n in sizes]
        for way in ("staged", "direct")
    }
    slot = torch.zeros(n_ranks, sum(sizes), dtype=torch.bfloat16, device=device)

    def staged() -> None:
        torch._foreach_copy_(list(slot[rank].split(sizes)), shards)
        group.collect(what="all_gather", outputs=[slot], inputs=[], stream=stream, unit="block")
        torch._foreach_copy_(outputs["staged"], list(slot.split(sizes, dim=1)))

    def direct() -> None:
        group.collect(
            what="all_gather_each",
            outputs=outputs["direct"],
            inputs=shards,
            stream=stream,
            unit="block",
        )

    seconds: dict[str, list[float]] = {"staged": [], "direct": []}
    for _ in range(n_samples):
        for way in (staged, direct):
            settle()
            begun = time.perf_counter()
            way()
            settle()
            seconds[way.__name__].append(time.perf_counter() - begun)
    for one, other in zip(outputs["staged"], outputs["direct"], strict=True):
        assert torch.equal(one, other), "the two ways differ"
    found = {way: statistics.median(times) * 1e6 for way, times in seconds.items()}
    return ", ".join(f"{way} {us:.0f} us" for way, us in found.items())


def why_not(n_ranks: int, by_torch: bool = False) -> str:
    """Why so many ranks of one GPU cannot talk over the NCCL of fsdp_c here, or of torch's process
    groups."""
    sys.path.append(str(gpu_ranks.ROOT))
    try:
        from fsdp_c._comm import _nccl

        library = _nccl.loaded() if by_torch else _nccl.opened()
    except (ImportError, NotImplementedError) as error:
        return str(error)
    is_old = n_ranks > 1 and library.version < MANY_RANKS_SINCE
    return f"it needs NCCL 2.30.3 ({library.text})" if is_old else ""


def run(rows: Rows, device_type: str) -> None:
    for n_ranks in (1, 2, 3):
        name = f"{n_ranks} rank{'s' * (n_ranks > 1)} on one GPU"
        if device_type == "cpu":
            rows.left_out(name, "there is no GPU")
        elif why := why_not(n_ranks):
            rows.not_run(name, why)
        else:
            env = gpu_ranks.MANY_RANKS if n_ranks > 1 else {}
            rows.check(name, lambda n=n_ranks, env=env: gpu_ranks.run(__file__, n, env=env))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
