"""Compression of pushed gradients, piece by piece, so that each server decompresses its pieces without the others.

A worker keeps the compression error of each piece and adds it to the piece's next gradient (error feedback; Seide et
al. 2014, "1-Bit Stochastic Gradient Descent"). The errors are the worker's own: they are lost with the worker, and a
worker that joins starts without any.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.cost.wire_bytes import is_smaller
from plait.engine.local_sgd.tensor_compression import compress, decompress, num_bytes
from plait.integrations.ray_servers.arrays import dtype_of, misfit, to_array, to_tensor, to_tensors
from plait.plan.compression import NO_COMPRESSION, Compression
from plait.schedule.variable_placement import Piece


@dataclass(frozen=True)
class Coding:
    """The compression of pushed gradients. `exempt` are glob patterns of the names of variables that are sent whole."""

    compression: Compression = NO_COMPRESSION
    exempt: tuple[str, ...] = ()

    def is_coded(self, piece: Piece) -> bool:
        """Whether a piece is sent compressed: not if it is exempt, or if compression would not make it smaller."""
        exempt = any(fnmatch.fnmatchcase(piece.name, pattern) for pattern in self.exempt)
        return not exempt and is_smaller(piece.own_shape, self.compression, 1)

    def misfit(self, array: object, piece: Piece) -> str:
        """Why an array is not a valid gradient of the piece; empty if it is."""
        if self.compression == NO_COMPRESSION or not self.is_coded(piece):
            return misfit(array, piece)
        if not isinstance(array, np.ndarray):
            return f"{piece.name} is a {type(array).__name__}, not an array"
        expected = num_bytes(piece.own_shape, self.compression)
        if array.dtype != np.uint8 or array.shape != (expected,):
            there = f"{array.dtype}{list(array.shape)}"
            return f"{piece.name} is {there}, not the {expected} bytes of {self.compression}"
        return self._indices_misfit(array, piece)

    def tensors(self, arrays: Sequence[np.ndarray | None], pieces: Sequence[Piece]) -> list[Tensor | None]:
        """The decompressed gradients of the pieces; None for a piece without a gradient."""
        if self.compression == NO_COMPRESSION:
            return to_tensors(arrays, pieces)
        return [
            None if array is None else self._whole(array, piece) for array, piece in zip(arrays, pieces, strict=True)
        ]

    def _whole(self, array: np.ndarray, piece: Piece) -> Tensor:
        if not self.is_coded(piece):
            return to_tensor(array, dtype_of(piece))
        return decompress(to_tensor(array), piece.own_shape, self.compression).to(dtype_of(piece))

    def _indices_misfit(self, array: np.ndarray, piece: Piece) -> str:
        """Why the top-k indices in the array are not valid for the piece; empty if they are."""
        if self.compression.kind == "topk":
            indices = array[: len(array) // 2].view(np.int32)
            if indices.min() < 0 or indices.max() >= piece.num_elements:
                return f"{piece.name} has a number at a place outside of its {piece.num_elements}"
        return ""


class Encoder:
    """Compresses the pushes of one worker, and keeps the compression errors."""

    def __init__(self, coding: Coding, shards: Sequence[Sequence[Piece]]) -> None:
        self._coding, self._shards = coding, shards
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def encode(self, push: Sequence[Sequence[np.ndarray | None]]) -> tuple[list[np.ndarray | None], ...]:
        """The push with the pieces of every server compressed. The arrays of tables, which follow them, are
        unchanged."""
        if self._coding.compression == NO_COMPRESSION:
            return tuple(list(arrays) for arrays in push)
        return tuple(
            [*(self._array(array, piece) for array, piece in zip(arrays, pieces, strict=False)), *arrays[len(pieces) :]]
            for arrays, pieces in zip(push, self._shards, strict=True)
        )

    def _array(self, array: np.ndarray | None, piece: Piece) -> np.ndarray | None:
        if array is None or not self._coding.is_coded(piece):
            return array
        name = f"{piece.name}:{piece.start}"
        gradient = to_tensor(array, dtype_of(piece)).to(torch.float32)
        if name in self._errors:
            gradient = gradient + self._errors[name]
        coded, whole = compress(gradient, self._coding.compression, self._factors, name)
        self._errors[name] = gradient - whole
        return to_array(coded)
