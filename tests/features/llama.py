"""A Llama-like transformer, small, and how torchtitan parallelizes one: tensors, sequence, data."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, HEADS, HIDDEN, VOCABULARY, TOKENS = 8, 2, 12, 16, 4


class Attention(nn.Module):
    """Each rank computes the heads whose rows it has."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        heads = [w(x).view(n, length, -1, DIM // HEADS) for w in (self.wq, self.wk, self.wv)]
        q, k, v = (head.transpose(1, 2) for head in heads)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(n, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, n_layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(n_layers))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def batch(number: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(VOCABULARY, (2, TOKENS), generator=generator)


def apply_tp(model: Llama, mesh: DeviceMesh, loss_parallel: bool = False) -> None:
    """torchtitan's plan: activations between blocks are split over the sequence."""
    output = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh, plan)
    split = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**split),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**split),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)


def apply_fsdp(model: Llama, fsdp: Any, mesh: DeviceMesh, **options: Any) -> None:
    """A unit per block; the embedding, and what is needed last, are units too."""
    fsdp.fully_shard(model.tok_embeddings, mesh=mesh, **options)
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=mesh, **options)
    last = {**options, "reshard_after_forward": False}
    fsdp.fully_shard([model.norm, model.output], mesh=mesh, **last)
    fsdp.fully_shard(model, mesh=mesh, **options)
