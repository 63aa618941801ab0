"""Lowerings of ops that read and write at places that tensors say: embeddings, gathers, scatters and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.typing import ArrayLike

from plait.backends.xla.lowerings.table import CannotLower, aten, is_float, lowers, wide

_Size = int | Sequence[int]  # of windows: one number for both dims, or two
_Weights = npt.NDArray[np.float64]


class _Elements(Protocol):
    """Elements of an array, as its `at` gives them."""

    def set(self, values: Array) -> Array: ...
    def add(self, values: Array) -> Array: ...


def _places(index: Array, size: int) -> Array:
    """Indices that may count from the end, as indices from the start."""
    if index.dtype == jnp.uint8:
        return index.astype(jnp.int32)
    return jnp.where(index < 0, index + size, index)


@lowers(aten.embedding.default)
def _embedding(weight: Array, index: Array, *_: object) -> Array:
    return jnp.take(weight, index, axis=0, mode="clip")


@lowers(aten.embedding_dense_backward.default)
def _embedding_backward(gradient: Array, index: Array, num: int, padding: int, by_frequency: bool) -> Array:
    if by_frequency:
        raise CannotLower("with scale_grad_by_freq=True")
    exact = wide(gradient).reshape(-1, gradient.shape[-1])
    kept = jnp.where(index == padding, num, index).reshape(-1)
    return jnp.zeros((num, gradient.shape[-1]), exact.dtype).at[kept].add(exact, mode="drop")


@lowers(aten.index_select.default)
def _index_select(x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, index, axis=dim, mode="clip")


@lowers(aten.gather.default)
def _gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    window = tuple(slice(0, n) if d != dim % x.ndim else slice(None) for d, n in enumerate(index.shape))
    return jnp.take_along_axis(x[window], index, axis=dim, mode="clip")


def _scatter_at(x: Array, dim: int, index: Array) -> _Elements:
    if x.ndim == 0:
        return x.at[...]
    places = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(x.ndim)]
    places[dim % x.ndim] = index
    return x.at[tuple(places)]


def _source(source: Array, index: Array) -> Array:
    return source[tuple(slice(0, n) for n in index.shape)]


@lowers(aten.scatter.src)
def _scatter(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scatter_at(x, dim, index).set(_source(source, index).astype(x.dtype))


@lowers(aten.scatter.value)
def _scatter_value(x: Array, dim: int, index: Array, value: ArrayLike) -> Array:
    return _scatter_at(x, dim, index).set(jnp.asarray(value, x.dtype))


@lowers(aten.scatter_add.default)
def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scatter_at(wide(x), dim, index).add(wide(_source(source, index)))


_REDUCED = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min", "add": "add", "multiply": "multiply"}


@lowers(aten.scatter_reduce.two, aten.scatter.reduce)
def _scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    if reduce not in _REDUCED or not include_self:
        raise CannotLower(f"with reduce={reduce!r} and include_self={include_self}")
    put: Callable[[Array], Array] = getattr(_scatter_at(wide(x), dim, index), _REDUCED[reduce])
    return put(wide(_source(source, index)))


@lowers(aten.index_add.default)
def _index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: ArrayLike = 1) -> Array:
    at = (*[slice(None)] * (dim % x.ndim), index)
    return wide(x).at[at].add(wide(source) * alpha)


@lowers(aten.index_copy.default)
def _index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(source.astype(x.dtype))


def _indices(x: Array, indices: Sequence[Array | None]) -> tuple[Array | slice, ...]:
    """Indices by tensors, as numpy takes them."""
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        raise CannotLower("by a mask, whose number of results depends on values")
    given = [None if i is None else _places(i, x.shape[d]) for d, i in enumerate(indices)]
    while given and given[-1] is None:
        given.pop()
    return tuple(slice(None) if i is None else i for i in given)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_indices(x, indices)]


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == jnp.bool_ and values.size == 1:
        mask = indices[0].reshape(*indices[0].shape, *[1] * (x.ndim - indices[0].ndim))
        return jnp.where(mask, (x + values if accumulate else values).astype(x.dtype), x)
    at = wide(x).at[_indices(x, indices)] if accumulate else x.at[_indices(x, indices)]
    return at.add(wide(values)) if accumulate else at.set(values.astype(x.dtype))


def _windows(
    x: Array, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], fill: float,
    ceil: bool,
) -> tuple[list[Array], list[int], list[tuple[int, int]]]:  # fmt: skip
    """For each place within a window of the last two dims: its elements, over all windows.

    Returns the elements, the padded sizes, and the place of each in its window.
    """
    height, width = x.shape[-2:]
    nums, sizes = [], []
    for n, k, s, p, d in zip((height, width), size, stride, padding, dilation, strict=True):
        span = d * (k - 1) + 1
        num = -(-(n + 2 * p - span) // s) + 1 if ceil else (n + 2 * p - span) // s + 1
        if ceil and (num - 1) * s >= n + p:  # the last window begins inside
            num -= 1
        nums.append(num)
        sizes.append(max(n + 2 * p, (num - 1) * s + span))
    edges = [(0, 0, 0)] * (x.ndim - 2)
    edges += [(p, total - n - p, 0) for p, total, n in zip(padding, sizes, (height, width), strict=True)]
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), edges)
    found, places = [], []
    for i in range(size[0]):
        for j in range(size[1]):
            top, left = i * dilation[0], j * dilation[1]
            rows = slice(top, top + (nums[0] - 1) * stride[0] + 1, stride[0])
            columns = slice(left, left + (nums[1] - 1) * stride[1] + 1, stride[1])
            found.append(padded[..., rows, columns])
            places.append((top, left))
    return found, nums, places


def _twice(value: Any, default: tuple[int, int] | None = None) -> tuple[int, int]:
    value = default if value is None or (isinstance(value, Sequence) and not value) else value
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool(
    x: Array, kernel: _Size, stride: _Size = (), padding: _Size = 0, dilation: _Size = 1, ceil_mode: bool = False
) -> tuple[Array, Array]:
    size, pad, dil = _twice(kernel), _twice(padding), _twice(dilation)
    step = _twice(stride, size)
    lowest = -jnp.inf if is_float(x) else jnp.iinfo(x.dtype).min
    found, nums, places = _windows(x, size, step, pad, dil, lowest, ceil_mode)
    windows = jnp.stack(found)
    best = jnp.argmax(windows, axis=0)
    tops, lefts = (jnp.asarray([place[d] for place in places])[best] for d in (0, 1))
    rows = tops + jnp.arange(nums[0])[:, None] * step[0] - pad[0]
    columns = lefts + jnp.arange(nums[1]) * step[1] - pad[1]
    return jnp.max(windows, axis=0), rows * x.shape[-1] + columns


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(gradient: Array, x: Array, *how: Array) -> Array:
    return _put_back(gradient, x, how[-1])


@lowers(aten.adaptive_max_pool2d_backward.default)
def _put_back(gradient: Array, x: Array, indices: Array) -> Array:
    """Adds each element of `gradient` at its flat place in the last two dims of zeros like `x`."""
    lead = x.shape[:-2]
    flat = jnp.zeros((*lead, x.shape[-2] * x.shape[-1]), wide(gradient).dtype)
    there = indices.reshape(*lead, -1)
    return _scatter_at(flat, -1, there).add(wide(gradient).reshape(*lead, -1)).reshape(x.shape)


@lowers(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(x: Array, size: Sequence[int]) -> tuple[Array, Array]:
    height, width = x.shape[-2:]
    if height % size[0] or width % size[1]:
        raise CannotLower(f"of {height} x {width} to {size[0]} x {size[1]}, which does not divide it")
    return _max_pool(x, (height // size[0], width // size[1]))


@lowers(aten.avg_pool2d.default)
def _avg_pool(
    x: Array, kernel: _Size, stride: _Size = (), padding: _Size = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    size, pad = _twice(kernel), _twice(padding)
    step = _twice(stride, size)
    found, _, _ = _windows(wide(x), size, step, pad, (1, 1), 0, ceil_mode)
    if divisor_override is not None:
        return sum(found) / divisor_override
    counted = jnp.ones(x.shape[-2:], wide(x).dtype)
    if count_include_pad:
        counted = jnp.pad(counted, [(p, p) for p in pad], constant_values=1)
        counts, _, _ = _windows(counted, size, step, (0, 0), (1, 1), 0, ceil_mode)
    else:
        counts, _, _ = _windows(counted, size, step, pad, (1, 1), 0, ceil_mode)
    return sum(found) / sum(counts)


@lowers(aten.avg_pool2d_backward.default)
def _avg_pool_backward(gradient: Array, x: Array, *how: Any) -> Array:
    _, pull = jax.vjp(lambda v: _avg_pool(v, *how), wide(x))
    pulled: Array = pull(wide(gradient))[0]
    return pulled


def _resizing(size: int, new: int, scale: float | None, linear: bool, align: bool = False) -> _Weights:
    """[new, size]: how much of each element along a dim goes into each element of the resized dim."""
    found = np.zeros((new, size))
    places = np.arange(new)
    if not linear:
        factor = 1 / scale if scale else size / new
        found[places, np.minimum((places * factor).astype(int), size - 1)] = 1
        return found
    if align:
        at = places * ((size - 1) / (new - 1) if new > 1 else 0.0)
    else:
        at = np.maximum((places + 0.5) * (1 / scale if scale else size / new) - 0.5, 0)
    low = np.minimum(at.astype(int), size - 1)
    high = np.minimum(low + 1, size - 1)
    np.add.at(found, (places, low), 1 - (at - low))
    np.add.at(found, (places, high), at - low)
    return found


def _resized(x: Array, rows: _Weights, columns: _Weights) -> Array:
    exact = wide(x)
    return jnp.einsum("...hw,ih,jw->...ij", exact, rows.astype(exact.dtype), columns.astype(exact.dtype))


@lowers(aten.upsample_nearest2d.default)
def _nearest(x: Array, size: Sequence[int], scale_h: float | None = None, scale_w: float | None = None) -> Array:
    height, width = x.shape[-2:]
    return _resized(x, _resizing(height, size[0], scale_h, False), _resizing(width, size[1], scale_w, False))


@lowers(aten.upsample_nearest2d_backward.default)
def _nearest_backward(
    gradient: Array, size: Sequence[int], given: Sequence[int], scale_h: float | None = None,
    scale_w: float | None = None,
) -> Array:  # fmt: skip
    height, width = given[-2:]
    rows, columns = _resizing(height, size[0], scale_h, False), _resizing(width, size[1], scale_w, False)
    return _resized(gradient, rows.T, columns.T)


@lowers(aten.upsample_bilinear2d.default)
def _bilinear(
    x: Array, size: Sequence[int], align: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Array:
    height, width = x.shape[-2:]
    rows = _resizing(height, size[0], scale_h, True, align)
    return _resized(x, rows, _resizing(width, size[1], scale_w, True, align))


@lowers(aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(
    gradient: Array, size: Sequence[int], given: Sequence[int], align: bool, scale_h: float | None = None,
    scale_w: float | None = None,
) -> Array:  # fmt: skip
    height, width = given[-2:]
    rows = _resizing(height, size[0], scale_h, True, align)
    return _resized(gradient, rows.T, _resizing(width, size[1], scale_w, True, align).T)


@lowers(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool(x: Array, size: Sequence[int]) -> Array:
    """Means over windows that may differ in size by one: a product with a matrix along each of the two dims."""
    rows, columns = (_means(n, new) for n, new in zip(x.shape[-2:], size, strict=True))
    return _resized(x, rows, columns)


def _means(size: int, new: int) -> _Weights:
    """[new, size]: the weight of each element in the mean over each window."""
    found = np.zeros((new, size))
    for i in range(new):
        start, stop = i * size // new, -(-(i + 1) * size // new)
        found[i, start:stop] = 1 / (stop - start)
    return found


@lowers(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool_backward(gradient: Array, x: Array) -> Array:
    rows, columns = (_means(n, new).T for n, new in zip(x.shape[-2:], gradient.shape[-2:], strict=True))
    return _resized(gradient, rows, columns)


@lowers(
    aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)  # fmt: skip
def _replication_pad_backward(gradient: Array, x: Array, padding: Sequence[int]) -> Array:
    edges = [(0, 0)] * x.ndim
    for number in range(len(padding) // 2):
        edges[-1 - number] = (padding[2 * number], padding[2 * number + 1])
    _, pull = jax.vjp(lambda v: jnp.pad(v, edges, mode="edge"), wide(x))
    pulled: Array = pull(wide(gradient))[0]
    return pulled
