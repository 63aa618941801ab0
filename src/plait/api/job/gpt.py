"""The built-in model, a small pre-norm GPT over bytes in plain PyTorch without any reference to plans, and its data."""

from __future__ import annotations

import inspect
import math
import os
import re
import sysconfig
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from plait.errors import DataError

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SHORT = 200  # characters; shorter docstrings are mostly signatures
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
_BLOCK = 4096  # bytes; the text is cut into blocks of this size, some of which are held out


def python_text() -> bytes:
    """The English text in Python's own distribution: the language reference's topics and the library's docstrings.

    Raises DataError if the distribution has neither.
    """
    parts = []
    try:
        from pydoc_data.topics import topics

        parts += [topics[name] for name in sorted(topics)]
    except ImportError:  # some distributions lack the topics
        pass
    root = Path(sysconfig.get_path("stdlib"))
    for folder, inside, files in os.walk(root):
        inside[:] = sorted(set(inside) - _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                found = _DOCSTRING.findall((Path(folder) / name).read_text(encoding="utf-8", errors="replace"))
                parts += [inspect.cleandoc(text) for text in found if len(text) > _SHORT]
    if not parts:
        raise DataError(f"Python's library at {root} has no text; give a text file or folder as data.source instead")
    return "\n\n".join(parts).encode()


def read_text(source: str) -> bytes:
    """The bytes of `source`: "python", a text file, or a folder, whose UTF-8 files are joined in order.

    Raises DataError if there is no such file or folder, or no text in it.
    """
    if source == "python":
        return python_text()
    path = Path(source)
    if path.is_file():
        return path.read_bytes()
    if not path.is_dir():
        raise DataError(f"there is no text file or folder {source!r} (looked for {path.absolute()})")
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    texts = [data for data in (file.read_bytes() for file in files) if data and _is_text(data)]
    if not texts:
        raise DataError(f"the folder {source!r} holds no text: {len(files)} files, none of them UTF-8 text")
    return b"\n\n".join(texts)


def split_text(data: bytes, held_out: float) -> tuple[bytes, bytes]:
    """(training text, held-out text): every n-th block of 4096 bytes is held out, so that both are alike."""
    if held_out == 0:
        return data, b""
    every = max(round(1 / held_out), 2)
    block = min(_BLOCK, max(len(data) // every, 1))
    blocks = [data[start : start + block] for start in range(0, len(data), block)]
    train = b"".join(b for i, b in enumerate(blocks) if i % every != every - 1)
    return train, b"".join(b for i, b in enumerate(blocks) if i % every == every - 1)


class ByteText(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text: `x` and `y`, each int64 [sequence], where y is x one byte later."""

    def __init__(self, data: bytes, sequence: int) -> None:
        self.sequence = sequence
        self._bytes = torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8).copy())

    def __len__(self) -> int:
        return max(len(self._bytes) - 1, 0) // self.sequence

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._bytes[index * self.sequence : (index + 1) * self.sequence + 1].long()
        return {"x": window[:-1], "y": window[1:]}


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


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
    symbols = list(prompt.encode(errors="surrogateescape")) or [ord("\n")]
    for _ in range(length):
        logits = model(torch.tensor([symbols[-model.sequence :]]))[0, -1].float()
        chances = torch.softmax(logits / temperature, dim=0)
        symbols.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(was_training)
    return bytes(symbols).decode(errors="replace")
