"""Text as bytes: its sources, its split in training and held-out text, and the windows that a byte model trains on."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
from pathlib import Path

import numpy
import torch
from torch import Tensor
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
                found = _DOCSTRING.findall((Path(folder) / name).read_text(errors="replace"))
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
