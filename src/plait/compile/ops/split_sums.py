"""Sums that are computed in parts, as on ranks that share a sum.

One device accumulates in float32 and rounds once. Each rank rounds its own part, by much more than the last bits of the
sum where large parts cancel: the gradient of a bias under a loss of differences between rows is zero, and that of half
of the rows is not. SplitSums rounds the parts of sums in half precision; LargestParts tells how large those of any sum
were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from plait.compile.ops.dims import HALF

aten = torch.ops.aten


class SplitSums(TorchDispatchMode):
    """While entered, computes half-precision sums over rows, columns or a batch in `num_parts`; results differ by
    rounding only."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        split = _SPLIT.get(func)
        if split is None or kwargs or not self._takes(args[0]):
            return func(*args, **(kwargs or {}))
        return split(func, self._num_parts, self._add, *args)

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in HALF

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        return functools.reduce(torch.add, parts)


class LargestParts(SplitSums):
    """While entered, computes sums in `num_parts` in any precision, and notes the largest value of their parts."""

    def __init__(self, num_parts: int) -> None:
        super().__init__(num_parts)
        self._largest: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # the reference keeps the number from a new use

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _ADDITIONS:  # a parameter that is used twice has the sum of two gradients
            self._note(result, [noted for x in args if (noted := self._noted(x)) is not None])
        return result

    def largest(self, gradient: Tensor) -> Tensor:
        """The largest absolute value of a sum and of its parts. `gradient` is the sum or a view of it."""
        own, noted = gradient.abs().max(), self._noted(gradient)
        return own if noted is None else torch.maximum(own, noted.to(own))

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        result = super()._add(parts)
        self._note(result, [part.abs().max() for part in parts if part.numel()])
        return result

    def _noted(self, tensor: object) -> Tensor | None:
        at = tensor.untyped_storage()._cdata if torch.is_tensor(tensor) else None
        return self._largest[at][1] if at in self._largest else None

    def _note(self, result: Tensor, largest: Sequence[Tensor]) -> None:
        if largest:
            storage = result.untyped_storage()
            value = functools.reduce(torch.maximum, (each.to(largest[0]) for each in largest))
            self._largest[storage._cdata] = StorageWeakRef(storage), value


_ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)
Add = Callable[[Sequence[Tensor]], Tensor]
_Gradients = tuple[Tensor | None, ...]


def _product(func: Callable[..., Tensor], num: int, add: Add, one: Tensor, other: Tensor) -> Tensor:
    pairs = zip(one.chunk(num, -1), other.chunk(num, -2), strict=True)
    return add([func(a, b) for a, b in pairs])


def _plus_product(func: Callable[..., Tensor], num: int, add: Add, bias: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first, *rest = zip(one.chunk(num, -1), other.chunk(num, -2), strict=True)
    return add([func(bias, *first), *(aten.mm.default(a, b) for a, b in rest)])


def _sum(func: Callable[..., Tensor], num: int, add: Add, x: Tensor, *how: Any) -> Tensor:
    dims = sorted(dim % x.ndim for dim in how[0]) if how and how[0] and x.ndim else range(x.ndim)
    wide = next((dim for dim in dims if x.shape[dim] > 1), None)
    return func(x, *how) if wide is None else add([func(part, *how) for part in x.chunk(num, wide)])


def _convolution(
    func: Callable[..., _Gradients], num: int, add: Add, gradient: Tensor, x: Tensor, *rest: Any
) -> _Gradients:
    return _of_rows(add, [func(g, a, *rest) for g, a in zip(gradient.chunk(num), x.chunk(num), strict=True)])


def _layer_norm(func: Callable[..., _Gradients], num: int, add: Add, *args: Any) -> _Gradients:
    gradient, x, shape, mean, rstd, *rest = args
    if x.ndim == len(shape):
        return func(*args)
    cut = zip(*(t.chunk(num) for t in (gradient, x, mean, rstd)), strict=True)
    return _of_rows(add, [func(g, a, shape, m, r, *rest) for g, a, m, r in cut])


def _of_rows(add: Add, found: Sequence[_Gradients]) -> _Gradients:
    """An input's gradient, concatenated from those of its rows, and weights' gradients, summed."""
    of_input, *of_weights = zip(*found, strict=True)
    return (
        None if of_input[0] is None else torch.cat(of_input),
        *(None if parts[0] is None else add(parts) for parts in of_weights),
    )


def _rows_of_table(
    func: Callable[..., Tensor], num: int, add: Add, gradient: Tensor, ids: Tensor, *rest: Any
) -> Tensor:
    """An embedding's gradient; if it is scaled by the frequency of ids, it is no sum over parts."""
    if rest[2] or not ids.ndim:
        return func(gradient, ids, *rest)
    return add([func(g, i, *rest) for g, i in zip(gradient.chunk(num), ids.chunk(num), strict=True)])


_SPLIT: dict[OpOverload, Callable[..., Any]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _plus_product,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.convolution_backward.default: _convolution,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.embedding_dense_backward.default: _rows_of_table,
}
