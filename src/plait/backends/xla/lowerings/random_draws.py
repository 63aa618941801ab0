"""Random numbers by global position in jax.numpy: those of compile/ops/draw.py, bit for bit.

The words are Philox-4x32-10's (compile/ops/philox.py), in 32-bit arithmetic, which every device has. A device computes
those of its own elements only, because XLA cuts the counters as it cuts what reads the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from plait.backends.xla.lowerings.table import Result
from plait.compile.ops.philox import MULTIPLIERS, ROUNDS, STEPS

_U32 = jnp.uint32


class _Words:
    """The random words of a tensor: [..., groups, 4], each of 32 bits."""

    def __init__(self, seed: Array, stream: int, shape: Sequence[int]) -> None:
        *lead, last = shape or (1,)
        groups = (*lead, -(-last // 4))
        self._low, self._high = _counters(groups)
        self._stream = stream
        steps = [(_U32(_wrapped(i * STEPS[0])), _U32(_wrapped(i * STEPS[1]))) for i in range(ROUNDS)]
        self._keys = [(seed[0] + one, seed[1] + two) for one, two in steps]

    def four(self, salt: int) -> Array:
        a, b = self._low, self._high
        c, d = jnp.full_like(a, self._stream), jnp.full_like(a, salt)
        for one, two in self._keys:
            (p_high, p_low), (q_high, q_low) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
            a, b, c, d = q_high ^ b ^ one, q_low, p_high ^ d ^ two, p_low
        return jnp.stack((a, b, c, d), -1)


def _wrapped(number: int) -> int:
    return number & 0xFFFFFFFF


def _counters(groups: tuple[int, ...]) -> tuple[Array, Array]:
    """The number of each group in the whole tensor, as its lower and upper 32 bits."""
    kind = _U32 if math.prod(groups) < 1 << 32 else jnp.uint64
    number = jnp.zeros(groups, kind)
    for dim in range(len(groups)):
        number = number + lax.broadcasted_iota(kind, groups, dim) * kind(math.prod(groups[dim + 1 :]))
    if kind is _U32:
        return number, jnp.zeros(groups, _U32)
    return (number & jnp.uint64(0xFFFFFFFF)).astype(_U32), (number >> jnp.uint64(32)).astype(_U32)


def _product(x: Array, factor: int) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of a product, from those of halves."""
    low, high = x & _U32(0xFFFF), x >> _U32(16)
    of_low, of_high = _U32(factor & 0xFFFF), _U32(factor >> 16)
    middle = high * of_low + ((low * of_low) >> _U32(16))
    other = low * of_high + (middle & _U32(0xFFFF))
    return high * of_high + (middle >> _U32(16)) + (other >> _U32(16)), x * _U32(factor)


def drawn(seed: Array, stream: int, kind: str, params: Sequence[float], result: Result) -> Array:
    """A random tensor. `seed` has the lower and the upper 32 bits, uint32; the rest is as in compile/ops/draw.py."""
    shape = list(result.shape)
    while shape and shape[-1] == 1:
        shape.pop()
    if not math.prod(shape):
        return jnp.zeros(result.shape, result.dtype)
    values = _FILLS[kind](_Words(seed, stream, shape), result, *params)
    *lead, groups, _ = values.shape
    flat = values.reshape(*lead, groups * 4)
    return flat[..., : shape[-1] if shape else 1].reshape(result.shape)


def _unit(words: _Words, bits: int) -> Array:
    """Multiples of 2**-bits in [0, 1), float64."""
    ints = words.four(0).astype(jnp.uint64)
    if bits > 32:
        ints = (ints << jnp.uint64(bits - 32)) | (words.four(1).astype(jnp.uint64) >> jnp.uint64(64 - bits))
    else:
        ints = ints >> jnp.uint64(32 - bits)
    numbers: Array = ints.astype(jnp.float64) * 2.0**-bits
    return numbers


def _inside(words: _Words, result: Result) -> Array:
    """Numbers in (0, 1), float64, as fine as is of use for the dtype."""
    bits = 52 if result.dtype == jnp.float64 else 32
    return _unit(words, bits) + 2.0 ** -(bits + 1)


def _bernoulli(words: _Words, result: Result, p: float) -> Array:
    limit = round(p * (1 << 32))
    word = words.four(0)
    return jnp.ones_like(word, bool) if limit >= 1 << 32 else word < _U32(limit)


def _uniform(words: _Words, result: Result, low: float, high: float) -> Array:
    coarse = {jnp.dtype(jnp.float64): 53, jnp.dtype(jnp.float16): 11, jnp.dtype(jnp.bfloat16): 8}
    return _unit(words, coarse.get(result.dtype, 24)) * (high - low) + low


def _normal(words: _Words, result: Result, mean: float, std: float) -> Array:
    pairs = _inside(words, result).reshape(*words.four(0).shape[:-1], 2, 2)
    radius, angle = jnp.sqrt(jnp.log(pairs[..., 0]) * -2), pairs[..., 1] * (2 * math.pi)
    both = jnp.stack((radius * jnp.cos(angle), radius * jnp.sin(angle)), -1)
    return both.reshape(*both.shape[:-2], 4) * std + mean


def _log_normal(words: _Words, result: Result, mean: float, std: float) -> Array:
    return jnp.exp(_normal(words, result, mean, std))


def _randint(words: _Words, result: Result, low: float, high: float) -> Array:
    span = int(high) - int(low)
    ints = words.four(0).astype(jnp.uint64)
    if span <= 1 << 16:
        found: Array = (ints * jnp.uint64(span)) >> jnp.uint64(32)
    else:
        more = words.four(1).astype(jnp.uint64)
        found = ((ints << jnp.uint64(31)) | (more >> jnp.uint64(1))) % jnp.uint64(span)
    return found.astype(jnp.int64) + int(low)


def _exponential(words: _Words, result: Result, rate: float) -> Array:
    return jnp.log(_inside(words, result)) / -rate


def _geometric(words: _Words, result: Result, p: float) -> Array:
    inside = _inside(words, result)
    trials = jnp.ceil(jnp.log(inside) / math.log1p(-p)) if p < 1 else jnp.ones_like(inside)
    return jnp.maximum(trials, 1)


def _cauchy(words: _Words, result: Result, median: float, sigma: float) -> Array:
    return jnp.tan((_inside(words, result) - 0.5) * math.pi) * sigma + median


_FILLS: dict[str, Callable[..., Array]] = {
    "bernoulli": _bernoulli, "uniform": _uniform, "normal": _normal, "randint": _randint,
    "exponential": _exponential, "geometric": _geometric, "cauchy": _cauchy, "log_normal": _log_normal,
}  # fmt: skip
