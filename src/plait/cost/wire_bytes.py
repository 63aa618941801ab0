"""The bytes that ranks send for tensors that are compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.cost.collective_time import CollectiveKind
from plait.plan.compression import Compression

BLOCK = 256  # consecutive elements that share one scale, in codes coarser than bf16


def coded_bytes(num: int, kind: str) -> int:
    """Bytes of `num` elements after coding. `num` is a multiple of BLOCK."""
    if kind == "bf16":
        return 2 * num
    return num // (2 if kind == "int4" else 1) + num // BLOCK * 4


def num_owned(num: int, size: int) -> int:
    """The number of elements of a tensor of `num` that each of `size` replicas owns, rounded up to whole blocks.

    Tensors share no block and no ranking of values, so that ranks of a replica with equal values keep equal values.
    """
    return -(-num // (size * BLOCK)) * BLOCK


def num_kept(num: int, compression: Compression) -> int:
    """The number of elements that topk sends of a tensor of `num`."""
    return math.ceil(compression.fraction * num)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the matrix that PowerSGD makes of a tensor: the first dim, and the product of all others."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // max(rows, 1)


def is_smaller(shape: Sequence[int], compression: Compression, size: int) -> bool:
    """Whether the compressor sends fewer bytes for a tensor of this shape than an exchange without it."""
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
    num = math.prod(shape)
    if not is_smaller(shape, compression, size):
        return CollectiveKind.ALL_REDUCE.sent_bytes(4 * num, size)
    if compression.kind == "topk":
        return (size - 1) * 8.0 * num_kept(num, compression)
    if compression.kind == "powersgd":
        return CollectiveKind.ALL_REDUCE.sent_bytes(4 * sum(as_matrix(shape)) * compression.rank, size)
    return CollectiveKind.ALL_REDUCE.sent_bytes(coded_bytes(size * num_owned(num, size), compression.kind), size)
