"""Tensors as the flat numpy arrays that travel between workers and servers: no tensor is pickled, none is copied here.

A shard's values are one array of bytes, each piece at a multiple of 64. A push is an array for each piece, of its
shape; types that numpy lacks travel as whole numbers of the same width.
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
from plait.schedule.balance import Piece

_ALIGN = 64
_STANDS_FOR = {torch.bfloat16: torch.int16}


def dtype_of(piece: Piece) -> torch.dtype:
    found: torch.dtype = getattr(torch, piece.dtype)
    return found


def offsets(pieces: Sequence[Piece]) -> list[int]:
    """Where each piece begins in the shard's bytes, and where all end."""
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


def wholes(flats: Sequence[np.ndarray], shards: Sequence[Sequence[Piece]]) -> dict[str, Tensor]:
    """The variables by name from every server's shard as bytes; one that is not cut lies in that very memory."""
    parts: dict[str, list[Tensor]] = {}
    for flat, pieces in zip(flats, shards, strict=True):
        for piece, view in zip(pieces, views(to_tensor(flat), pieces), strict=True):
            parts.setdefault(piece.name, []).append(view)  # servers have the rows in order
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}


def to_array(tensor: Tensor) -> np.ndarray:
    """The same memory, where it lies in order on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype in _STANDS_FOR:
        plain = plain.view(_STANDS_FOR[plain.dtype])
    found: np.ndarray = plain.numpy()
    return found


def to_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """The same memory, which may be one that must not be written to: nothing here does, and torch would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = torch.from_numpy(array)
    return found if dtype is None or found.dtype == dtype else found.view(dtype)


def to_tensors(arrays: Sequence[np.ndarray | None], pieces: Sequence[Piece]) -> list[Tensor | None]:
    """As `to_tensor`, of a gradient of every piece; None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [None if array is None else torch.from_numpy(array) for array in arrays]
    return [
        t if t is None or t.dtype == dtype_of(piece) else t.view(dtype_of(piece))
        for t, piece in zip(found, pieces, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _array_dtype(name: str) -> np.dtype[Any]:
    """The type of the arrays in which tensors of a type travel."""
    dtype = getattr(torch, name)
    return torch.empty(0, dtype=_STANDS_FOR.get(dtype, dtype)).numpy().dtype


def misfit(array: object, piece: Piece) -> str:
    """Why an array is no gradient of the piece; empty where it is one."""
    if not isinstance(array, np.ndarray):
        return f"{piece.name} is a {type(array).__name__}, not an array"
    expected = _array_dtype(piece.dtype)
    if tuple(array.shape) != piece.own_shape or array.dtype != expected:
        return f"{piece.name} is {array.dtype}{list(array.shape)}, not {expected}{list(piece.own_shape)}"
    return ""


def packed(value: Any) -> Any:
    """A tensor of an optimizer's state as (array, its type); anything else as it is."""
    return (to_array(value), torch_name(value.dtype)) if torch.is_tensor(value) else value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`, in memory of its own."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray):
        return to_tensor(value[0], getattr(torch, value[1])).clone()
    return value
