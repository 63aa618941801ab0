"""Lowerings of attention, with and without dropout: the scores of all queries at once, which XLA fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from plait.backends.xla.lowerings.products import accumulated
from plait.backends.xla.lowerings.random_draws import drawn
from plait.backends.xla.lowerings.table import CannotLower, Result, aten, lowers
from plait.compile.ops.dropped_attention import dropped_attention, dropped_attention_backward


@dataclass(frozen=True)
class _Attention:
    """The arguments of an attention. `kept` are the weights that are not dropped, and `factor` what they are raised
    by; None without dropout."""

    q: Array
    k: Array
    v: Array
    mask: Array | None
    causal: bool
    scale: float
    kept: Array | None = None
    factor: float = 1.0

    def scores(self) -> Array:
        q, k = self.q, _of_each_query(self.k, self.q)
        found = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=accumulated(q)) * self.scale
        if self.mask is not None:
            is_bool = self.mask.dtype == jnp.bool_
            found = jnp.where(self.mask, found, -jnp.inf) if is_bool else found + self.mask
        if self.causal:
            found = jnp.where(jnp.tril(jnp.ones(found.shape[-2:], bool)), found, -jnp.inf)
        return found

    def weights(self, total: Array) -> Array:
        """The softmax of the scores, given the logarithms of its sums; of a query that sees nothing zeros."""
        return jnp.exp(self.scores() - jnp.where(jnp.isneginf(total), 0, total)[..., None])

    def dropped(self, weights: Array) -> Array:
        return weights if self.kept is None else weights * self.kept * self.factor

    def forward(self) -> tuple[Array, Array]:
        total = jax.nn.logsumexp(self.scores(), axis=-1)
        v = _of_each_query(self.v, self.q)
        weights = self.dropped(self.weights(total)).astype(v.dtype)
        return jnp.einsum("...qk,...kd->...qd", weights, v, preferred_element_type=accumulated(v)), total

    def backward(self, gradient: Array, out: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """The gradients of q, k, v, and of the mask where it is whole."""
        q, k, v = self.q, _of_each_query(self.k, self.q), _of_each_query(self.v, self.q)
        exact = accumulated(q)
        weights = self.weights(total.astype(exact))
        narrow = self.dropped(weights).astype(v.dtype)
        of_v = jnp.einsum("...qk,...qd->...kd", narrow, gradient, preferred_element_type=exact)
        of_weights = jnp.einsum("...qd,...kd->...qk", gradient, v, preferred_element_type=exact)
        mean = jnp.sum(gradient.astype(exact) * out.astype(exact), axis=-1, keepdims=True)
        of_scores = weights * (self.dropped(of_weights) - mean)
        scaled = (of_scores * self.scale).astype(q.dtype)
        of_q = jnp.einsum("...qk,...kd->...qd", scaled, k, preferred_element_type=exact)
        of_k = jnp.einsum("...qk,...qd->...kd", scaled, q, preferred_element_type=exact)
        return of_q, _of_each_key(of_k, self.k), _of_each_key(of_v, self.v), of_scores


def _of_each_query(k: Array, q: Array) -> Array:
    """Keys or values with as many heads as queries: several of these share one."""
    return k if k.shape[1] == q.shape[1] else jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)


def _of_each_key(gradient: Array, k: Array) -> Array:
    """The sums of gradients over the heads of queries that share a head."""
    if gradient.shape[1] == k.shape[1]:
        return gradient
    return gradient.reshape(k.shape[0], k.shape[1], -1, *gradient.shape[2:]).sum(2)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    q: Array, k: Array, v: Array, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Array | None = None, scale: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    if dropout_p:
        raise CannotLower("with dropout inside")
    return _Attention(q, k, v, attn_mask, is_causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale).forward()


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(
    gradient: Array, q: Array, k: Array, v: Array, out: Array, total: Array, dropout_p: float, is_causal: bool, *,
    attn_mask: Array | None = None, scale: float | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    given = _Attention(q, k, v, attn_mask, is_causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return given.backward(gradient, out, total)[:3]


def _with_dropout(
    q: Array, k: Array, v: Array, mask: Array | None, seed: Array, rate: float, causal: bool, scale: float,
    cuts: Sequence[int],
) -> _Attention:  # fmt: skip
    if cuts:
        raise CannotLower("of a part of the scores")
    halves = jnp.stack((seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)).astype(jnp.uint32)
    kept = drawn(halves, 0, "bernoulli", (1 - rate,), Result((*q.shape[:3], k.shape[2]), jnp.dtype(bool)))
    return _Attention(q, k, v, mask, causal, scale, kept, 1 / (1 - rate) if rate < 1 else 0.0)


@lowers(dropped_attention._opoverload)
def _dropped_attention(q: Array, k: Array, v: Array, *how: Any) -> tuple[Array, Array]:
    return _with_dropout(q, k, v, *how).forward()


@lowers(dropped_attention_backward._opoverload)
def _dropped_attention_backward(
    gradient: Array, q: Array, k: Array, v: Array, mask: Array | None, seed: Array, out: Array, total: Array,
    rate: float, causal: bool, scale: float, cuts: Sequence[int], wants_mask: bool,
) -> tuple[Array, ...]:  # fmt: skip
    given = _with_dropout(q, k, v, mask, seed, rate, causal, scale, cuts)
    *found, of_mask = given.backward(gradient, out, total)
    if not wants_mask or mask is None:
        return *found, jnp.zeros(0, q.dtype)
    shared = tuple(d for d, n in enumerate(mask.shape) if n == 1 and of_mask.shape[d] > 1)
    return *found, jnp.sum(of_mask, shared, keepdims=True)
