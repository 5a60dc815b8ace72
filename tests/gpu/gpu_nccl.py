"""NCCL's groups on a GPU: one rank, and two ranks on one device where NCCL allows that.

`check()` starts the ranks as processes and kills them after a time; `python gpu_nccl.py RANK RANKS
STORE` is one of them. Needs a build of the extension.
"""

from __future__ import annotations

import sys

import gpu_ranks
import torch
import torch.distributed as dist

TWO_RANKS_SINCE = 23003


def run_rank(rank: int, n_ranks: int, store: str) -> None:
    from fsdp_c import _nccl

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
    group.close()
    dist.destroy_process_group()


def check_step(group, stream: torch.cuda.Stream, rank: int, n_ranks: int, step: int) -> None:
    whole = torch.zeros(n_ranks, 1 << 16, device="cuda")
    whole[rank] = rank + step
    group.all_gather(whole, stream.cuda_stream, "layers.0", n_ranks)
    outputs = [torch.zeros(n_ranks, size, device="cuda") for size in (64, 4096)]
    inputs = [torch.full((out.shape[1],), rank + 0.5, device="cuda") for out in outputs]
    group.all_gather_each(outputs, inputs, stream.cuda_stream, "layers.1")
    part = torch.zeros(512, dtype=torch.bfloat16, device="cuda")
    summands = torch.ones(512 * n_ranks, dtype=torch.bfloat16, device="cuda")
    group.reduce_scatter(part, summands, stream.cuda_stream, "layers.1")
    total = torch.tensor([1.0, rank], device="cuda")
    group.all_reduce(total, stream.cuda_stream, "layers.0")
    event = stream.record_event()
    group.wait(event.query, "gpu-check")
    ranks = torch.arange(n_ranks, device="cuda")[:, None]
    assert torch.equal(whole, (ranks + step).float().expand_as(whole))
    assert all(torch.equal(out, (ranks + 0.5).expand_as(out)) for out in outputs)
    assert torch.equal(part, torch.full_like(part, n_ranks))
    assert total.tolist() == [n_ranks, n_ranks * (n_ranks - 1) / 2]


def check() -> int:
    """How many of the checks failed; says what was left out and why."""
    sys.path.append(str(gpu_ranks.ROOT))
    try:
        from fsdp_c import _nccl

        library = _nccl.opened()
    except (ImportError, NotImplementedError) as error:
        print(f"NCCL was not checked: {error}")
        return 0
    if not torch.cuda.is_available():
        print(f"NCCL was not checked: no GPU is seen here ({library.text})")
        return 0
    failed = 0
    for n_ranks, env in ((1, {}), (2, gpu_ranks.TWO_RANKS)):
        name = f"NCCL with {n_ranks} rank{'s' * (n_ranks > 1)} on one GPU"
        if n_ranks > 1 and library.version < TWO_RANKS_SINCE:
            print(f"{name}: left out, which needs NCCL 2.30.3 ({library.text})")
            continue
        is_good = gpu_ranks.start(__file__, n_ranks, env=env)
        failed += not is_good
        print(f"  {'passed' if is_good else 'FAILED'} {name}")
    return failed


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
