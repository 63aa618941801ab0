"""Philox-4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): random words by number.

The words of a group of four elements are a function of a seed and of the group's number, its counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Seed = int | Tensor  # 64 bits; a tensor is an int64 of no dims on the device that draws

_LOW = 0xFFFFFFFF
ROUNDS, MULTIPLIERS, STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


class Words(Protocol):
    """The random words of a block of groups: 32 bits for each element."""

    def four(self, salt: int) -> Sequence[Tensor]:
        """For each of a group's four elements an int64 tensor with a number of each group, from 0 to 2**32 - 1. For
        further words of the same elements, `salt` is another number."""

    def below(self, limit: int, out: Tensor) -> None:
        """Write into `out`, of shape [..., 4], whether words are less than `limit`, which is at most 2**32."""


@dataclass(frozen=True)
class Groups:
    """The groups of four that a part of a tensor needs: each of `columns` in each of `rows`, which are int64 tensors;
    `width` is the number of groups in a whole row."""

    rows: Tensor
    columns: Tensor
    width: int


class CalledWords:
    """Words that calls of torch compute: as many for a large block as for a small one."""

    def __init__(self, groups: Groups, seed: Seed, stream: int) -> None:
        self._counters = groups.rows[:, None] * groups.width + groups.columns
        self._stream = stream
        low, high = seed & _LOW, (seed >> 32) & _LOW
        self._keys = [
            ((low + step * STEPS[0]) & _LOW, (high + step * STEPS[1]) & _LOW)
            for step in range(ROUNDS)
        ]  # fmt: skip

    def four(self, salt: int) -> Sequence[Tensor]:
        # A word is the lower half of an int64, and only where it is multiplied need the upper half be 0.
        a = self._counters & _LOW
        b = self._counters >> 32
        c, d = torch.full_like(a, self._stream), torch.full_like(a, salt)
        p, q = torch.empty_like(a), torch.empty_like(a)
        for one, two in self._keys:
            torch.mul(a, MULTIPLIERS[0], out=p)
            torch.mul(c, MULTIPLIERS[1], out=q)
            torch.bitwise_right_shift(q, 32, out=a).bitwise_xor_(b).bitwise_xor_(one).bitwise_and_(_LOW)
            torch.bitwise_right_shift(p, 32, out=c).bitwise_xor_(d).bitwise_xor_(two).bitwise_and_(_LOW)
            b, d, p, q = q, p, d, b
        return a, b.bitwise_and_(_LOW), c, d.bitwise_and_(_LOW)

    def below(self, limit: int, out: Tensor) -> None:
        for i, word in enumerate(self.four(0)):
            torch.lt(word, limit, out=out[..., i])
