"""Lowerings of products with the weights of experts (compile/ops/experts.py). Rows without an expert give zeros."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plait.backends.xla.lowerings.products import accumulated
from plait.backends.xla.lowerings.table import lowers
from plait.compile.ops.experts import EXPERT_ADDMM, EXPERT_MM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS


@lowers(EXPERT_MM)
def _expert_mm(x: Any, weight: Any, ids: Any) -> Any:
    num = weight.shape[0]
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(jnp.minimum(ids, num), length=num + 1)[:num]
    found = lax.ragged_dot(x[order], weight, sizes.astype(jnp.int32), preferred_element_type=accumulated(x))
    return _of_known(jnp.zeros_like(found).at[order].set(found), ids, num)


@lowers(EXPERT_ADDMM)
def _expert_addmm(bias: Any, x: Any, weight: Any, ids: Any) -> Any:
    found = _expert_mm(x, weight, ids)
    return found + _expert_rows(bias, ids).astype(found.dtype)


@lowers(EXPERT_OUTER)
def _expert_outer(x: Any, grad: Any, ids: Any, num_experts: int) -> Any:
    members = jax.nn.one_hot(ids, num_experts, dtype=x.dtype)
    return jnp.einsum("sk,se,sn->ekn", x, members, grad, preferred_element_type=accumulated(x))


@lowers(EXPERT_ROWS)
def _expert_rows(table: Any, ids: Any) -> Any:
    num = table.shape[0]
    return _of_known(table[jnp.minimum(ids, num - 1)], ids, num)


@lowers(EXPERT_SUMS)
def _expert_sums(rows: Any, ids: Any, num_experts: int) -> Any:
    wide = rows.astype(accumulated(rows))
    return jax.ops.segment_sum(wide, jnp.minimum(ids, num_experts), num_experts + 1)[:num_experts]


def _of_known(rows: Any, ids: Any, num: int) -> Any:
    known = (ids < num).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(known, rows, jnp.zeros((), rows.dtype))
