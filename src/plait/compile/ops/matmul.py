"""Matrix products and linear algebra.

If the sum over k of a product is sharded, a bias is divided by the number of ranks, so that it counts once. Of
decompositions, inverses and solutions a batch of matrices may be cut, the matrices may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.compile.ops.base import (
    OP_SPECS,
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
    TensorSpec,
    einsum,
    register,
)
from plait.compile.ops.dims import (
    aten,
    blocks_of,
    broadcast_dim,
    each_operand,
    first_operand,
    is_floating,
    overloads,
    pointwise_factors,
    positive,
    put,
    sharded_strategy,
)

_PRODUCTS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k ->",
}
for _name, _text in _PRODUCTS.items():
    register(*overloads(_name), spec=OpSpec(factors=einsum(_text), linear=each_operand, weighted=True))


def _with_bias(product: str) -> OpSpec:
    """beta * bias + alpha * product with a broadcast bias: addmm, baddbmm, addmv."""
    base = OP_SPECS[getattr(aten, product).default]

    def parts(call: Call) -> tuple[list[Factor], list[Factor]]:
        """Factors of the product with the bias as first input: those in its output, and those that are summed."""
        bias, out = call.inputs[0], call.outputs[0]
        assert out is not None
        kept, summed = [], []
        for factor in base.factors(call):
            (dim,) = factor.outputs
            if dim is None:
                summed.append(Factor((None, *factor.inputs), (None,)))
            else:
                kept.append(Factor((broadcast_dim(bias.shape, dim, out.shape), *factor.inputs), (dim,)))
        return kept, summed

    def strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
        if not is_floating(call.outputs[0]):
            return []
        return [
            sharded_strategy(call, factor.inputs, factor.outputs, b, Partial())
            for factor in parts(call)[1]
            for b in blocks_of(given, factor.inputs)
        ]

    def emit(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
        if strategy.outputs == (Partial(),) and any(isinstance(p, Shard) for p in strategy.inputs):
            kwargs = {**kwargs, "beta": kwargs.get("beta", 1) / builder.size}
        return builder.call(call.op, *args, **kwargs)

    # Jointly linear in the bias and either operand.
    return OpSpec(
        factors=lambda call: parts(call)[0], strategies=strategies, emit=emit, linear=lambda call: [(0, 1), (0, 2)],
        weighted=True,
    )  # fmt: skip


register(*overloads("addmm"), spec=_with_bias("mm"))
register(*overloads("baddbmm"), spec=_with_bias("bmm"))
register(*overloads("addmv"), spec=_with_bias("mv"))


def _linear_factors(call: Call) -> list[Factor]:
    """linear(x, weight, bias): `... k, n k, n -> ... n`."""
    last = call.inputs[0].ndim - 1
    bias = len(call.inputs) - 2
    rows = [Factor((d, *(None,) * (bias + 1)), (d,)) for d in range(last)]
    return [*rows, Factor((None, 0, *(0,) * bias), (last,))]


def _linear_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    dims = (call.inputs[0].ndim - 1, 1, *(None,) * (len(call.inputs) - 2))
    return [sharded_strategy(call, dims, (None,), b, Partial()) for b in blocks_of(given, dims)]


def _emit_linear(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    cut = strategy.outputs == (Partial(),) and any(isinstance(p, Shard) for p in strategy.inputs)
    if cut and len(args) > 2 and args[2] is not None:
        args = put(args, 2, builder.call(aten.div.Scalar, args[2], builder.size))
    return builder.call(call.op, *args, **kwargs)


def _linear_groups(call: Call) -> list[tuple[int, ...]]:
    return [(0,), (1,)] if len(call.inputs) == 2 else [(0, 2), (1, 2)]


register(
    *overloads("linear"),
    spec=OpSpec(
        factors=_linear_factors, strategies=_linear_strategies, emit=_emit_linear, linear=_linear_groups, weighted=True
    ),
)


def _matmul_factors(call: Call) -> list[Factor]:
    """matmul of operands of two dims or more, whose batch dims are broadcast."""
    a, b = call.inputs
    out = call.outputs[0]
    assert out is not None
    if a.ndim < 2 or b.ndim < 2:
        return []
    last = out.ndim - 1
    batch = [
        Factor((broadcast_dim(a.shape, d, out.shape), broadcast_dim(b.shape, d, out.shape)), (d,))
        for d in range(last - 1)
        if out.shape[d] > 1
    ]
    return [
        *batch,
        Factor((a.ndim - 2, None), (last - 1,)),
        Factor((None, b.ndim - 1), (last,)),
        Factor((a.ndim - 1, b.ndim - 2), (None,)),
    ]


register(*overloads("matmul"), spec=OpSpec(factors=_matmul_factors, linear=each_operand, weighted=True))


def _trilinear_factors(call: Call) -> list[Factor]:
    """Operands get dims of size 1 (expand1..3), are multiplied with broadcasting, and summed over some dims."""
    expands: list[Sequence[int]] = [call.args[3], call.args[4], call.args[5]]
    ndim = call.inputs[0].ndim + len(expands[0])
    summed = {positive(d, ndim) for d in call.args[6]}
    kept = [d for d in range(ndim) if d not in summed]
    places = [[d for d in range(ndim) if d not in expand] for expand in expands]
    return [
        Factor(
            tuple(place.index(d) if d in place else None for place in places),
            (kept.index(d) if d in kept else None,),
        )
        for d in range(ndim)
    ]


register(*overloads("_trilinear"), spec=OpSpec(factors=_trilinear_factors, linear=each_operand))


def _grouped_factors(call: Call) -> list[Factor]:
    """Groups of rows, each with a matrix of its own: `m k, e k n, e -> m n`. Rows and groups stay whole."""
    a, b = call.inputs[:2]
    rest = (None,) * (len(call.inputs) - 2)
    if (a.ndim, b.ndim) == (2, 3):
        return [Factor((1, 1, *rest), (None,)), Factor((None, 2, *rest), (1,))]
    if (a.ndim, b.ndim) == (2, 2):  # the gradient of the matrices: m rows, rows n -> e m n
        return [Factor((0, None, *rest), (1,)), Factor((None, 1, *rest), (2,))]
    return []


def _grouped_backward_factors(call: Call) -> list[Factor]:
    """(rows k), (e k n), offsets, (rows n) -> (rows k), (e k n)."""
    return [Factor((1, 1, None, None), (1, 1)), Factor((None, 2, None, 1), (None, 2))]


_ALIGNED = 16  # aten._grouped_mm needs rows whose bytes are a multiple of this


def _grouped_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Strategies by the factors of a grouped product, if the rows of each part stay aligned."""

    def aligned(dims: Sequence[int | None], specs: Sequence[TensorSpec | None]) -> bool:
        pairs = [(s, d) for s, d in zip(specs, dims, strict=True) if s is not None and d is not None]
        return all(s.shape[d] // size * s.dtype.itemsize % _ALIGNED == 0 for s, d in pairs)

    return [
        sharded_strategy(call, factor.inputs, factor.outputs, b, Partial())
        for factor in _grouped_factors(call)
        if aligned(factor.inputs, call.inputs) and aligned(factor.outputs, call.outputs)
        for b in blocks_of(given, factor.inputs)
    ]


GROUPED = OpSpec(
    factors=_grouped_factors, linear=lambda call: [(0,), (1,)], weighted=True, formats=True, role="grouped product"
)
GROUPED_BACKWARD = OpSpec(
    factors=_grouped_backward_factors, linear=lambda call: [(3,)], formats=True, role="grouped product"
)


def _fake_grouped(
    a: Tensor, b: Tensor, offs: Any = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Shapes of the grouped product; the op's own shape function supports bfloat16 only."""
    if a.ndim == 2 and b.ndim == 2:
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.ndim == 3 and b.ndim == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


register(
    *overloads("_grouped_mm"),
    spec=OpSpec(
        strategies=_grouped_strategies,
        linear=lambda call: [(0,), (1,)],
        weighted=True,
        formats=True,
        fake=_fake_grouped,
        role="grouped product",
    ),
)


# ---- distances: cdist(x1, x2) of points in rows; each batch dim as in bmm, without broadcasting ----


def _points(text: str) -> Callable[[Call], Sequence[Factor]]:
    """Factors from einsum notation for points of two dims, before which tensors of more have batch dims in common."""

    def factors(call: Call) -> Sequence[Factor]:
        batch = call.inputs[0].shape[:-2]
        if any(s.shape[:-2] != batch for s in call.inputs):
            return ()
        names = " ".join(f"b{d}" for d in range(len(batch)))
        inputs, out = text.split("->")
        words = ", ".join(f"{names} {part}" for part in inputs.split(","))
        return einsum(f"{words} -> {names} {out}")(call)

    return factors


def _emit_distances(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """Torch multiplies matrices where there are more than 25 points, which rounds otherwise: it does if the whole
    has."""
    num = max(s.shape[-2] for s in call.inputs)
    return builder.call(call.op, *args[:3], args[3] or (1 if num > 25 else 2))


register(*overloads("_cdist_forward"), spec=OpSpec(factors=_points("p M, r M -> p r"), emit=_emit_distances))
register(
    *overloads("_cdist_backward"),
    spec=OpSpec(factors=_points("p r, p M, r M, p r -> p M"), linear=first_operand, formats=True),
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
