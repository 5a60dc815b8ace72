"""Models to estimate by name: a GPT and a Llama, built on the meta device, with published sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp_c import _text


@dataclass(frozen=True)
class Config:
    kind: str  # "gpt" or "llama"
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0  # 0: as many as heads
    mlp: int = 0  # 0: four times hidden
    source: str = ""

    def replaced(self, **given: int | None) -> Config:
        return replace(self, **{name: n for name, n in given.items() if n is not None})


_LLAMA = "Llama 3 herd of models (Meta, 2024), table 3"
CONFIGS = {
    "gpt": Config("gpt", 12, 768, 12, 50257, 1024, source="GPT-2 small (Radford et al., 2019)"),
    "gpt-175b": Config(
        "gpt", 96, 12288, 96, 50257, 2048, source="GPT-3 (Brown et al., 2020), table 2.1"
    ),
    "gpt-1t": Config("gpt", 128, 25600, 160, 51200, 2048, source="Narayanan et al., 2021, table 1"),
    "llama-7b": Config(
        *("llama", 32, 4096, 32, 32000, 4096, 0, 11008),
        source="Llama 2 (Touvron et al., 2023); mlp: 2/3 of 4 x hidden, to a multiple of 256",
    ),
    "llama": Config("llama", 32, 4096, 32, 128256, 8192, 8, 14336, source=_LLAMA),
    "llama-8b": Config("llama", 32, 4096, 32, 128256, 8192, 8, 14336, source=_LLAMA),
    "llama-70b": Config("llama", 80, 8192, 64, 128256, 8192, 8, 28672, source=_LLAMA),
    "llama-405b": Config("llama", 126, 16384, 128, 128256, 8192, 8, 53248, source=_LLAMA),
}


def config_named(name: str) -> Config:
    """ValueError with the names there are, and the closest one."""
    if name not in CONFIGS:
        hint = _text.did_you_mean(name, CONFIGS)
        raise ValueError(f"there is no model {name!r}: use one of {', '.join(CONFIGS)}{hint}")
    return CONFIGS[name]


def build(config: Config) -> nn.Module:
    """On the meta device: it takes no memory."""
    with torch.device("meta"):
        return GPT(config) if config.kind == "gpt" else Llama(config)


class GPTBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, mlp = config.hidden, config.mlp or 4 * config.hidden
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Learned positions, LayerNorm, GELU; the output layer has weights of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Parameter(torch.empty(config.sequence, config.hidden))
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, mlp = config.hidden, config.mlp or 4 * config.hidden
        self.size = width // config.heads
        kv = self.size * (config.kv_heads or config.heads)
        self.norm_1 = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv, bias=False)
        self.value = nn.Linear(width, kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, mlp, bias=False)
        self.up = nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    """Rotary positions, RMSNorm, SwiGLU, grouped queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.hidden // config.heads
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * torch.arange(self.size)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
