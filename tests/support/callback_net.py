"""A model that calls back where things may go wrong."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import cached_mesh, implementation
from snapshots import Net


class CallbackNet(Net):
    """A `Net` that calls `probe(point)` in its forward and in its backward."""

    def __init__(self, probe: Callable[[str], None] = lambda point: None, width: int = 5) -> None:
        super().__init__(width)
        self.probe = probe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.probe("in_forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.probe("in_backward"))
        out = self.second(hidden)
        if out.requires_grad:
            out.register_hook(lambda grad: self.probe("before_second"))
        return out + self.offset


def sharded(net: Net) -> Net:
    """A unit per layer, and the root's."""
    api, mesh = implementation(), cached_mesh((dist.get_world_size(),))
    for unit in (net.first, net.second, net):
        api.fully_shard(unit, mesh=mesh)
    return net
