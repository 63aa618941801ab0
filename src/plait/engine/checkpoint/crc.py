"""CRC-32 of a file from those of its blocks, so that blocks can be summed apart, by several threads and in any order.

The CRC of two texts end to end is crc(a) * x^(8 len(b)) + crc(b), in polynomials over bits modulo that of CRC-32
(Adler's crc32_combine in zlib). A polynomial is a number whose highest bit is the lowest power.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine(crcs: Sequence[int], block: int, size: int) -> int:
    """The CRC-32 of `size` bytes whose blocks of `block` bytes, the last one shorter, have these CRCs."""
    total = 0
    for index, crc in enumerate(crcs):
        num = min(block, size - index * block)
        total = _times(_shift(num), total) ^ crc
    return total


def _times(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(maxsize=64)
def _shift(num_bytes: int) -> int:
    """x to the power of 8 num_bytes."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result
