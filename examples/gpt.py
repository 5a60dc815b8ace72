"""A small GPT over bytes: causal attention with rotary positions, and a generator of text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    """Sizes of the model; `dim` is a multiple of twice `heads`."""

    vocab: int = 256
    seq: int = 128
    layers: int = 4
    dim: int = 256
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).unbind(2)
        q, k = (rotate(F.rms_norm(t, (t.shape[-1],)), cos, sin).transpose(1, 2) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """One transformer block; the unit that `fully_shard` is called on."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (B, T) in, logits of the next byte (B, T, vocab) out."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Small random weights; each block starts as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight)
        for block in self.blocks:
            nn.init.zeros_(block.attention.proj.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.config.dim // self.config.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).float()


def rotary_table(n_tokens: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of the rotary angles, each (n_tokens, 1, head_dim / 2)."""
    speed = 10000.0 ** (-torch.arange(0, head_dim, 2, device=like.device) / head_dim)
    angle = torch.outer(torch.arange(n_tokens, device=like.device), speed)[:, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the two halves of each head by the rotary angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def generate(
    model: GPT, prompt: bytes, n_bytes: int, seed: int = 0, temperature: float = 0.7
) -> bytes:
    """Continues `prompt`; every rank of a sharded model calls this and gets the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(n_bytes):
        window = torch.tensor([text[-model.config.seq :]])
        probability = (model(window)[0, -1] / temperature).softmax(dim=-1)
        text.append(int(torch.multinomial(probability, 1, generator=generator)))
    return bytes(text)
