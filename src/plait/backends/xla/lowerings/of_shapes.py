"""Lowerings of views, and of ops that put tensors together or take parts of them at places that the graph knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from plait.backends.xla.lowerings.table import Result, aten, lowers


@lowers(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten._reshape_alias.default, aten.view_copy.default,
    aten.flatten.using_ints, aten.unflatten.int, result=True,
)  # fmt: skip
def _view(x: Any, *_: Any, result: Result, **__: Any) -> Any:
    return jnp.reshape(x, result.shape)


@lowers(aten.expand.default, aten.broadcast_to.default, aten.expand_copy.default, result=True)
def _expand(x: Any, *_: Any, result: Result, **__: Any) -> Any:
    return jnp.broadcast_to(x, result.shape)


@lowers(aten.permute.default)
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, dims)


@lowers(aten.transpose.int)
def _transpose(x: Any, one: int, other: int) -> Any:
    return x if x.ndim == 0 else jnp.swapaxes(x, one, other)


@lowers(aten.t.default)
def _t(x: Any) -> Any:
    return x.T


@lowers(aten.slice.Tensor)
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return x[_at(x, dim, slice(start, end, step))]


def _at(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """An index that takes `index` along one dim, and all of the others."""
    return (*[slice(None)] * (dim % x.ndim), index)


@lowers(aten.slice_scatter.default)
def _slice_scatter(
    x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x.at[_at(x, dim, slice(start, end, step))].set(source.astype(x.dtype))


@lowers(aten.slice_backward.default)
def _slice_backward(gradient: Any, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    return _slice_scatter(jnp.zeros(sizes, gradient.dtype), gradient, dim, start, end, step)


@lowers(aten.select.int)
def _select(x: Any, dim: int, index: int) -> Any:
    return x[_at(x, dim, index)]


@lowers(aten.select_scatter.default)
def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[_at(x, dim, index)].set(source.astype(x.dtype))


@lowers(aten.select_backward.default)
def _select_backward(gradient: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    return _select_scatter(jnp.zeros(sizes, gradient.dtype), gradient, dim, index)


@lowers(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim)) if size else (x,)


@lowers(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, aten.split.sizes)
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return tuple(jnp.split(x, ends, axis=dim))


@lowers(aten.chunk.default, aten.unsafe_chunk.default)
def _chunk(x: Any, num: int, dim: int = 0) -> Any:
    return _split(x, max(1, -(-x.shape[dim] // num)), dim)


@lowers(aten.unbind.int)
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(x[_at(x, dim, i)] for i in range(x.shape[dim]))


@lowers(aten.cat.default, result=True)
def _cat(tensors: Sequence[Any], dim: int = 0, *, result: Result) -> Any:
    rank = len(result.shape)
    found = [t.astype(result.dtype) for t in tensors if t.ndim == rank]  # torch lets empty 1-d tensors be among them
    return jnp.concatenate(found, axis=dim)


@lowers(aten.stack.default)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(tensors, axis=dim)


@lowers(aten.repeat.default)
def _repeat(x: Any, times: Sequence[int]) -> Any:
    return jnp.tile(x, times)


@lowers(aten.flip.default)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, dims)


@lowers(aten.roll.default)
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowers(aten.constant_pad_nd.default)
def _constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    config = [(0, 0, 0)] * x.ndim
    for number in range(len(pad) // 2):
        config[-1 - number] = (pad[2 * number], pad[2 * number + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


@lowers(aten.tril.default)
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers(aten.triu.default)
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers(aten.diag_embed.default, result=True)
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1, *, result: Result) -> Any:
    return _put_diagonal(jnp.zeros(result.shape, x.dtype), x, offset, dim1, dim2)


@lowers(aten.diagonal_backward.default)
def _diagonal_backward(gradient: Any, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    return _put_diagonal(jnp.zeros(sizes, gradient.dtype), gradient, offset, dim1, dim2)


@lowers(aten.diagonal_scatter.default)
def _put_diagonal(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    index = jnp.arange(source.shape[-1])
    rows, columns = index + max(-offset, 0), index + max(offset, 0)
    return jnp.moveaxis(moved.at[..., rows, columns].set(source.astype(x.dtype)), (-2, -1), (dim1, dim2))


@lowers(aten.unfold.default)
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    dim = dim % x.ndim
    num = (x.shape[dim] - size) // step + 1
    index = jnp.arange(num)[:, None] * step + jnp.arange(size)
    return jnp.moveaxis(jnp.take(x, index, axis=dim), dim + 1, -1)


@lowers(aten.pixel_shuffle.default)
def _pixel_shuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    moved = jnp.moveaxis(split, (-4, -3), (-3, -1))
    return moved.reshape(*lead, channels // factor**2, height * factor, width * factor)


@lowers(aten.pixel_unshuffle.default)
def _pixel_unshuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    moved = jnp.moveaxis(split, (-3, -1), (-4, -3))
    return moved.reshape(*lead, channels * factor**2, height // factor, width // factor)


def num_elements(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of this shape."""
    return math.prod(shape)
