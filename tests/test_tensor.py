"""tensor=: what it splits in models nobody prepared, and that the split step has the numbers of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm.threads import run_ranks
from plait.graph import ops
from plait.spec.mesh import Mesh

WIDTH, HEADS, VOCAB = 32, 4, 48


def turned(x: Tensor) -> Tensor:
    """Rotary positions, the two halves of each head turned against each other; x [batch, heads, length, size]."""
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 8 ** torch.linspace(0, 1, x.shape[3] // 2, dtype=x.dtype)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Separate query, key and value; fewer heads of keys and values are repeated, as transformers does."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        query, key, value = (
            layer(x).unflatten(-1, (-1, size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        repeats = HEADS // key.shape[1]
        key, value = turned(key).repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return self.out(F.scaled_dot_product_attention(turned(query), key, value).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A language model of two layers around the block that is given."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.symbols, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def text(rows: int, length: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, VOCAB, (rows, length), generator=generator) for name in ("x", "y")}


@pytest.mark.parametrize(
    ("kv_heads", "rows", "plan"),
    [
        (2, 6, "tensor=4"),
        (1, 5, "tensor=4"),
        (2, 12, "tensor=4 micro=2"),
        (2, 6, "data=2 tensor=4"),
        (2, 6, "tensor=4 pipeline=2 micro=2"),
    ],
)
def test_fewer_key_value_heads_than_ranks(kv_heads: int, rows: int, plan: str) -> None:
    torch.manual_seed(0)
    model = Decoder(Attention(kv_heads), Attention(kv_heads)).double()
    report = plait.verify(model, loss_fn, text(rows), plan, tolerance=1e-6)
    assert report.ok, report


def test_what_changes_its_placement_is_dense() -> None:
    """The backward of a layer norm reads the memory of the statistics it is given, whatever their strides are."""
    whole = torch.randn(4, 8, 6)
    frame = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)

    def rank(world: object) -> list[Tensor]:
        part = ops.shard(world, whole, "tensor", 1, 2)
        column = ops.shard(world, whole, "tensor", 2, 1)[:, :, :1].contiguous()
        gathered = ops.all_gather(world, column, "tensor", 2, 1)
        return [part, gathered, ops.shard(world, frame, "tensor", 1, 1)]

    for part, gathered, channels in run_ranks(Mesh((("tensor", 2),)), rank):
        assert part.is_contiguous() and gathered.is_contiguous()
        assert channels.is_contiguous(memory_format=torch.channels_last)
