"""The two workloads that every benchmark uses: a byte-level GPT, small (width 256) and wide (width 512)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH = 8
SEQUENCE = 128
NUM_SYMBOLS = 256


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, x.shape[-1] // self.num_heads)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BytesGPT(nn.Module):
    """Pre-norm decoder over bytes: [batch, sequence] of symbols -> [batch, sequence, 256] logits."""

    def __init__(self, num_layers: int = 8, width: int = 256, num_heads: int = 8, sequence: int = SEQUENCE) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NUM_SYMBOLS, width)
        self.places = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.places(torch.arange(symbols.shape[1], device=symbols.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Workload:
    """A GPT and its global batch of 8 sequences of 128 bytes."""

    width: int = 256
    num_layers: int = 8

    def model(self) -> BytesGPT:
        torch.manual_seed(0)
        return BytesGPT(self.num_layers, self.width)

    def batch(self, size: int = GLOBAL_BATCH) -> dict[str, Tensor]:
        """`x` and `y`, each [size, 128]: symbols and their successors."""
        symbols = torch.randint(NUM_SYMBOLS, (size, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
        return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


WORKLOADS = {"small": Workload(256), "wide": Workload(512)}

optimizer = functools.partial(torch.optim.AdamW, lr=3e-4)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
