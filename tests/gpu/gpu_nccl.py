"""NCCL's groups on a GPU: one rank, and two ranks on one device where NCCL allows that.

`run()` starts the ranks as processes and kills them after a time; `python gpu_nccl.py RANK RANKS
STORE` is one of them. Needs a build of the extension.
"""

from __future__ import annotations

import sys

import gpu_ranks
import torch
import torch.distributed as dist
from gpu_rows import Rows

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


def run(rows: Rows, device_type: str) -> None:
    sys.path.append(str(gpu_ranks.ROOT))
    try:
        from fsdp_c import _nccl

        library = _nccl.opened()
    except (ImportError, NotImplementedError) as error:
        rows.left_out("NCCL", str(error))
        return
    if device_type == "cpu":
        rows.left_out("NCCL", f"there is no GPU ({library.text})")
        return
    for n_ranks, env in ((1, {}), (2, gpu_ranks.TWO_RANKS)):
        name = f"{n_ranks} rank{'s' * (n_ranks > 1)} on one GPU"
        if n_ranks > 1 and library.version < TWO_RANKS_SINCE:
            rows.left_out(name, f"it needs NCCL 2.30.3 ({library.text})")
        else:
            rows.check(name, lambda n=n_ranks, env=env: gpu_ranks.run(__file__, n, env=env))


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
