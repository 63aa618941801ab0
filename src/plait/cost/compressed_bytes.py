"""Bytes that a compressor sends for a tensor: how the tensor is cut, what is sent, and whether that is less at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.plan.compression import Compression

BLOCK = 256  # consecutive numbers that share one scale, in codes coarser than bf16


def coded_bytes(num: int, kind: str) -> int:
    """Bytes of `num` numbers after coding. `num` is a multiple of BLOCK."""
    if kind == "bf16":
        return 2 * num
    return num // (2 if kind == "int4" else 1) + num // BLOCK * 4


def num_owned(num: int, size: int) -> int:
    """How many elements of a tensor of `num` each of `size` replicas owns, rounded up to whole blocks.

    Tensors share no block and no ranking of values, so that ranks of a replica with equal values keep equal values.
    """
    return -(-num // (size * BLOCK)) * BLOCK


def num_kept(num: int, compression: Compression) -> int:
    """How many elements topk sends of a tensor of `num`."""
    return math.ceil(compression.fraction * num)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as PowerSGD sees it: the first dim by the product of all others."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // max(rows, 1)


def is_smaller(shape: Sequence[int], compression: Compression, size: int) -> bool:
    """Whether the compressor sends less for a tensor of this shape than an exchange without it."""
    num, kind = math.prod(shape), compression.kind
    if kind == "none":
        return False
    if kind == "powersgd":
        return sum(as_matrix(shape)) * compression.rank < num
    if kind == "topk":
        return 2 * num_kept(num, compression) < num
    return coded_bytes(size * num_owned(num, size), kind) < 4 * num


def bytes_exchanged(shape: Sequence[int], compression: Compression, size: int) -> float:
    """Bytes that each of `size` ranks sends to exchange a tensor of this shape once."""
    num, ring = math.prod(shape), 2 * (size - 1) / size
    if not is_smaller(shape, compression, size):
        return ring * 4 * num
    if compression.kind == "topk":
        return (size - 1) * 8.0 * num_kept(num, compression)
    if compression.kind == "powersgd":
        return ring * 4 * sum(as_matrix(shape)) * compression.rank
    return ring * coded_bytes(size * num_owned(num, size), compression.kind)
