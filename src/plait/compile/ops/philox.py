"""Philox-4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): random words by number.

The words of a group of four elements are a function of a seed and of the group's number, its counter. They are computed
by calls of torch, and on GPUs by one Triton kernel.
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


try:
    import triton
    import triton.language as tl

    AVAILABLE = True
except ImportError:  # torch comes with Triton where it comes with CUDA, but for some platforms
    AVAILABLE = False

_BLOCK = 512  # groups of one program

if AVAILABLE:

    def _philox(  # type: ignore[no-untyped-def]  # Triton reads the annotations, and knows none but its own
        out, rows, columns, seed, stream, salt, limit, num_groups, num_columns, row_stride, width,
        by_pointer: tl.constexpr, compare: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Write four words for each group, or with compare whether each is less than `limit`."""
        group = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = group < num_groups
        row, column = group // num_columns, group % num_columns
        counter = tl.load(rows + row, inside, 0) * width + tl.load(columns + column, inside, 0)
        key = tl.load(seed) if by_pointer else seed
        low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
        third, fourth = low * 0 + stream.to(tl.uint32), low * 0 + salt
        a, b, c, d = tl.philox(key.to(tl.uint64), low, high, third, fourth)
        place = out + row * row_stride + column * 4
        if compare:
            tl.store(place, (a.to(tl.int64) < limit).to(tl.float32).to(out.dtype.element_ty), inside)
            tl.store(place + 1, (b.to(tl.int64) < limit).to(tl.float32).to(out.dtype.element_ty), inside)
            tl.store(place + 2, (c.to(tl.int64) < limit).to(tl.float32).to(out.dtype.element_ty), inside)
            tl.store(place + 3, (d.to(tl.int64) < limit).to(tl.float32).to(out.dtype.element_ty), inside)
        else:
            tl.store(place, a.to(tl.int64), inside)
            tl.store(place + 1, b.to(tl.int64), inside)
            tl.store(place + 2, c.to(tl.int64), inside)
            tl.store(place + 3, d.to(tl.int64), inside)

    _kernel = triton.jit(
        _philox, do_not_specialize=["seed", "stream", "salt", "limit", "num_groups", "num_columns", "row_stride"]
    )


class KernelWords:
    """Words that the kernel computes; see `philox.Words`."""

    def __init__(self, groups: Groups, seed: Seed, stream: int) -> None:
        self._groups, self._seed, self._stream = groups, seed, stream

    def four(self, salt: int) -> Sequence[Tensor]:
        rows, columns = self._groups.rows, self._groups.columns
        out = torch.empty(len(rows), len(columns), 4, dtype=torch.int64, device=rows.device)
        self._launch(out, salt, 0, compare=False)
        return out.unbind(-1)

    def below(self, limit: int, out: Tensor) -> None:
        self._launch(out.view(torch.uint8) if out.dtype == torch.bool else out, 0, limit, compare=True)

    def _launch(self, out: Tensor, salt: int, limit: int, compare: bool) -> None:
        """`out` is [rows, columns, 4], whose last two dims are dense."""
        rows, columns = self._groups.rows, self._groups.columns
        num_groups = len(rows) * len(columns)
        seed = self._seed
        if isinstance(seed, int) and seed >= 1 << 63:
            seed -= 1 << 64
        if num_groups:
            _kernel[((num_groups + _BLOCK - 1) // _BLOCK,)](
                out, rows, columns, seed, self._stream, salt, limit, num_groups, len(columns), out.stride(0),
                self._groups.width, by_pointer=isinstance(seed, Tensor), compare=compare, block=_BLOCK,
            )  # fmt: skip
