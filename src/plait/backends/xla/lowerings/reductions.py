"""Lowerings of sums and other reductions, of scans along a dim, and of sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plait.backends.xla.lowerings.table import Result, aten, is_float, lowers, wide


def _dims(dim: Any) -> tuple[int, ...] | None:
    """The dims of a reduction; None for all of them."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else (dim,)


def _summed(x: Any, dtype: Any) -> Any:
    """The tensor in the dtype in which it is added up."""
    if not is_float(x):
        return x.astype(dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.int64)
    return wide(x.astype(jnp.promote_types(x.dtype, dtype)))


@lowers(aten.sum.default, aten.sum.dim_IntList, result=True)
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, result: Result, **_: Any) -> Any:
    return jnp.sum(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.mean.default, aten.mean.dim, result=True)
def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, result: Result, **_: Any) -> Any:
    return jnp.mean(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.prod.default, aten.prod.dim_int, result=True)
def _prod(x: Any, dim: Any = None, keepdim: bool = False, *, result: Result, **_: Any) -> Any:
    return jnp.prod(_summed(x, result.dtype), _dims(dim), keepdims=keepdim)


@lowers(aten.amax.default)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, _dims(dim), keepdims=keepdim)


@lowers(aten.amin.default)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(x, _dims(dim), keepdims=keepdim)


@lowers(aten.max.default)
def _max(x: Any) -> Any:
    return jnp.max(x)


@lowers(aten.min.default)
def _min(x: Any) -> Any:
    return jnp.min(x)


@lowers(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim)


@lowers(aten.min.dim)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.min(x, dim, keepdims=keepdim), jnp.argmin(x, dim, keepdims=keepdim)


@lowers(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, dim, keepdims=keepdim)


@lowers(aten.argmin.default)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, dim, keepdims=keepdim)


def _dims_or_none(dim: Any) -> Any:
    """For `any` and `all`, of which an empty list is no dim."""
    return () if dim == [] else _dims(dim)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, _dims_or_none(dim), keepdims=keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, _dims_or_none(dim), keepdims=keepdim)


@lowers(aten.logsumexp.default)
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(wide(x), axis=_dims(dim), keepdims=keepdim)


@lowers(aten._log_softmax.default)
def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(wide(x), axis=dim)


@lowers(aten._softmax.default)
def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(wide(x), axis=dim)


@lowers(aten.cumsum.default, result=True)
def _cumsum(x: Any, dim: int, *, result: Result, **_: Any) -> Any:
    return jnp.cumsum(_summed(x, result.dtype), dim) if x.ndim else x


@lowers(aten.cumprod.default, result=True)
def _cumprod(x: Any, dim: int, *, result: Result, **_: Any) -> Any:
    return jnp.cumprod(_summed(x, result.dtype), dim) if x.ndim else x


@lowers(aten.cummax.default)
def _cummax(x: Any, dim: int) -> Any:
    return _running(x, dim, lambda a, b: b >= a)


@lowers(aten.cummin.default)
def _cummin(x: Any, dim: int) -> Any:
    return _running(x, dim, lambda a, b: b <= a)


def _running(x: Any, dim: int, takes: Any) -> Any:
    """The best value so far along a dim, and its index: the last one of equal ones, as in torch."""
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)

    def better(one: Any, other: Any) -> Any:
        taken = takes(one[0], other[0])
        return jnp.where(taken, other[0], one[0]), jnp.where(taken, other[1], one[1])

    return lax.associative_scan(better, (x, places), axis=dim % x.ndim)


@lowers(aten.sort.default, aten.sort.stable)
def _sort(x: Any, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    if args:
        dim, descending = (*args, descending)[:2]
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@lowers(aten.argsort.default)
def _argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return jnp.argsort(x, axis=dim, stable=True, descending=descending)


@lowers(aten.topk.default)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    order = lax.slice_in_dim(jnp.argsort(x, axis=dim, stable=True, descending=largest), 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, order, dim), order


@lowers(aten.histc.default)
def _histc(x: Any, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    lowest, highest = (jnp.min(x), jnp.max(x)) if low == high == 0 else (low, high)
    values = wide(x)
    place = jnp.floor((values - lowest) * (bins / (highest - lowest))).astype(jnp.int64)
    place = jnp.where(values == highest, bins - 1, place)
    inside = (values >= lowest) & (values <= highest)
    return jnp.zeros(bins, values.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")


@lowers(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_of_logits(x: Any, y: Any, weight: Any = None, positive: Any = None, reduction: int = 1) -> Any:
    x, y = wide(x), wide(y)
    found = (1 - y) * x + (1 if positive is None else 1 + (positive - 1) * y) * jax.nn.softplus(-x)
    found = found if weight is None else found * weight
    return (found, jnp.mean(found), jnp.sum(found))[reduction]


@lowers(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Any) -> Any:
    return jax.nn.log_sigmoid(wide(x)), jnp.exp(-jnp.abs(wide(x)))
