"""Linear algebra. Decompositions, inverses and solutions of matrices: a batch of matrices may be cut, the matrices may
not. Products and norms that sums and products of other families make."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.compile.ops.base import Call, Factor, OpSpec, Placements, Strategy, TensorSpec, register
from plait.compile.ops.dims import (
    blocks_of,
    each_operand,
    overloads,
    pointwise_factors,
    positive,
    sharded_strategy,
)

# Ops with an argument that has a vector for each matrix: a right-hand side, pivots, scales of reflections.
_WITH_VECTORS = frozenset(overloads("_linalg_solve_ex", "linalg_lu_solve", "lu_unpack", "linalg_householder_product"))


def _batch_dims(call: Call) -> int | None:
    """The number of dims before those of the matrices; None if an argument has others than the first."""
    batch = call.inputs[0].shape[:-2]
    fewest = len(batch) + (1 if call.op in _WITH_VECTORS else 2)
    fits = all(s.ndim >= fewest and s.shape[: len(batch)] == batch for s in call.inputs if s.ndim)
    return len(batch) if fits else None


def _matrices(call: Call, given: Placements, size: int) -> list[Strategy]:
    found = []
    for d in range(_batch_dims(call) or 0):

        def own(spec: TensorSpec | None, d: int = d) -> int | None:
            """The dim of a tensor that has the batch; one that was not asked for is empty."""
            batched = spec is not None and spec.ndim > d and spec.shape[d] == call.inputs[0].shape[d]
            return d if batched else None

        inputs, outputs = [own(s) for s in call.inputs], [own(s) for s in call.outputs]
        found += [sharded_strategy(call, inputs, outputs, b) for b in blocks_of(given, inputs)]
    return found


register(
    *overloads(
        "linalg_cholesky_ex", "cholesky", "cholesky_inverse", "cholesky_solve", "linalg_inv_ex", "linalg_matrix_exp",
        "_linalg_solve_ex", "_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr", "linalg_lu_factor_ex",
        "linalg_lu", "linalg_lu_solve", "lu_unpack", "linalg_solve_triangular", "triangular_solve", "_linalg_det",
        "_linalg_slogdet", "linalg_householder_product", "linalg_pinv.atol_rtol_tensor",
    ),
    spec=OpSpec(strategies=_matrices, by_device=True),
)  # fmt: skip


def _cross_factors(call: Call) -> list[Factor]:
    """(x, y, dim): every dim but that of the three components."""
    out = call.outputs[0]
    assert out is not None
    dim = positive(call.arg(2, "dim", -1), out.ndim)
    return [factor for factor in pointwise_factors(call) if factor.outputs != (dim,)]


def _trace(x: Tensor) -> Tensor:
    return torch.diagonal(x).sum()


def _vdot(x: Tensor, y: Tensor) -> Tensor:
    return (x.conj_physical() * y).sum()


def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x - y, p)
    return norm


def _scaled(x: Tensor, by: float) -> Tensor:
    return x if by == 1 else x * by


def _addr(x: Tensor, column: Tensor, row: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(column.unsqueeze(1) * row, alpha)
    return product if beta == 0 else _scaled(x, beta) + product  # a beta of 0 ignores NaNs of x


def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(torch.bmm(a, b).sum(0), alpha)
    return product if beta == 0 else _scaled(x, beta) + product


register(*overloads("linalg_cross"), spec=OpSpec(factors=_cross_factors, linear=each_operand))
_BY_SIMPLER_OPS: dict[str, Callable[..., Tensor]] = {
    "trace": _trace, "vdot": _vdot, "dist": _dist, "addr": _addr, "addbmm": _addbmm,
}  # fmt: skip
for _name, _function in _BY_SIMPLER_OPS.items():
    register(*overloads(_name), spec=OpSpec(decompose=_function))
