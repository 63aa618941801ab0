"""as_strided, which describes memory, rewritten by ops that describe elements.

The memory of a tensor on a rank may differ from that on one device, so this comes before all other rewrites
(compile/sharding/formats.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.compile.ops.base import OpSpec, View, register
from plait.compile.ops.dims import first_operand, overloads
from plait.errors import CaptureError


def _memory_order(x: Tensor) -> list[int]:
    """Dims of x from the widest stride to the narrowest. Raises CaptureError if its memory has holes or overlaps."""
    order = sorted(range(x.ndim), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    if not x.permute(order).is_contiguous():
        raise CaptureError(
            f"as_strided of a tensor of shape {list(x.shape)} and strides {list(x.stride())}, whose memory has holes or"
            " overlaps; write it with slices or index"
        )
    return order


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The position in memory of each element of the strided view."""
    index = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(n, device=x.device) * step
    return index


def _same_elements(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    """Whether the strided view is all of x, in order."""
    return bool(
        not offset
        and x.is_contiguous()
        and math.prod(size) == x.numel()
        and all(
            n == 1 or step == math.prod(size[d + 1 :]) for d, (n, step) in enumerate(zip(size, stride, strict=True))
        )
    )


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    if _same_elements(x, size, stride, storage_offset):
        return x.view(size)
    memory = x.permute(_memory_order(x)).reshape(-1)
    return memory[_places(x, size, stride, storage_offset)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    if _same_elements(x, size, stride, storage_offset):
        return src.reshape(x.shape)
    order = _memory_order(x)
    memory = x.permute(order)
    places = _places(x, size, stride, storage_offset).reshape(-1)
    flat = memory.reshape(-1).index_put((places,), src.reshape(-1))
    back = [order.index(d) for d in range(x.ndim)]
    return flat.view(memory.shape).permute(back)


register(
    *overloads("as_strided"), spec=OpSpec(linear=first_operand, decompose=_as_strided, reads="memory", view=View.PART)
)
register(*overloads("as_strided_scatter"), spec=OpSpec(decompose=_as_strided_scatter, reads="memory"))
