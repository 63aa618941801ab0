"""Llama in plain PyTorch (Touvron et al. 2023; grouped queries as in Llama 3), for benchmarks on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a model, and of its batch on one GPU: `rows` of `length` tokens."""

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    vocabulary: int = 128256
    length: int = 2048
    rows: int = 4

    @property
    def num_parameters(self) -> int:
        """Of all matrices; input and output share the vocabulary's."""
        head = self.width // self.num_heads
        attention = self.width * head * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.vocabulary * self.width + self.num_layers * (attention + 3 * self.width * self.hidden)

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: six a parameter, and the products of attention over half of all pairs (PaLM,
        appendix B, with a causal mask)."""
        return 6.0 * self.num_parameters + 6.0 * self.num_layers * self.width * self.length


SHAPES = {
    "tiny": LlamaShape(32, 2, 4, 2, 64, vocabulary=64, length=16, rows=2),
    "1B": LlamaShape(2048, 16, 32, 8, 8192),
    "3B": LlamaShape(3072, 28, 24, 8, 8192),
    "8B": LlamaShape(4096, 32, 32, 8, 14336, rows=1),
    "13B": LlamaShape(5120, 40, 40, 8, 17920, rows=1),
}


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_heads, shape.num_kv_heads
        self.head = shape.width // shape.num_heads
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.q, self.o = (linear(shape.width, shape.width) for _ in range(2))
        self.k, self.v = (linear(shape.width, self.kv_heads * self.head) for _ in range(2))
        self.gate, self.up = (linear(shape.width, shape.hidden) for _ in range(2))
        self.down = linear(shape.hidden, shape.width)
        self.before, self.after = (nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # fmt: skip
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        times = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.output.weight = self.table.weight
        self.half = shape.width // shape.num_heads // 2
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        rate = 500000.0 ** (-torch.arange(self.half, device=tokens.device) / self.half)
        angle = torch.outer(at, rate)
        h, cos, sin = self.table(tokens), angle.cos(), angle.sin()
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.output(self.norm(h))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def llama_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1).float(), batch["y"].flatten())
