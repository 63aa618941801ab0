"""Reductions, scans and softmax over dims. Other dims can be sharded.

If the reduced dim is sharded, sums and extrema become partial, means are scaled, and other ops are decomposed: softmax
into extrema and sums, so that only these small results are communicated (vocabulary-parallel cross-entropy).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.compile.ops.base import (
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placements,
    Shard,
    Strategy,
    register,
    state,
)
from plait.compile.ops.dims import Dims, aten, blocks_of, dims_of, first_operand, overloads, positive, widened

_Moments = Tensor | tuple[Tensor, Tensor]
_Finish = Callable[[Tensor, Tensor], _Moments]


@functools.cache
def _dim_position(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dim") if "dim" in names else None


def _reduced(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces; an op without a dim argument reduces all."""
    position = _dim_position(call.op)
    dims = None if position is None else call.arg(position, "dim")
    if dims == [] and call.op in (aten.any.dims, aten.all.dims):
        return ()  # which is all dims for other reductions
    return dims_of(dims, call.inputs[0].ndim)


def _kept(call: Call) -> dict[int, int]:
    """Input dim -> output dim, for dims that are not reduced."""
    ndim, reduced = call.inputs[0].ndim, set(_reduced(call))
    out = next(o for o in call.outputs if o is not None)
    if out.ndim == ndim:
        return {d: d for d in range(ndim) if d not in reduced}
    return {d: i for i, d in enumerate(d for d in range(ndim) if d not in reduced)}


def _free(call: Call) -> list[Factor]:
    return [Factor((d,), (o,) * len(call.outputs)) for d, o in _kept(call).items()]


def _summed(reduce: str) -> Callable[[Call], Sequence[Factor]]:
    def factors(call: Call) -> list[Factor]:
        return _free(call) + [Factor((d,), (None,), reduce) for d in _reduced(call)]

    return factors


def _emit_mean(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """The parts are equal, so that the mean is the mean of their means."""
    local = builder.call(call.op, *args, **kwargs)
    return builder.call(aten.div.Scalar, local, builder.size)


def _mean_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    return [Strategy((Shard(d, b),), (Partial(),), _emit_mean) for d in _reduced(call) for b in blocks_of(given, (d,))]


def _any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether any is not zero; unlike by a sum, an empty list of dims is no dim."""
    return x != 0 if dim == [] else torch.amax((x != 0).to(torch.int32), dims_of(dim, x.ndim), keepdim).ne(0)


def _all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return x != 0 if dim == [] else torch.amin((x != 0).to(torch.int32), dims_of(dim, x.ndim), keepdim).ne(0)


def _moments(x: Tensor, dim: Dims, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = dims_of(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    # Less one of the values, so that equal values have a variance of exactly 0, as by PyTorch's kernels: there the
    # gradient of a standard deviation is 0, and that of a tiny one is not.
    top = (
        x.amax(dims, keepdim=True) if count and not x.is_complex() else torch.zeros((), dtype=x.dtype, device=x.device)
    )
    apart = x - top
    mean = apart.mean(dims, keepdim=True)
    var = (apart - mean).square().sum(dims, keepdim=keepdim) / max(count - correction, 0)
    mean = mean + top
    return var, mean if keepdim else mean.squeeze(dims)


def _of_moments(finish: _Finish, by_correction: bool) -> Callable[..., _Moments]:
    def corrected(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> _Moments:
        return finish(*_moments(x, dim, 1 if correction is None else correction, keepdim))

    def unbiased(x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> _Moments:
        if isinstance(dim, bool):  # the overload without a dim
            dim, unbiased = None, dim
        return finish(*_moments(x, dim, int(unbiased), keepdim))

    return corrected if by_correction else unbiased


_FINISH: dict[str, _Finish] = {
    "var": lambda var, mean: var,
    "std": lambda var, mean: var.sqrt(),
    "var_mean": lambda var, mean: (var, mean),
    "std_mean": lambda var, mean: (var.sqrt(), mean),
}


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(dim, x.ndim)
    x = x if dtype is None else x.to(dtype)
    if ord == 2:
        return x.square().sum(dims, keepdim).sqrt()
    size = x.abs()
    if ord == math.inf:
        return size.amax(dims, keepdim)
    if ord == -math.inf:
        return size.amin(dims, keepdim)
    if ord == 0:
        return x.ne(0).to(size.dtype).sum(dims, keepdim)
    return size.pow(ord).sum(dims, keepdim).pow(1 / ord)


def _norm(
    x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    dims = dims_of(dim, x.ndim)
    top = x.amax(dims, keepdim=True)
    top = torch.where(top.abs() == math.inf, 0.0, top)
    total = (x - top).exp().sum(dims, keepdim).log()
    return total + (top if keepdim else top.squeeze(dims))


def _along(position: int, default: int = -1) -> Callable[[Call], Sequence[Factor]]:
    """Factors of every dim except one, for an op whose outputs have its input's dims (a scan, a sort)."""

    def factors(call: Call) -> list[Factor]:
        ndim = call.inputs[0].ndim
        dim = positive(call.arg(position, "dim", default), ndim)
        return [Factor((d,), (d,) * len(call.outputs)) for d in range(ndim) if d != dim]

    return factors


def _histogram(call: Call) -> list[Factor]:
    """Counts are summed, if the range of the bins is an argument and not that of the data."""
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return []
    return [Factor((d,), (None,)) for d in range(call.inputs[0].ndim)]


register(*overloads("sum", "sum.dim_IntList"), spec=OpSpec(factors=_summed("sum"), linear=first_operand))
register(*overloads("nansum", "count_nonzero", "count_nonzero.dim_IntList"), spec=OpSpec(factors=_summed("sum")))
register(*overloads("amax", "max"), spec=OpSpec(factors=_summed("max")))
register(*overloads("amin", "min"), spec=OpSpec(factors=_summed("min")))
register(*overloads("mean", "mean.dim"), spec=OpSpec(factors=_free, strategies=_mean_strategies, linear=first_operand))
register(*overloads("any", "any.dim", "any.dims"), spec=OpSpec(factors=_free, decompose=_any))
register(*overloads("all", "all.dim", "all.dims"), spec=OpSpec(factors=_free, decompose=_all))
register(
    *overloads("prod", "prod.dim_int", "max.dim", "min.dim", "argmax", "argmin", "median"), spec=OpSpec(factors=_free)
)
register(*overloads("kthvalue", "mode", "aminmax", "nanmedian"), spec=OpSpec(factors=_free))
register(*overloads("median.dim", "nanmedian.dim"), spec=OpSpec(factors=_free, by_device=True))
for _name, _finish in _FINISH.items():
    register(*overloads(f"{_name}.correction"), spec=OpSpec(factors=_free, decompose=_of_moments(_finish, True)))
    register(*overloads(_name, f"{_name}.dim"), spec=OpSpec(factors=_free, decompose=_of_moments(_finish, False)))
register(*overloads("linalg_vector_norm"), spec=OpSpec(factors=_free, decompose=_vector_norm))
register(*overloads("norm.ScalarOpt_dim", "norm.Scalar"), spec=OpSpec(factors=_free, decompose=_norm))
register(*overloads("logsumexp"), spec=OpSpec(factors=_free, decompose=_logsumexp))
register(*overloads("cumsum"), spec=OpSpec(factors=_along(1), linear=first_operand))
register(*overloads("cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"), spec=OpSpec(factors=_along(1)))
register(*overloads("sort.stable"), spec=OpSpec(factors=_along(2)))
register(*overloads("topk"), spec=OpSpec(factors=_along(2)))
register(*overloads("histc"), spec=OpSpec(factors=_histogram, by_device=True))
state(*overloads("argmax", "argmin", "argsort"), picks=0)
state(*overloads("sort", "sort.stable", "topk", "max.dim", "min.dim"), picks=1)
state(*overloads("argsort", "sort", "sort.stable"), role="sort")


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


def _other_dims(position: int) -> Callable[[Call], Sequence[Factor]]:
    def factors(call: Call) -> Sequence[Factor]:
        ndim = call.inputs[0].ndim
        dim = positive(call.args[position], ndim)
        return [Factor((d,) * len(call.inputs), (d,)) for d in range(ndim) if d != dim]

    return factors


_forward, _backward = _other_dims(1), _other_dims(2)
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
