"""Lowerings of ops that work on each element by itself, and of the creation of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from plait.backends.xla.lowerings.table import Result, aten, floating, is_float, lowers, wide

_Left = TypeVar("_Left", Array, ArrayLike)
_OfOne = Callable[[Array], Array]
_OfTwo = Callable[[ArrayLike, ArrayLike], Array]


def _like(number: ArrayLike, x: Any) -> ArrayLike:
    """A number of Python, or one that comes with the step, in the dtype in which `x` takes part in arithmetic."""
    if isinstance(number, (bool, int)) or not is_float(x):
        return number
    return jnp.asarray(number, x.dtype)


def _pair(x: _Left, y: ArrayLike) -> tuple[_Left, ArrayLike]:
    """Two operands in the dtype in which they are added: numbers and 0-d tensors take that of tensors with dims."""
    if not isinstance(x, jax.Array):
        return _like(x, y), y
    if not isinstance(y, jax.Array):
        return x, _like(y, x)
    if is_float(x) == is_float(y) and (x.ndim == 0) != (y.ndim == 0):
        return (x.astype(y.dtype), y) if x.ndim == 0 else (x, y.astype(x.dtype))
    return x, y


@lowers(aten.add.Tensor, aten.add.Scalar)
def _add(x: Array, y: ArrayLike, alpha: ArrayLike = 1) -> Array:
    x, y = _pair(x, y)
    if x.dtype == jnp.bool_ and getattr(y, "dtype", None) == jnp.bool_:
        return x | y
    return x + (y if _is_one(alpha) else y * _like(alpha, x))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(x: Array, y: ArrayLike, alpha: ArrayLike = 1) -> Array:
    x, y = _pair(x, y)
    return x - (y if _is_one(alpha) else y * _like(alpha, x))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(x: Array, y: ArrayLike, alpha: ArrayLike = 1) -> Array:
    return _sub(jnp.asarray(_like(y, x)), x, alpha)


def _is_one(alpha: ArrayLike) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def _mul(x: Array, y: ArrayLike) -> Array:
    x, y = _pair(x, y)
    return x * y


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, result=True)
def _div(x: ArrayLike, y: ArrayLike, result: Result) -> Array:
    x, y = _pair(x, y)
    wider = jnp.promote_types(result.dtype, jnp.float32)
    return jnp.asarray(x).astype(wider) / jnp.asarray(y).astype(wider)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, result=True)
def _div_mode(x: ArrayLike, y: ArrayLike, rounding_mode: str | None, result: Result) -> Array:
    if rounding_mode is None:
        return _div(x, y, result)
    x, y = _pair(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(x / y) if is_float(jnp.asarray(x)) or is_float(jnp.asarray(y)) else lax.div(*_same(x, y))


def _same(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    dtype = jnp.result_type(x, y)
    x, y = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
    return x, y


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(x: ArrayLike, y: ArrayLike) -> Array:
    return jnp.floor_divide(*_pair(x, y))


@lowers(aten.remainder.Scalar, aten.remainder.Tensor, aten.remainder.Scalar_Tensor)
def _remainder(x: ArrayLike, y: ArrayLike) -> Array:
    return jnp.remainder(*_pair(x, y))


@lowers(aten.fmod.Scalar, aten.fmod.Tensor)
def _fmod(x: ArrayLike, y: ArrayLike) -> Array:
    return jnp.fmod(*_pair(x, y))


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, result=True)
def _pow(x: ArrayLike, y: ArrayLike, result: Result) -> Array:
    base = x if not isinstance(x, jax.Array) else x.astype(jnp.promote_types(x.dtype, result.dtype))
    if isinstance(y, float) and y.is_integer() and abs(y) < 64:
        y = int(y)
    if isinstance(y, int) and isinstance(base, jax.Array):
        return lax.integer_pow(base, y) if is_float(base) else jnp.power(base, y)
    if isinstance(y, float) and y in (0.5, -0.5) and is_float(base):
        return jnp.sqrt(base) if y > 0 else lax.rsqrt(base)
    return jnp.power(*_pair(base, y))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(start: Array, end: Array, weight: ArrayLike) -> Array:
    weight = _like(weight, start) if not isinstance(weight, jax.Array) else weight.astype(start.dtype)
    # As torch: from the nearer end, so that weights of 0 and 1 give the ends exactly.
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@lowers(aten.addcmul.default)
def _addcmul(x: Array, a: Array, b: Array, value: ArrayLike = 1) -> Array:
    return x + (_like(value, x) * a) * b


@lowers(aten.addcdiv.default)
def _addcdiv(x: Array, a: Array, b: Array, value: ArrayLike = 1) -> Array:
    return x + (_like(value, x) * a) / b


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, result=True)
def _where(condition: Array, x: ArrayLike, y: ArrayLike, result: Result) -> Array:
    return jnp.where(condition, jnp.asarray(x).astype(result.dtype), jnp.asarray(y).astype(result.dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Array, mask: Array, value: ArrayLike) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor)
def _clamp(x: Array, low: ArrayLike | None = None, high: ArrayLike | None = None) -> Array:
    x = x if low is None else _clamp_min(x, low)
    return x if high is None else _clamp_max(x, high)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default, aten.max.other)
def _clamp_min(x: Array, low: ArrayLike) -> Array:
    return jnp.maximum(*_pair(x, low))


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default, aten.min.other)
def _clamp_max(x: Array, high: ArrayLike) -> Array:
    return jnp.minimum(*_pair(x, high))


@lowers(aten.fmax.default)
def _fmax(x: Array, y: Array) -> Array:
    return jnp.fmax(x, y)


@lowers(aten.fmin.default)
def _fmin(x: Array, y: Array) -> Array:
    return jnp.fmin(x, y)


def _of_two(function: _OfTwo) -> _OfTwo:
    return lambda x, y: function(x, jnp.asarray(y))


_COMPARISONS: dict[str, _OfTwo] = {
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal,
}  # fmt: skip
for _name, _compare in _COMPARISONS.items():
    lowers(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_of_two(_compare))

_OF_TWO: dict[str, _OfTwo] = {
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor,
    "atan2": jnp.arctan2, "hypot": jnp.hypot, "logaddexp": jnp.logaddexp, "copysign.Tensor": jnp.copysign,
    "bitwise_and.Tensor": jnp.bitwise_and, "bitwise_or.Tensor": jnp.bitwise_or, "bitwise_xor.Tensor": jnp.bitwise_xor,
    "bitwise_and.Scalar": jnp.bitwise_and, "bitwise_or.Scalar": jnp.bitwise_or,
}  # fmt: skip
for _name, _binary in _OF_TWO.items():
    _packet, _, _overload = _name.partition(".")
    lowers(getattr(getattr(aten, _packet), _overload or "default"))(_of_two(_binary))


def _sign(x: Array) -> Array:
    return x if x.dtype == jnp.bool_ else jnp.sign(x)


# Exact in every dtype.
_PLAIN: dict[str, _OfOne] = {
    "abs": jnp.abs, "neg": jnp.negative, "sign": _sign, "sgn": jnp.sign, "floor": jnp.floor, "ceil": jnp.ceil,
    "round": jnp.round, "trunc": jnp.trunc, "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not,
    "isnan": jnp.isnan, "isinf": jnp.isinf, "isfinite": jnp.isfinite, "relu": lambda x: jnp.maximum(x, 0),
    "_conj": jnp.conj, "conj_physical": jnp.conj, "real": jnp.real, "imag": jnp.imag, "signbit": jnp.signbit,
    "clone": lambda x: x, "alias": lambda x: x, "detach": lambda x: x, "lift_fresh_copy": lambda x: x,
    "contiguous": lambda x: x, "_conj_physical": jnp.conj, "resolve_conj": lambda x: x,
    "square": jnp.square, "positive": lambda x: x, "view_as_real_copy": lambda x: jnp.stack([x.real, x.imag], axis=-1),
}  # fmt: skip
# In half precision computed in float32, and rounded once.
_FUNCTIONS: dict[str, _OfOne] = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10,
    "log1p": jnp.log1p, "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan,
    "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan, "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh,
    "asinh": jnp.arcsinh, "acosh": jnp.arccosh, "atanh": jnp.arctanh, "sigmoid": jax.nn.sigmoid, "erf": jax.lax.erf,
    "erfc": jax.lax.erfc, "erfinv": jax.lax.erf_inv, "reciprocal": lambda x: 1 / x, "lgamma": jax.lax.lgamma,
    "digamma": jax.lax.digamma, "silu": jax.nn.silu,
}  # fmt: skip


def _of_function(function: _OfOne) -> Callable[..., Array]:
    return lambda x, **_: function(floating(x))


def _of_plain(function: _OfOne) -> Callable[..., Array]:
    return lambda x, **_: function(x)


for _name, _function in _PLAIN.items():
    if hasattr(aten, _name) and hasattr(getattr(aten, _name), "default"):
        lowers(getattr(aten, _name).default)(_of_plain(_function))
for _name, _function in _FUNCTIONS.items():
    if hasattr(getattr(aten, _name), "default"):
        lowers(getattr(aten, _name).default)(_of_function(_function))


@lowers(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def _shrink_backward(gradient: Array, x: Array, limit: float) -> Array:
    return jnp.where((x >= -limit) & (x <= limit), jnp.zeros((), gradient.dtype), gradient)


@lowers(aten.gelu.default)
def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return jax.nn.gelu(wide(x), approximate=True)
    x = wide(x)
    return x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))


@lowers(aten.gelu_backward.default)
def _gelu_backward(gradient: Array, x: Array, approximate: str = "none") -> Array:
    x = wide(x)
    if approximate == "tanh":
        _, pull = jax.vjp(lambda v: jax.nn.gelu(v, approximate=True), x)
        pulled: Array = pull(gradient.astype(x.dtype))[0]
        return pulled
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    return wide(gradient) * (cdf + x * jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))


@lowers(aten._to_copy.default, result=True)
def _to_copy(x: Array, *_: object, result: Result, **__: object) -> Array:
    if jnp.issubdtype(result.dtype, jnp.integer) and is_float(x):
        x = jnp.trunc(wide(x))
    return x.astype(result.dtype)


@lowers(aten.copy.default, result=True)
def _copy(x: Array, source: Array, non_blocking: bool = False, *, result: Result) -> Array:
    return jnp.broadcast_to(source, result.shape)


@lowers(aten.complex.default)
def _complex(x: Array, y: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(x, y))


@lowers(aten.polar.default)
def _polar(size: Array, angle: Array) -> Array:
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lowers(aten.view_as_complex.default)
def _view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers(aten.view_as_real.default)
def _view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers(
    aten.full.default, aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor, aten.new_full.default,
    aten.scalar_tensor.default, result=True,
)  # fmt: skip
def _full(*args: Any, result: Result, **named: Any) -> Array:
    value = named.get("fill_value", args[-1])
    return jnp.full(result.shape, jnp.asarray(value).astype(result.dtype))


@lowers(
    aten.zeros.default, aten.zeros_like.default, aten.zero.default, aten.new_zeros.default, aten.empty_like.default,
    aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default, aten.new_empty_strided.default,
    aten.empty_permuted.default, result=True,
)  # fmt: skip
def _zeros(*_: object, result: Result, **__: object) -> Array:
    return jnp.zeros(result.shape, result.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default, result=True)
def _ones(*_: object, result: Result, **__: object) -> Array:
    return jnp.ones(result.shape, result.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step, result=True)
def _arange(*ends: float, result: Result, **named: Any) -> Array:
    ends = (*ends, *(named[key] for key in ("start", "end", "step") if key in named))
    start, step = (0, 1) if len(ends) == 1 else (ends[0], ends[2] if len(ends) > 2 else 1)
    wider = jnp.int64 if jnp.issubdtype(result.dtype, jnp.integer) else jnp.float64
    return (start + step * jnp.arange(result.shape[0], dtype=wider)).astype(result.dtype)


@lowers(aten.linspace.default, result=True)
def _linspace(start: float, end: float, steps: int, result: Result, **_: object) -> Array:
    return jnp.linspace(start, end, steps, dtype=result.dtype)


@lowers(aten.eye.default, aten.eye.m, result=True)
def _eye(*_: object, result: Result, **__: object) -> Array:
    return jnp.eye(result.shape[0], result.shape[1], dtype=result.dtype)


@lowers(aten.tril_indices.default)
def _tril_indices(rows: int, columns: int, offset: int = 0, **_: object) -> Array:
    return jnp.stack(jnp.tril_indices(rows, offset, columns))


@lowers(aten.triu_indices.default)
def _triu_indices(rows: int, columns: int, offset: int = 0, **_: object) -> Array:
    return jnp.stack(jnp.triu_indices(rows, offset, columns))
