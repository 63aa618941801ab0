"""The built-in model: a small pre-norm GPT over bytes, in plain PyTorch without any reference to plans."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to the residual: [batch, sequence, width] -> the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attention(self.attention_norm(x)))
        added: Tensor = self.drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return x + added

    def _attention(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // self.heads
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        added: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return added


class BytesGPT(nn.Module):
    """Bytes [batch, sequence] -> logits of the next byte [batch, sequence, vocab].

    Raises ValueError for sizes that do not fit together.

    >>> sum(p.numel() for p in BytesGPT().parameters())
    6482432
    """

    def __init__(
        self,
        layers: int = 8,
        width: int = 256,
        heads: int = 8,
        sequence: int = 128,
        vocab: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, number in (("layers", layers), ("width", width), ("heads", heads), ("sequence", sequence)):
            if number < 1:
                raise ValueError(f"{name} = {number}; it is 1 or more")
        if width % heads:
            raise ValueError(f"heads = {heads} does not divide width = {width}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout = {dropout}; it is at least 0 and below 1")
        self.sequence = sequence
        self.symbols = nn.Embedding(vocab, width)
        self.places = nn.Embedding(sequence, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Small weights; smaller still where a block adds to the residual, whose variance grows with the layers."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.places(torch.arange(symbols.shape[1], device=symbols.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def bytes_gpt(
    layers: int = 8, width: int = 256, heads: int = 8, sequence: int = 128, dropout: float = 0.0
) -> tuple[BytesGPT, object]:
    """The model and its loss function, which [model] name = "bytes_gpt" names."""
    return BytesGPT(layers, width, heads, sequence, dropout=dropout), loss_fn


@torch.no_grad()
def sample_text(model: BytesGPT, prompt: str, length: int, temperature: float, seed: int = 0) -> str:
    """`prompt` and `length` more bytes drawn from the model, as text, on one device.

    Bytes that are not UTF-8 become replacement characters.
    """
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    symbols = list(prompt.encode()) or [ord("\n")]
    for _ in range(length):
        logits = model(torch.tensor([symbols[-model.sequence :]]))[0, -1].float()
        chances = torch.softmax(logits / temperature, dim=0)
        symbols.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(was_training)
    return bytes(symbols).decode(errors="replace")
