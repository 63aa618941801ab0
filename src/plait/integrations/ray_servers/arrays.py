"""Tensors as flat numpy arrays, which travel between workers and servers without pickling or copying.

The values of a shard are one array of bytes, with each piece aligned to 64 bytes. A push has one array per piece, of
the piece's shape. A dtype that numpy lacks travels as an integer of the same width.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.compile.ir.dtypes import torch_name
from plait.schedule.variable_placement import Piece

_ALIGN = 64
_STANDS_FOR = {torch.bfloat16: torch.int16}


def dtype_of(piece: Piece) -> torch.dtype:
    """The torch dtype of a piece."""
    found: torch.dtype = getattr(torch, piece.dtype)
    return found


def offsets(pieces: Sequence[Piece]) -> list[int]:
    """The offset of each piece in the shard's bytes, followed by the total size."""
    found = [0]
    for piece in pieces:
        size = piece.num_elements * dtype_of(piece).itemsize
        found.append(found[-1] + -(-size // _ALIGN) * _ALIGN)
    return found


def views(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The pieces as views of a shard's bytes."""
    starts = offsets(pieces)
    return [
        flat[start : start + piece.num_elements * dtype_of(piece).itemsize].view(dtype_of(piece)).view(piece.own_shape)
        for piece, start in zip(pieces, starts, strict=False)
    ]


def join_pieces(flats: Sequence[np.ndarray], shards: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The variables by name, from every server's shard as bytes. A variable that is not cut is a view of its shard."""
    parts: dict[str, list[Tensor]] = {}
    for flat, pieces in zip(flats, shards, strict=True):
        for piece, view in zip(pieces, views(to_tensor(flat), pieces), strict=True):
            parts.setdefault(piece.name, []).append(view)  # servers hold the rows in order
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}


def to_array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array, which shares its memory if the tensor is contiguous and on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype in _STANDS_FOR:
        plain = plain.view(_STANDS_FOR[plain.dtype])
    found: np.ndarray = plain.numpy()
    return found


def to_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """The array as a tensor that shares its memory. The memory may be read-only; nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = torch.from_numpy(array)
    return found if dtype is None or found.dtype == dtype else found.view(dtype)


def to_tensors(arrays: Sequence[np.ndarray | None], pieces: Sequence[Piece]) -> list[Tensor | None]:
    """The arrays as tensors, as `to_tensor` does, for a gradient of every piece; None for a piece without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [None if array is None else torch.from_numpy(array) for array in arrays]
    return [
        t if t is None or t.dtype == dtype_of(piece) else t.view(dtype_of(piece))
        for t, piece in zip(found, pieces, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _array_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the arrays that carry tensors of the named dtype."""
    dtype = getattr(torch, name)
    return torch.empty(0, dtype=_STANDS_FOR.get(dtype, dtype)).numpy().dtype


def misfit(array: object, piece: Piece) -> str:
    """Why an array is not a valid gradient of the piece; empty if it is."""
    if not isinstance(array, np.ndarray):
        return f"{piece.name} is a {type(array).__name__}, not an array"
    expected = _array_dtype(piece.dtype)
    if tuple(array.shape) != piece.own_shape or array.dtype != expected:
        return f"{piece.name} is {array.dtype}{list(array.shape)}, not {expected}{list(piece.own_shape)}"
    return ""


def packed(value: object) -> Any:
    """A tensor of optimizer state as (array, name of its dtype); any other value unchanged."""
    return (to_array(value), torch_name(value.dtype)) if torch.is_tensor(value) else value


def unpacked(value: object) -> Any:
    """The inverse of `packed`; a tensor gets memory of its own."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray):
        return to_tensor(value[0], getattr(torch, value[1])).clone()
    return value
