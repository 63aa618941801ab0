"""The safetensors format: 8 bytes with the length of the header, the header in JSON, then the tensors end to end.

This takes few lines, and unlike the library reads and writes in blocks and from several threads. Parts of tensors are
marked as torch.distributed.checkpoint marks them (HuggingFaceStorageReader).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from plait.cost.memory_model import PAGE
from plait.engine.checkpoint.json_values import Count, Extents, Strict, Text, checked, read_json
from plait.errors import CheckpointError

_LENGTH = 8
_LARGEST_HEADER = 100_000_000  # the limit of the library
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_NAMES = {short: name for name, short in _TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    dtype   its torch name
    start   where a part begins in the whole tensor
    offset  the first byte in the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@functools.cache
def item_bytes(dtype: str) -> int:
    """The size of one element in bytes."""
    short = _TYPES[dtype]
    if short.startswith("F8"):
        return 1
    return 1 if short == "BOOL" else int(short.lstrip("BFIUC")) // 8


def check_dtype(name: str, dtype: str) -> None:
    """Raise CheckpointError for a dtype that checkpoints cannot store."""
    if dtype not in _TYPES:
        raise CheckpointError(f"{name} is {dtype}, which a checkpoint cannot hold; it holds {', '.join(_TYPES)}")


def write_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]], parts: bool = False
) -> tuple[bytes, list[Entry]]:
    """The bytes of the header for the tensors (name, dtype, shape, start) in order, padded with spaces, and their
    entries.

    With `parts`, tensors are parts that begin at `start` of the whole. To align all of them, give those with larger
    elements first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if parts:
        marks = {name: {"saved_offsets": list(start)} for name, _, _, start in tensors}
        header["__metadata__"] |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(marks)}
    position = 0
    for name, dtype, shape, _ in tensors:
        check_dtype(name, dtype)
        end = position + math.prod(shape) * item_bytes(dtype)
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH) % PAGE)  # so that the tensors begin at a page
    first = _LENGTH + len(text)
    entries = [
        Entry(name, dtype, shape, start, first + header[name]["data_offsets"][0])
        for name, dtype, shape, start in tensors
    ]
    return len(text).to_bytes(_LENGTH, "little") + text, entries


def read_header(file: str, size: int, read: Callable[[int, int], bytes]) -> list[Entry]:
    """The tensors of a file of `size` bytes; `read(offset, num)` returns bytes of it.

    Raises CheckpointError for an invalid file.
    """
    what = f"{file} is no whole safetensors file"
    length = int.from_bytes(read(0, _LENGTH), "little")
    if not 2 <= length <= min(size - _LENGTH, _LARGEST_HEADER):
        raise CheckpointError(f"{what}: its header is too long for it")
    header = read_json(read(_LENGTH, length), f"{what}: its header")
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    sharding = checked(_METADATA, metadata, f"{what}: __metadata__").get("DCP_SHARDING_INFO", "{}")
    marks = checked(_MARKS, read_json(sharding, f"{what}: DCP_SHARDING_INFO"), f"{what}: DCP_SHARDING_INFO")
    found, ranges = [], []
    for name, entry in checked(_HEADER, header, what).items():
        start = marks[name].saved_offsets if name in marks else (0,) * len(entry.shape)
        first, end = entry.data_offsets
        one = Entry(name, _NAMES[entry.dtype], entry.shape, start, _LENGTH + length + first)
        if len(start) != len(entry.shape):
            raise CheckpointError(f"{what}: {name} begins at {list(start)} and has the shape {list(entry.shape)}")
        if not fits_memory(entry.shape, one.dtype) or end - first != one.num_bytes:
            raise CheckpointError(
                f"{what}: {name} of {entry.dtype} and shape {list(entry.shape)} does not take bytes {first} to {end}"
            )
        if _LENGTH + length + end > size:
            raise CheckpointError(f"{what}: {name} does not lie within it")
        ranges.append((first, end, name))
        found.append(one)
    if twice := first_overlap(ranges):
        raise CheckpointError(f"{what}: the bytes of {twice} are also another tensor's")
    return found


def fits_memory(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a tensor of this shape can exist: torch counts its bytes and strides in signed 64-bit integers."""
    return math.prod(max(num, 1) for num in shape) * item_bytes(dtype) < 1 << 62


def first_overlap(ranges: Sequence[tuple[int, int, str]]) -> str | None:
    """The name of the first range (first, end, name) that overlaps an earlier one; None if there is none."""
    last = 0
    for first, end, name in sorted(one for one in ranges if one[0] < one[1]):
        if first < last:
            return name
        last = end
    return None


def _known(dtype: str) -> str:
    if dtype not in _TYPES:
        raise ValueError(f"{dtype[:40]!r} is not one of {', '.join(_TYPES)}")
    return dtype


def _known_short(dtype: str) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"{dtype[:40]!r} is not one of {', '.join(_NAMES)}")
    return dtype


Dtype = Annotated[Text, AfterValidator(_known)]


class _Entry(Strict):
    dtype: Annotated[Text, AfterValidator(_known_short)]
    shape: Extents
    data_offsets: tuple[Count, Count]


class _Mark(Strict):
    saved_offsets: Extents


_HEADER = TypeAdapter(dict[Text, _Entry])
_METADATA = TypeAdapter(dict[Text, Text])
_MARKS = TypeAdapter(dict[Text, _Mark])
