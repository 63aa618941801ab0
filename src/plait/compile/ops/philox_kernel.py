"""The random words of compile/ops/philox.py by one Triton kernel, for GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.compile.ops.philox import Groups, Seed

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
