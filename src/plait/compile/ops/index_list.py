"""x[a, :, b] and x[a, :, b] = values: one index tensor or none per dim; index tensors are broadcast together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Partial,
    Placements,
    RowAccess,
    Shard,
    Strategy,
    TensorSpec,
    register,
)
from plait.compile.ops.dims import (
    aten,
    broadcast_dim,
    broadcast_shape,
    equal_blocks_of,
    first_operand,
    is_floating,
    overloads,
    put,
)
from plait.compile.ops.index import counted_once, local_index, masked, with_spare_row


@dataclass(frozen=True)
class Access:
    """Which dims of x are indexed, and where the other dims and the index's own dims are in the result."""

    indexed: tuple[int, ...]  # dims of x, in order; the index tensors are inputs 1, 2, ...
    index_shape: tuple[int, ...]  # of the index tensors broadcast together
    first: int  # the dim of the result at which index_shape begins
    kept: dict[int, int]  # other dims of x -> dims of the result


def _access(call: Call) -> Access | None:
    """How a call indexes x; None for masks, whose result has a size that depends on data."""
    x, indices = call.inputs[0], call.args[1]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    indexed = tuple(d for d, i in enumerate(indices) if i is not None)
    shape = broadcast_shape([indices[d].shape for d in indexed])
    together = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0
    others = [d for d in range(x.ndim) if d not in indexed]
    kept = {d: i + len(shape) * (i >= first) for i, d in enumerate(others)}
    return Access(indexed, shape, first, kept)


def _index_dims(call: Call, access: Access, dim: int) -> tuple[int | None, ...]:
    """For each index tensor, its dim that corresponds to `dim` of the broadcast index."""
    return tuple(broadcast_dim(call.inputs[1 + k].shape, dim, access.index_shape) for k in range(len(access.indexed)))


def _factors(call: Call) -> list[Factor]:
    access = _access(call)
    if access is None:
        return []
    none = (None,) * len(access.indexed)
    kept = [Factor((d, *none), (o,)) for d, o in access.kept.items()]
    own = [
        Factor((None, *_index_dims(call, access, d)), (access.first + d,))
        for d, n in enumerate(access.index_shape)
        if n > 1
    ]
    return kept + own


def _along(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Strategies with x sharded along an indexed dim."""
    access, x = _access(call), call.inputs[0]
    if access is None or x.dtype is torch.bool:
        return []
    rest = (REPLICATE,) * len(access.indexed)
    return [
        Strategy((Shard(d, b), *rest), (Partial(),), _emit_along)
        for d in access.indexed
        for b in equal_blocks_of(given[:1], (d,))
    ]


def _localised(builder: Builder, call: Call, args: Args, part: Shard, spare: int) -> tuple[list[Node | None], Node]:
    """The index list with the indices of the sharded dim made local; those outside become `spare`."""
    length = call.inputs[0].shape[part.dim]
    index = builder.call(aten.remainder.Scalar, args[1][part.dim], length)  # counted from the left
    local, outside = local_index(builder, index, length, part.blocks)
    return [masked(builder, local, outside, spare) if d == part.dim else i for d, i in enumerate(args[1])], outside


def _emit_along(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    access, part, out = _access(call), strategy.inputs[0], call.outputs[0]
    assert access is not None and isinstance(part, Shard) and out is not None
    indices, outside = _localised(builder, call, args, part, 0)
    found = builder.call(call.op, args[0], indices)
    behind = out.ndim - access.first - len(access.index_shape)
    for _ in range(behind):
        outside = builder.call(aten.unsqueeze.default, outside, -1)
    return builder.call(aten.masked_fill.Scalar, found, outside, 0)


def _rows(indices: Sequence[Node | None]) -> tuple[Node, ...] | None:
    """The indices, if they are those of the first dims."""
    given = tuple(i for i in indices if i is not None)
    return given if given and all(i is not None for i in indices[: len(given)]) else None


def _rows_read(table: Node, indices: Sequence[Node | None]) -> RowAccess | None:
    rows = _rows(indices)
    return RowAccess(table, rows) if rows is not None else None


register(
    *overloads("index.Tensor", "_unsafe_index.Tensor"),
    spec=OpSpec(factors=_factors, strategies=_along, linear=first_operand, access=_rows_read),
)


def _result_shape(call: Call, access: Access) -> tuple[int, ...]:
    shape = [0] * (len(access.kept) + len(access.index_shape))
    for d, o in access.kept.items():
        shape[o] = call.inputs[0].shape[d]
    shape[access.first : access.first + len(access.index_shape)] = access.index_shape
    return tuple(shape)


def _put_factors(call: Call) -> list[Factor]:
    access = _access(call)
    if access is None:
        return []
    shape = _result_shape(call, access)
    values: TensorSpec = call.args[2]
    none = (None,) * len(access.indexed)
    return [Factor((d, *none, broadcast_dim(values.shape, o, shape)), (d,)) for d, o in access.kept.items()]


def _put_along(call: Call, given: Placements, size: int) -> list[Strategy]:
    access, x = _access(call), call.inputs[0]
    if access is None:
        return []
    rest = (REPLICATE,) * (len(access.indexed) + 1)
    found = [
        Strategy((Shard(d, b), *rest), (Shard(d, b),), _emit_put_along)
        for d in access.indexed
        for b in equal_blocks_of(given[:1], (d,))
    ]
    if call.arg(3, "accumulate", False) and is_floating(x):
        shape, values = _result_shape(call, access), call.args[2]
        for d, n in enumerate(access.index_shape):
            dims = (*_index_dims(call, access, d), broadcast_dim(values.shape, access.first + d, shape))
            for b in equal_blocks_of(given[1:], dims) if n > 1 and any(k is not None for k in dims[:-1]) else ():
                inputs = tuple(REPLICATE if k is None else Shard(k, b) for k in dims)
                found.append(Strategy((REPLICATE, *inputs), (Partial(),), _emit_put_terms))
    return found


def _emit_put_along(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    part = strategy.inputs[0]
    assert isinstance(part, Shard)
    indices, _ = _localised(builder, call, args, part, builder.shape(args[0])[part.dim])

    def write(padded: Node) -> Node:
        return builder.call(call.op, padded, indices, *args[2:], **kwargs)

    return with_spare_row(builder, args[0], part.dim, write)


def _emit_put_terms(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return builder.call(call.op, *put(args, 0, counted_once(builder, args[0])), **kwargs)


def _put_groups(call: Call) -> Sequence[tuple[int, ...]]:
    return [(0, len(call.inputs) - 1)]


def _rows_written(
    table: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False
) -> RowAccess | None:
    rows = _rows(indices)
    return RowAccess(table, rows, values, adds=accumulate) if rows is not None else None


register(
    *overloads("index_put", "_unsafe_index_put"),
    spec=OpSpec(factors=_put_factors, strategies=_put_along, linear=_put_groups, access=_rows_written),
)
