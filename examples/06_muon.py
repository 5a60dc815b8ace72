"""Muon for matrices, AdamW for the rest: each matrix is whole on one rank, which steps it.

torchrun --nproc_per_node 2 examples/06_muon.py
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fsdp_c import Owned, fully_shard, gather_to_owner, scatter_from_owner

BATCH = 24


class OwnedMuon:
    """torch's Muon over sharded matrices; a rank keeps copies and momentum of those it owns."""

    def __init__(self, params: Iterable[nn.Parameter], **options: float) -> None:
        self.params = dict(enumerate(params))
        self.copies = {
            index: nn.Parameter(whole) for index, whole in gather_to_owner(self.params).items()
        }
        # A rank may own nothing: torch's optimizers want parameters all the same.
        params = list(self.copies.values()) or [nn.Parameter(torch.zeros(0, 0))]
        self.optimizer = torch.optim.Muon(params, **options)
        self.owned: Owned | None = None

    def step(self) -> None:
        grads = {index: param.grad for index, param in self.params.items()}
        # In the memory of the step before.
        self.owned = owned = gather_to_owner(grads, into=self.owned)
        for index, grad in owned.items():
            self.copies[index].grad = grad
        self.optimizer.step()
        for index in owned:
            owned[index] = self.copies[index].detach()
        scatter_from_owner(owned, into=self.params)

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None


def main() -> None:
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 80), nn.Tanh(), nn.Linear(80, 48)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    muon = OwnedMuon((p for p in model.parameters() if p.ndim == 2), lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=3e-3)

    target = torch.randn(48, 48) / 7
    for step in range(30):
        x = torch.randn(BATCH, 48).chunk(n_ranks)[rank]  # the same batch in all on every rank
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item() / n_ranks:.5f}")

    print(f"rank {rank} owns {len(muon.copies)} of {len(muon.params)} matrices")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
