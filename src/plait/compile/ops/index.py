"""Lookups and writes by index.

Along a sharded dim every rank handles the indices that fall into its part. A lookup gives zeros for the others, so that
the ranks' results are partial sums. A write sends the others to a spare row, which is dropped.

torch.nn.functional.embedding_bag is a lookup and a sum over the rows of each bag: PyTorch's own op takes the rows of
all bags in one dim, in which a batch cannot be cut, and a lookup has a row for each bag.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
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
    register,
    state,
)
from plait.compile.ops.dims import aten, equal_blocks_of, first_operand, is_floating, overloads, positive, put
from plait.spec.layout import Blocks


def local_index(builder: Builder, index: Node, length: int, blocks: Blocks) -> tuple[Node, Node]:
    """Global indices into a dim of `length` as indices into this rank's part, and a mask of those outside the part.

    Local indices outside the part may be anything: see `masked`.
    """
    assert isinstance(blocks, int)  # strategies try equal blocks only: see `equal_blocks_of`
    width = length // (blocks * builder.size)
    start = builder.call(operator.mul, builder.coordinate(), width)
    if blocks == 1:
        local = builder.call(aten.sub.Scalar, index, start)
        inside = local
    else:
        block = builder.call(aten.floor_divide.default, index, length // blocks)
        inside = builder.call(aten.remainder.Scalar, index, length // blocks)
        inside = builder.call(aten.sub.Scalar, inside, start)
        local = builder.call(aten.add.Tensor, builder.call(aten.mul.Scalar, block, width), inside)
    below = builder.call(aten.lt.Scalar, inside, 0)
    outside = builder.call(aten.logical_or.default, below, builder.call(aten.ge.Scalar, inside, width))
    return local, outside


def masked(builder: Builder, index: Node, outside: Node, value: int) -> Node:
    """The indices, with `value` in place of those that are outside of this rank's rows."""
    return builder.call(aten.masked_fill.Scalar, index, outside, value)


def counted_once(builder: Builder, tensor: Node) -> Node:
    """A whole tensor as terms of a sum over the ranks."""
    return builder.call(aten.div.Scalar, tensor, builder.size)


def with_spare_row(builder: Builder, tensor: Node, dim: int, write: Callable[[Node], Node]) -> Node:
    """Apply `write` to the tensor with one more row at the end of `dim`, and drop that row."""
    shape = builder.shape(tensor)
    padded = builder.call(aten.constant_pad_nd.default, tensor, [0, 0] * (len(shape) - 1 - dim) + [0, 1])
    return builder.call(aten.slice.Tensor, write(padded), dim, 0, shape[dim])


# ---- embedding ----


def _embedding_factors(call: Call) -> list[Factor]:
    ids = call.inputs[1].ndim
    return [Factor((1, None), (ids,)), *(Factor((None, d), (d,)) for d in range(ids))]


def _embedding_rows(call: Call, given: Placements, size: int) -> list[Strategy]:
    return [
        Strategy((Shard(0, b), REPLICATE), (Partial(),), _emit_embedding_rows)
        for b in equal_blocks_of(given, (0, None))
    ]


def _emit_embedding_rows(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    (rows, _) = strategy.inputs
    assert isinstance(rows, Shard)
    local, outside = local_index(builder, args[1], call.inputs[0].shape[0], rows.blocks)
    found = builder.call(call.op, args[0], masked(builder, local, outside, 0))
    return builder.call(aten.masked_fill.Scalar, found, builder.call(aten.unsqueeze.default, outside, -1), 0)


register(
    *overloads("embedding"),
    spec=OpSpec(factors=_embedding_factors, strategies=_embedding_rows, linear=first_operand, role="lookup"),
)


def _embedding_backward_factors(call: Call) -> list[Factor]:
    """(grad, ids, num_weights, padding_idx, scale_grad_by_freq): a sum over tokens, unless they are counted."""
    ids = call.inputs[1].ndim
    tokens = [] if call.args[4] else [Factor((d, d), (None,)) for d in range(ids)]
    return [Factor((ids, None), (1,)), *tokens]


def _embedding_backward_rows(call: Call, given: Placements, size: int) -> list[Strategy]:
    if call.args[4]:
        return []
    return [Strategy((REPLICATE, REPLICATE), (Shard(0),), _emit_embedding_backward_rows)]


def _emit_embedding_backward_rows(
    builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs
) -> Emitted:
    grad, ids, length, padding, scale = args
    local, outside = local_index(builder, ids, length, 1)
    if padding >= 0:
        outside = builder.call(aten.logical_or.default, outside, builder.call(aten.eq.Scalar, ids, padding))
    grad = builder.call(aten.masked_fill.Scalar, grad, builder.call(aten.unsqueeze.default, outside, -1), 0)
    return builder.call(call.op, grad, masked(builder, local, outside, 0), length // builder.size, -1, scale)


register(
    *overloads("embedding_dense_backward"),
    spec=OpSpec(factors=_embedding_backward_factors, strategies=_embedding_backward_rows, linear=first_operand),
)

# ---- gather, index_select: one index tensor along one dim ----


def _gather_factors(call: Call) -> list[Factor]:
    x, index = call.inputs
    dim = positive(call.args[1], x.ndim)
    same = [Factor((d, d), (d,)) for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]]
    return [*same, *([Factor((None, dim), (dim,))] if x.ndim else [])]


def _select_factors(call: Call) -> list[Factor]:
    x, index = call.inputs
    dim = positive(call.args[1], x.ndim)
    rows = [Factor((None, 0), (dim,))] if index.ndim and x.ndim else []
    return [*(Factor((d, None), (d,)) for d in range(x.ndim) if d != dim), *rows]


def _gather_along(call: Call, given: Placements, size: int) -> list[Strategy]:
    x = call.inputs[0]
    if x.dtype is torch.bool or not x.ndim:
        return []
    dim = positive(call.args[1], x.ndim)
    return [
        Strategy((Shard(dim, b), REPLICATE), (Partial(),), _emit_gather_along)
        for b in equal_blocks_of(given, (dim, None))
    ]


def _emit_gather_along(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    (part, _) = strategy.inputs
    assert isinstance(part, Shard)
    local, outside = local_index(builder, args[2], call.inputs[0].shape[part.dim], part.blocks)
    found = builder.call(call.op, *put(args, 2, masked(builder, local, outside, 0)), **kwargs)
    if call.op is aten.index_select.default:  # one mask for every row
        behind = call.inputs[0].ndim - part.dim - 1
        outside = builder.call(aten.view.default, outside, [-1, *[1] * behind])
    return builder.call(aten.masked_fill.Scalar, found, outside, 0)


register(*overloads("gather"), spec=OpSpec(factors=_gather_factors, strategies=_gather_along, linear=first_operand))
register(
    *overloads("index_select"), spec=OpSpec(factors=_select_factors, strategies=_gather_along, linear=first_operand)
)

# ---- scatter, index_add: writes by one index tensor along one dim ----

_ADDING = frozenset(overloads("scatter_add", "index_add"))


def _scatter_factors(call: Call) -> list[Factor]:
    """(x, dim, index, src or value): the dims in which all have one size."""
    x = call.inputs[0]
    dim = positive(call.args[1], x.ndim)
    return [
        Factor((d,) * len(call.inputs), (d,))
        for d in range(x.ndim)
        if d != dim and all(s.shape[d] == x.shape[d] for s in call.inputs)
    ]


def _index_add_factors(call: Call) -> list[Factor]:
    """(x, dim, index, source): the index has one dim."""
    x = call.inputs[0]
    dim = positive(call.args[1], x.ndim)
    return [Factor((d, None, d), (d,)) for d in range(x.ndim) if d != dim]


def _scatter_along(call: Call, given: Placements, size: int) -> list[Strategy]:
    x, index = call.inputs[:2]
    if not x.ndim:
        return []
    dim = positive(call.args[1], x.ndim)
    rest = (REPLICATE,) * (len(call.inputs) - 1)
    found = [
        Strategy((Shard(dim, b), *rest), (Shard(dim, b),), _emit_scatter_along)
        for b in equal_blocks_of(given, (dim, *(None,) * len(rest)))
    ]
    if call.op in _ADDING and is_floating(x) and index.ndim:
        along = Shard(0 if call.op is aten.index_add.default else dim)
        found.append(Strategy((REPLICATE, along, Shard(dim)), (Partial(),), _emit_add_terms))
    return found


def _emit_scatter_along(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    part = strategy.inputs[0]
    assert isinstance(part, Shard)
    local, outside = local_index(builder, args[2], call.inputs[0].shape[part.dim], part.blocks)
    local = masked(builder, local, outside, builder.shape(args[0])[part.dim])

    def write(padded: Node) -> Node:
        return builder.call(call.op, padded, args[1], local, *args[3:], **kwargs)

    return with_spare_row(builder, args[0], part.dim, write)


def _emit_add_terms(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    return builder.call(call.op, counted_once(builder, args[0]), *args[1:], **kwargs)


def _written(call: Call) -> list[tuple[int, ...]]:
    """Linear in the tensor that is written to and the one that is written, jointly."""
    if len(call.inputs) == 3:
        return [(0, 2)]
    return [(0,)] if call.args[3] == 0 else []


register(
    *overloads("scatter.src", "scatter.value", "scatter_add"),
    spec=OpSpec(factors=_scatter_factors, strategies=_scatter_along, linear=_written),
)
register(*overloads("scatter_reduce.two"), spec=OpSpec(factors=_scatter_factors, strategies=_scatter_along))
register(
    *overloads("index_add", "index_copy"),
    spec=OpSpec(factors=_index_add_factors, strategies=_scatter_along, linear=_written),
)
register(*overloads("index_reduce"), spec=OpSpec(factors=_index_add_factors))


def _fill_factors(call: Call) -> list[Factor]:
    """(x, dim, index, value): the dims that are not indexed."""
    x = call.inputs[0]
    dim = positive(call.args[1], x.ndim)
    rest = (None,) * (len(call.inputs) - 1)
    return [Factor((d, *rest), (d,)) for d in range(x.ndim) if d != dim]


register(*overloads("index_fill.int_Scalar", "index_fill.int_Tensor"), spec=OpSpec(factors=_fill_factors))


def _rows_read(table: Node, dim: int, index: Node) -> RowAccess | None:
    return RowAccess(table, (index,)) if dim == 0 else None


def _rows_written(table: Node, dim: int, index: Node, values: Node) -> RowAccess | None:
    return RowAccess(table, (index,), values) if dim == 0 else None


def _rows_added(table: Node, dim: int, index: Node, values: Node, *, alpha: float = 1) -> RowAccess | None:
    return RowAccess(table, (index,), values, adds=True) if dim == 0 and alpha == 1 else None


def _elements_read(table: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> RowAccess | None:
    return RowAccess(table, (index,), by_element=True) if dim == 0 else None


def _elements_written(table: Node, dim: int, index: Node, values: Node) -> RowAccess | None:
    return RowAccess(table, (index,), values, by_element=True) if dim == 0 else None


def _elements_added(table: Node, dim: int, index: Node, values: Node) -> RowAccess | None:
    return RowAccess(table, (index,), values, adds=True, by_element=True) if dim == 0 else None


state(*overloads("index_select"), access=_rows_read)
state(*overloads("index_copy"), access=_rows_written)
state(*overloads("index_add"), access=_rows_added)
state(*overloads("gather"), access=_elements_read)
state(*overloads("scatter.src"), access=_elements_written)
state(*overloads("scatter_add"), access=_elements_added)


def _buckets(call: Call) -> Sequence[Factor]:
    """bucketize(values, boundaries): one result per value."""
    return [Factor((d, None), (d,)) for d in range(call.inputs[0].ndim)]


register(*overloads("bucketize.Tensor", "isin.Tensor_Tensor"), spec=OpSpec(factors=_buckets))

# Ops that no graph of fixed shapes can hold.
state(
    *overloads("_pack_padded_sequence"),
    advice="run a layer of one direction on the padded rows, and read what it gives at each row's last position, as"
    " out[torch.arange(len(lengths)), lengths - 1]",
)
state(
    *overloads("bincount"),
    advice="count into a tensor of a fixed length, as torch.zeros(n).index_add(0, x, torch.ones(len(x)))",
)


def by_lookup(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """torch.nn.functional.embedding_bag. Returns NotImplemented for arguments that it refuses, for gradients that are
    sparse or scaled by frequency, and for the largest rows of bags that offsets delimit."""
    by_offsets = offsets is not None
    if sparse or scale_grad_by_freq or input.ndim != (1 if by_offsets else 2) or weight.ndim != 2:
        return NotImplemented
    if mode not in (("sum", "mean") if by_offsets else ("sum", "mean", "max")):
        return NotImplemented
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return NotImplemented
    rows = F.embedding(input, weight, None, max_norm, norm_type)
    padding = None if padding_idx is None else (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return _largest(rows, padding)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding is not None:
        rows = rows.masked_fill(padding, 0)
    if offsets is not None:
        offsets = offsets[:-1] if include_last_offset else offsets
        places = torch.arange(len(input), device=input.device, dtype=offsets.dtype)
        bags = torch.bucketize(places, offsets, right=True) - 1

    def total(values: Tensor) -> Tensor:
        if offsets is None:
            return values.sum(1)
        return values.new_zeros(len(offsets), values.shape[1]).index_add(0, bags, values)

    if mode == "sum":
        return total(rows)
    count = torch.ones_like(input) if padding is None else (~padding).squeeze(-1)
    return total(rows) / total(count.to(rows.dtype).unsqueeze(-1)).clamp(min=1)


def _largest(rows: Tensor, padding: Tensor | None) -> Tensor:
    """The largest rows; zeros where there are none."""
    if not rows.shape[1]:
        return rows.sum(1)
    if padding is None:
        return rows.max(1).values
    return rows.masked_fill(padding, -torch.inf).max(1).values.masked_fill(padding.all(1), 0)
