"""Lowerings of sums and other reductions, of scans along a dim, and of sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from plait.backends.xla.lowerings.table import Result, aten, is_float, lowers, wide
from plait.compile.ops.dims import Dims

_Indexed = tuple[Array, Array]  # values, and where in the tensor they are


def _dims(dim: Dims) -> tuple[int, ...] | None:
    """The dims of a reduction; None for all of them."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else (dim,)


def _summed(x: Array, dtype: np.dtype[Any]) -> Array:
    """The tensor in the dtype in which it is added up."""
    if not is_float(x):
        return x.astype(dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.int64)
    return wide(x.astype(jnp.promote_types(x.dtype, dtype)))


@lowers(aten.sum.default, aten.sum.dim_IntList, result=True)
def _sum(x: Array, dim: Dims = None, keepdim: bool = False, *, result: Result, **_: object) -> Array:
    return jnp.sum(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.mean.default, aten.mean.dim, result=True)
def _mean(x: Array, dim: Dims = None, keepdim: bool = False, *, result: Result, **_: object) -> Array:
    return jnp.mean(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.prod.default, aten.prod.dim_int, result=True)
def _prod(x: Array, dim: Dims = None, keepdim: bool = False, *, result: Result, **_: object) -> Array:
    return jnp.prod(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.amax.default)
def _amax(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.max(x, _dims(dim), keepdims=keepdim)


@lowers(aten.amin.default)
def _amin(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.min(x, _dims(dim), keepdims=keepdim)


@lowers(aten.max.default)
def _max(x: Array) -> Array:
    return jnp.max(x)


@lowers(aten.min.default)
def _min(x: Array) -> Array:
    return jnp.min(x)


@lowers(aten.max.dim)
def _max_dim(x: Array, dim: int, keepdim: bool = False) -> _Indexed:
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim)


@lowers(aten.min.dim)
def _min_dim(x: Array, dim: int, keepdim: bool = False) -> _Indexed:
    return jnp.min(x, dim, keepdims=keepdim), jnp.argmin(x, dim, keepdims=keepdim)


@lowers(aten.argmax.default)
def _argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmax(x, dim, keepdims=keepdim)


@lowers(aten.argmin.default)
def _argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return jnp.argmin(x, dim, keepdims=keepdim)


def _dims_or_none(dim: Dims) -> tuple[int, ...] | None:
    """For `any` and `all`, of which an empty list is no dim."""
    return () if dim == [] else _dims(dim)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.any(x, _dims_or_none(dim), keepdims=keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _all(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.all(x, _dims_or_none(dim), keepdims=keepdim)


@lowers(aten.logsumexp.default)
def _logsumexp(x: Array, dim: Dims, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(wide(x), axis=_dims(dim), keepdims=keepdim)


@lowers(aten._log_softmax.default)
def _log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.log_softmax(wide(x), axis=dim)


@lowers(aten._softmax.default)
def _softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.softmax(wide(x), axis=dim)


@lowers(aten.cumsum.default, result=True)
def _cumsum(x: Array, dim: int, *, result: Result, **_: object) -> Array:
    return jnp.cumsum(_summed(x, result.dtype), dim) if x.ndim else x


@lowers(aten.cumprod.default, result=True)
def _cumprod(x: Array, dim: int, *, result: Result, **_: object) -> Array:
    return jnp.cumprod(_summed(x, result.dtype), dim) if x.ndim else x


@lowers(aten.cummax.default)
def _cummax(x: Array, dim: int) -> _Indexed:
    return _running(x, dim, lambda a, b: b >= a)


@lowers(aten.cummin.default)
def _cummin(x: Array, dim: int) -> _Indexed:
    return _running(x, dim, lambda a, b: b <= a)


def _running(x: Array, dim: int, takes: Callable[[Array, Array], Array]) -> _Indexed:
    """The best value so far along a dim, and its index: the last one of equal ones, as in torch."""
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)

    def better(one: _Indexed, other: _Indexed) -> _Indexed:
        taken = takes(one[0], other[0])
        return jnp.where(taken, other[0], one[0]), jnp.where(taken, other[1], one[1])

    found: _Indexed = lax.associative_scan(better, (x, places), axis=dim % x.ndim)
    return found


@lowers(aten.sort.default, aten.sort.stable)
def _sort(x: Array, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> _Indexed:
    if args:
        dim, descending = (*args, descending)[:2]
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@lowers(aten.argsort.default)
def _argsort(x: Array, dim: int = -1, descending: bool = False) -> Array:
    return jnp.argsort(x, axis=dim, stable=True, descending=descending)


@lowers(aten.topk.default)
def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> _Indexed:
    order = lax.slice_in_dim(jnp.argsort(x, axis=dim, stable=True, descending=largest), 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, order, dim), order


@lowers(aten.histc.default)
def _histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    lowest, highest = (jnp.min(x), jnp.max(x)) if low == high == 0 else (low, high)
    values = wide(x)
    place = jnp.floor((values - lowest) * (bins / (highest - lowest))).astype(jnp.int64)
    place = jnp.where(values == highest, bins - 1, place)
    inside = (values >= lowest) & (values <= highest)
    return jnp.zeros(bins, values.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")


@lowers(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_of_logits(
    x: Array, y: Array, weight: Array | None = None, positive: Array | None = None, reduction: int = 1
) -> Array:
    x, y = wide(x), wide(y)
    found = (1 - y) * x + (1 if positive is None else 1 + (positive - 1) * y) * jax.nn.softplus(-x)
    found = found if weight is None else found * weight
    return (found, jnp.mean(found), jnp.sum(found))[reduction]


@lowers(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Array) -> tuple[Array, Array]:
    return jax.nn.log_sigmoid(wide(x)), jnp.exp(-jnp.abs(wide(x)))
