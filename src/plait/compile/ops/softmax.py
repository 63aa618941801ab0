"""Softmax and similar ops. Other dims can be sharded. If their own dim is, they are rewritten with extrema and sums,
and
only these small results are communicated: vocabulary-parallel cross-entropy is built on this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.compile.ops.base import Call, Factor, OpSpec, register
from plait.compile.ops.dims import first_operand, overloads, positive, widened


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    out = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return out if half_to_float else out.to(x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    grown = (wide - wide.amax(dim, keepdim=True)).exp()
    out = grown / grown.sum(dim, keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of -inf only become zeros."""
    out = x.dtype if dtype is None else dtype
    wide = widened(x.to(out))
    top = wide.amax(dim, keepdim=True)
    empty = top == -math.inf
    grown = (wide - torch.where(empty, 0.0, top)).exp()
    return torch.where(empty, 0.0, grown / grown.sum(dim, keepdim=True)).to(out)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widened(grad)
    return (wide - widened(output).exp() * wide.sum(dim, keepdim=True)).to(input_dtype)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    product = widened(grad) * widened(output)
    return (product - widened(output) * product.sum(dim, keepdim=True)).to(input_dtype)


def _free(position: int) -> Callable[[Call], Sequence[Factor]]:
    def factors(call: Call) -> Sequence[Factor]:
        ndim = call.inputs[0].ndim
        dim = positive(call.args[position], ndim)
        return [Factor((d,) * len(call.inputs), (d,)) for d in range(ndim) if d != dim]

    return factors


_forward, _backward = _free(1), _free(2)
register(*overloads("_log_softmax"), spec=OpSpec(factors=_forward, decompose=_log_softmax, role="softmax"))
register(*overloads("_softmax"), spec=OpSpec(factors=_forward, decompose=_softmax))
register(*overloads("_safe_softmax"), spec=OpSpec(factors=_forward, decompose=_safe_softmax))
register(
    *overloads("_log_softmax_backward_data"),
    spec=OpSpec(factors=_backward, linear=first_operand, decompose=_log_softmax_backward),
)
register(
    *overloads("_softmax_backward_data"),
    spec=OpSpec(factors=_backward, linear=first_operand, decompose=_softmax_backward),
)
