"""Lowerings of matrix products, convolutions, Fourier transforms, and products with the weights of experts
(compile/ops/experts.py), of which rows without an expert give zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from jax.typing import DTypeLike

from plait.backends.xla.lowerings.table import CannotLower, Result, aten, is_float, lowers, wide
from plait.compile.ops.dims import Dims
from plait.compile.ops.experts import EXPERT_ADDMM, EXPERT_MM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS


def accumulated(x: Array) -> DTypeLike:
    """The dtype in which a product of `x` is added up."""
    return jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, preferred_element_type=accumulated(x))


@lowers(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.matmul.default)
def _mm(x: Array, y: Array) -> Array:
    return _matmul(x, y)


@lowers(aten.linear.default)
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    found = _matmul(x, weight.T)
    return found if bias is None else found + bias.astype(found.dtype)


@lowers(aten.vdot.default)
def _vdot(x: Array, y: Array) -> Array:
    return _matmul(jnp.conj(x), y)


@lowers(aten.mm.dtype, aten.bmm.dtype)
def _mm_dtype(x: Array, y: Array, dtype: torch.dtype) -> Array:
    return _matmul(x, y)


@lowers(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def _addmm(bias: Array, x: Array, y: Array, beta: float = 1, alpha: float = 1) -> Array:
    product = _matmul(x, y)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta).astype(product.dtype)


@lowers(aten._grouped_mm.default)
def _grouped_mm(
    x: Array, y: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: torch.dtype | None = None
) -> Array:
    if offs is None or bias is not None:
        raise CannotLower("with a bias, or without offsets")
    if x.ndim == 2 and y.ndim == 3:
        sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype))
        return lax.ragged_dot(x, y, sizes.astype(jnp.int32), preferred_element_type=accumulated(x))
    if x.ndim == 2 and y.ndim == 2:  # of each group of columns of x and rows of y a product of its own
        groups = jnp.searchsorted(offs, jnp.arange(x.shape[1]), side="right")
        members = jax.nn.one_hot(groups, offs.shape[0], dtype=x.dtype)
        return jnp.einsum("mk,kg,kn->gmn", x, members, y, preferred_element_type=accumulated(x))
    raise CannotLower(f"of tensors with {x.ndim} and {y.ndim} dims")


def _of_spatial(value: Sequence[int], num: int) -> tuple[int, ...]:
    return tuple(value) * num if len(value) == 1 else tuple(value)


def _convolve(
    x: Array, weight: Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    num = weight.ndim - 2
    stride, padding, dilation = (_of_spatial(each, num) for each in (stride, padding, dilation))
    letters = "DHW"[3 - num :] if num <= 3 else ""
    if not letters:
        raise CannotLower(f"over {num} dims")
    names = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    exact = accumulated(x)
    if not transposed:
        return lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation, dimension_numbers=names,
            feature_group_count=groups, preferred_element_type=exact,
        )  # fmt: skip
    # [in, out / groups, ...] -> [out, in / groups, ...], turned around
    rows, columns, *size = weight.shape
    turned = jnp.flip(weight, range(2, weight.ndim)).reshape(groups, rows // groups, columns, *size)
    turned = jnp.swapaxes(turned, 1, 2).reshape(groups * columns, rows // groups, *size)
    extra = _of_spatial(output_padding, num)
    edges = [(d * (n - 1) - p, d * (n - 1) - p + o) for n, d, p, o in zip(size, dilation, padding, extra, strict=True)]
    return lax.conv_general_dilated(
        x, turned, (1,) * num, edges, lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=names,
        feature_group_count=groups, preferred_element_type=exact,
    )  # fmt: skip


def _along_channels(bias: Array, num: int) -> Array:
    return bias.reshape(1, -1, *[1] * num)


@lowers(aten.convolution.default)
def _convolution(x: Array, weight: Array, bias: Array | None, *how: Any) -> Array:
    found = _convolve(x, weight, *how)
    return found if bias is None else found + _along_channels(bias, weight.ndim - 2).astype(found.dtype)


@lowers(aten.convolution_backward.default)
def _convolution_backward(
    gradient: Array, x: Array, weight: Array, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    wanted: Sequence[bool],
) -> tuple[Array | None, ...]:  # fmt: skip
    how = (stride, padding, dilation, transposed, output_padding, groups)

    def forward(x: Array, weight: Array) -> Array:
        return _convolve(x, weight, *how)

    of_bias = jnp.sum(wide(gradient), (0, *range(2, gradient.ndim))) if wanted[2] else None
    _, pull = jax.vjp(forward, wide(x), wide(weight))
    of_x, of_weight = pull(wide(gradient))
    return of_x if wanted[0] else None, of_weight if wanted[1] else None, of_bias


def _normalised(x: Array, num: int, normalization: int) -> Array:
    """The sums of a Fourier transform over `num` elements, scaled as torch's number for a norm says."""
    scale = {0: 1.0, 1: 1 / math.sqrt(num), 2: 1 / num}[normalization]
    return x * scale


@lowers(aten._fft_c2c.default)
def _fft_c2c(x: Array, dims: Sequence[int], normalization: int, forward: bool) -> Array:
    num = math.prod(x.shape[d] for d in dims)
    found = jnp.fft.fftn(x, axes=dims) if forward else jnp.fft.ifftn(x, axes=dims) * num
    return _normalised(found, num, normalization)


@lowers(aten._fft_r2c.default)
def _fft_r2c(x: Array, dims: Sequence[int], normalization: int, onesided: bool) -> Array:
    num = math.prod(x.shape[d] for d in dims)
    found = jnp.fft.rfftn(x, axes=dims) if onesided else jnp.fft.fftn(x, axes=dims)
    return _normalised(found, num, normalization)


@lowers(aten._fft_c2r.default)
def _fft_c2r(x: Array, dims: Sequence[int], normalization: int, last: int) -> Array:
    sizes = [*(x.shape[d] for d in dims[:-1]), last]
    num = math.prod(sizes)
    return _normalised(jnp.fft.irfftn(x, s=sizes, axes=dims) * num, num, normalization)


@lowers(aten.linalg_vector_norm.default, result=True)
def _vector_norm(
    x: Array, order: float = 2, dim: Dims = None, keepdim: bool = False, *, result: Result,
    dtype: torch.dtype | None = None,
) -> Array:  # fmt: skip
    axes = None if dim is None or (isinstance(dim, Sequence) and not dim) else dim
    axes = tuple(axes) if isinstance(axes, Sequence) else axes
    size = jnp.abs(wide(x) if is_float(x) else x.astype(result.dtype))
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axes, keepdims=keepdim))
    if order == math.inf:
        return jnp.max(size, axes, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(size != 0, axes, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axes, keepdims=keepdim)
    return jnp.sum(size**order, axes, keepdims=keepdim) ** (1 / order)


@lowers(EXPERT_MM)
def _expert_mm(x: Array, weight: Array, ids: Array) -> Array:
    num = weight.shape[0]
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(jnp.minimum(ids, num), length=num + 1)[:num]
    found = lax.ragged_dot(x[order], weight, sizes.astype(jnp.int32), preferred_element_type=accumulated(x))
    return _of_known(jnp.zeros_like(found).at[order].set(found), ids, num)


@lowers(EXPERT_ADDMM)
def _expert_addmm(bias: Array, x: Array, weight: Array, ids: Array) -> Array:
    found = _expert_mm(x, weight, ids)
    return found + _expert_rows(bias, ids).astype(found.dtype)


@lowers(EXPERT_OUTER)
def _expert_outer(x: Array, grad: Array, ids: Array, num_experts: int) -> Array:
    members = jax.nn.one_hot(ids, num_experts, dtype=x.dtype)
    return jnp.einsum("sk,se,sn->ekn", x, members, grad, preferred_element_type=accumulated(x))


@lowers(EXPERT_ROWS)
def _expert_rows(table: Array, ids: Array) -> Array:
    num = table.shape[0]
    return _of_known(table[jnp.minimum(ids, num - 1)], ids, num)


@lowers(EXPERT_SUMS)
def _expert_sums(rows: Array, ids: Array, num_experts: int) -> Array:
    wide = rows.astype(accumulated(rows))
    return jax.ops.segment_sum(wide, jnp.minimum(ids, num_experts), num_experts + 1)[:num_experts]


def _of_known(rows: Array, ids: Array, num: int) -> Array:
    known = (ids < num).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(known, rows, jnp.zeros((), rows.dtype))
