"""Lowerings of views, and of ops that put tensors together or take parts of them at places that the graph knows."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from plait.backends.xla.lowerings.table import Result, aten, lowers


@lowers(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten._reshape_alias.default, aten.view_copy.default,
    aten.flatten.using_ints, aten.unflatten.int, result=True,
)  # fmt: skip
def _view(x: Array, *_: object, result: Result, **__: object) -> Array:
    return jnp.reshape(x, result.shape)


@lowers(aten.expand.default, aten.broadcast_to.default, aten.expand_copy.default, result=True)
def _expand(x: Array, *_: object, result: Result, **__: object) -> Array:
    return jnp.broadcast_to(x, result.shape)


@lowers(aten.permute.default)
def _permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, dims)


@lowers(aten.transpose.int)
def _transpose(x: Array, one: int, other: int) -> Array:
    return x if x.ndim == 0 else jnp.swapaxes(x, one, other)


@lowers(aten.t.default)
def _t(x: Array) -> Array:
    return x.T


@lowers(aten.slice.Tensor)
def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[_at(x, dim, slice(start, end, step))]


def _at(x: Array, dim: int, index: int | slice) -> tuple[int | slice, ...]:
    """An index that takes `index` along one dim, and all of the others."""
    return (*[slice(None)] * (dim % x.ndim), index)


@lowers(aten.slice_scatter.default)
def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x.at[_at(x, dim, slice(start, end, step))].set(source.astype(x.dtype))


@lowers(aten.slice_backward.default)
def _slice_backward(gradient: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    return _slice_scatter(jnp.zeros(sizes, gradient.dtype), gradient, dim, start, end, step)


@lowers(aten.select.int)
def _select(x: Array, dim: int, index: int) -> Array:
    return x[_at(x, dim, index)]


@lowers(aten.select_scatter.default)
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[_at(x, dim, index)].set(source.astype(x.dtype))


@lowers(aten.select_backward.default)
def _select_backward(gradient: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    return _select_scatter(jnp.zeros(sizes, gradient.dtype), gradient, dim, index)


@lowers(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(x: Array, size: int, dim: int = 0) -> tuple[Array, ...]:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim)) if size else (x,)


@lowers(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, aten.split.sizes)
def _split_with_sizes(x: Array, sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return tuple(jnp.split(x, ends, axis=dim))


@lowers(aten.chunk.default, aten.unsafe_chunk.default)
def _chunk(x: Array, num: int, dim: int = 0) -> tuple[Array, ...]:
    return _split(x, max(1, -(-x.shape[dim] // num)), dim)


@lowers(aten.unbind.int)
def _unbind(x: Array, dim: int = 0) -> tuple[Array, ...]:
    return tuple(x[_at(x, dim, i)] for i in range(x.shape[dim]))


@lowers(aten.cat.default, result=True)
def _cat(tensors: Sequence[Array], dim: int = 0, *, result: Result) -> Array:
    rank = len(result.shape)
    found = [t.astype(result.dtype) for t in tensors if t.ndim == rank]  # torch lets empty 1-d tensors be among them
    return jnp.concatenate(found, axis=dim)


@lowers(aten.stack.default)
def _stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(tensors, axis=dim)


@lowers(aten.repeat.default)
def _repeat(x: Array, times: Sequence[int]) -> Array:
    return jnp.tile(x, times)


@lowers(aten.flip.default)
def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, dims)


@lowers(aten.roll.default)
def _roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowers(aten.constant_pad_nd.default)
def _constant_pad(x: Array, pad: Sequence[int], value: ArrayLike = 0) -> Array:
    config = [(0, 0, 0)] * x.ndim
    for number in range(len(pad) // 2):
        config[-1 - number] = (pad[2 * number], pad[2 * number + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


@lowers(aten.tril.default)
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lowers(aten.triu.default)
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    found: Array = jnp.diagonal(x, offset, dim1, dim2)
    return found


@lowers(aten.diag_embed.default, result=True)
def _diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1, *, result: Result) -> Array:
    return _put_diagonal(jnp.zeros(result.shape, x.dtype), x, offset, dim1, dim2)


@lowers(aten.diagonal_backward.default)
def _diagonal_backward(gradient: Array, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Array:
    return _put_diagonal(jnp.zeros(sizes, gradient.dtype), gradient, offset, dim1, dim2)


@lowers(aten.diagonal_scatter.default)
def _put_diagonal(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    index = jnp.arange(source.shape[-1])
    rows, columns = index + max(-offset, 0), index + max(offset, 0)
    return jnp.moveaxis(moved.at[..., rows, columns].set(source.astype(x.dtype)), (-2, -1), (dim1, dim2))


@lowers(aten.unfold.default)
def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    dim = dim % x.ndim
    num = (x.shape[dim] - size) // step + 1
    index = jnp.arange(num)[:, None] * step + jnp.arange(size)
    return jnp.moveaxis(jnp.take(x, index, axis=dim), dim + 1, -1)


@lowers(aten.pixel_shuffle.default)
def _pixel_shuffle(x: Array, factor: int) -> Array:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    moved = jnp.moveaxis(split, (-4, -3), (-3, -1))
    return moved.reshape(*lead, channels // factor**2, height * factor, width * factor)


@lowers(aten.pixel_unshuffle.default)
def _pixel_unshuffle(x: Array, factor: int) -> Array:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    moved = jnp.moveaxis(split, (-3, -1), (-4, -3))
    return moved.reshape(*lead, channels * factor**2, height // factor, width // factor)
