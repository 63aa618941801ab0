"""Ops that split a dim into pieces or join pieces along one: slice, split, cat, stack, and their backward ops.

A dim in blocks can be split between blocks without communication: a fused q, k, v of Shard(dim, 3) splits into three
tensors of Shard(dim, 1), and cat joins them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Placement,
    Placements,
    Shard,
    Strategy,
    View,
    register,
    state,
)
from plait.compile.ops.dims import all_operands, aten, blocks_of, first_operand, overloads, positive
from plait.spec.layout import Blocks, block_lengths, blocks_of_lengths, num_units


def _others(position: int) -> Callable[[Call], Sequence[Factor]]:
    """Factors of all dims except the one that an argument names."""

    def factors(call: Call) -> list[Factor]:
        ndim = call.inputs[0].ndim
        dim = positive(call.arg(position, "dim", 0), ndim)
        return [Factor((d,), (d,) * len(call.outputs)) for d in range(ndim) if d != dim]

    return factors


def _span(length: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    first, last, _ = slice(start, end, step).indices(length)
    return first, max(first, last)


def _covered(length: int, blocks: Blocks, first: int, last: int) -> Blocks | None:
    """The blocks of a dim that lie between `first` and `last`; None if one of them lies there only in part."""
    if length % num_units(blocks):
        return None
    inner = []
    start = 0
    for width in block_lengths(length, blocks):
        if first <= start and start + width <= last and width:
            inner.append(width)
        elif start < last and first < start + width:
            return None
        start += width
    return blocks_of_lengths(inner) if inner else None


def _slice_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    spec = call.inputs[0]
    dim = positive(call.arg(1, "dim", 0), spec.ndim)
    step = call.arg(4, "step", 1)
    first, last = _span(spec.shape[dim], call.arg(2, "start"), call.arg(3, "end"), step)
    found = []
    for blocks in blocks_of(given, (dim,)):
        pieces = _covered(spec.shape[dim], blocks, first, last) if step == 1 else None
        if pieces is not None:
            found.append(Strategy((Shard(dim, blocks),), (Shard(dim, pieces),), _emit_slice))
        if _every(spec.shape[dim], first, last, step, num_units(blocks) * size):
            found.append(Strategy((Shard(dim, blocks),), (Shard(dim, blocks),)))
    return found


def _every(length: int, first: int, last: int, step: int, parts: int) -> bool:
    """Whether every `step`-th element of the whole dim is taken, and alike in each part."""
    return step > 1 and first < step and last == length and length % (step * parts) == 0


def _emit_slice(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    spec = call.inputs[0]
    dim = positive(call.arg(1, "dim", 0), spec.ndim)
    first, last = _span(spec.shape[dim], call.arg(2, "start"), call.arg(3, "end"), 1)
    return builder.call(call.op, args[0], dim, first // builder.size, last // builder.size)


register(
    *overloads("slice.Tensor"),
    spec=OpSpec(factors=_others(1), strategies=_slice_strategies, linear=first_operand, view=View.PART),
)


def _split_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Strategies with blocks that lie whole in the pieces: the input's blocks, or each piece as a block."""
    spec = call.inputs[0]
    dim = positive(call.arg(2, "dim", 0), spec.ndim)
    widths = [o.shape[dim] for o in call.outputs if o is not None]
    tried = blocks_of(given, (dim,))
    if not isinstance(given[0], Shard) and any(widths):
        tried.append(blocks_of_lengths([width for width in widths if width]))
    found = []
    for blocks in dict.fromkeys(tried):
        outputs = _pieces(spec.shape[dim], dim, blocks, widths)
        if outputs is not None:
            found.append(Strategy((Shard(dim, blocks),), outputs, _emit_split))
    return found


def _pieces(length: int, dim: int, blocks: Blocks, widths: list[int]) -> tuple[Placement, ...] | None:
    """Placements of the pieces of a dim that is sharded in these blocks; an empty piece is whole."""
    found: list[Placement] = []
    end = 0
    for width in widths:
        end += width
        piece = _covered(length, blocks, end - width, end)
        if piece is None and width:
            return None
        found.append(REPLICATE if piece is None else Shard(dim, piece))
    return tuple(found)


def _emit_split(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    dim = positive(call.arg(2, "dim", 0), call.inputs[0].ndim)
    widths = [o.shape[dim] // builder.size for o in call.outputs if o is not None]
    return builder.call(aten.split_with_sizes.default, args[0], widths, dim)


register(
    *overloads("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes", "chunk",
               "unsafe_chunk"),
    spec=OpSpec(factors=_others(2), strategies=_split_strategies, linear=first_operand),
)  # fmt: skip
state(*overloads("split.Tensor", "split_with_sizes", "chunk"), view=View.PART)


def _unbind_factors(call: Call) -> list[Factor]:
    ndim = call.inputs[0].ndim
    dim = positive(call.arg(1, "dim", 0), ndim)
    return [Factor((d,), (d - (d > dim),) * len(call.outputs)) for d in range(ndim) if d != dim]


register(*overloads("unbind.int"), spec=OpSpec(factors=_unbind_factors, linear=first_operand, view=View.PART))


def _cat_factors(call: Call) -> list[Factor]:
    out = call.outputs[0]
    assert out is not None
    dim = positive(call.arg(1, "dim", 0), out.ndim)
    # An empty tensor of one dim may be among the others: it has nothing to shard.
    return [
        Factor(tuple(d if s.ndim == out.ndim else None for s in call.inputs), (d,)) for d in range(out.ndim) if d != dim
    ]


def _cat_strategies(call: Call, given: Sequence[Placement], size: int) -> list[Strategy]:
    out = call.outputs[0]
    assert out is not None
    dim = positive(call.arg(1, "dim", 0), out.ndim)
    # Tensors without elements along the dim stay whole.
    some = [s.ndim == out.ndim and s.shape[dim] > 0 for s in call.inputs]
    widths = [s.shape[dim] for s, counts in zip(call.inputs, some, strict=True) if counts]
    given = [p for p, counts in zip(given, some, strict=True) if counts]
    have = [p.blocks if isinstance(p, Shard) and p.dim == dim else 1 for p in given]

    def with_empty(parts: Sequence[Placement]) -> tuple[Placement, ...]:
        rest = iter(parts)
        return tuple(next(rest) if counts else REPLICATE for counts in some)

    blocks = {
        w // p.blocks
        for w, p in zip(widths, given, strict=True)
        if isinstance(p, Shard) and p.dim == dim and isinstance(p.blocks, int) and w % p.blocks == 0
    }
    found = [
        Strategy(with_empty([Shard(dim, w // width) for w in widths]), (Shard(dim, out.shape[dim] // width),))
        for width in sorted(blocks or {math.gcd(*widths)} - {0})
        if all(w % width == 0 for w in widths)
    ]
    if widths and all(w % num_units(b) == 0 for w, b in zip(widths, have, strict=True)):  # keep each one's blocks
        lengths = [n for w, b in zip(widths, have, strict=True) for n in block_lengths(w, b)]
        found.append(Strategy(with_empty([Shard(dim, b) for b in have]), (Shard(dim, blocks_of_lengths(lengths)),)))
    return found


register(*overloads("cat"), spec=OpSpec(factors=_cat_factors, strategies=_cat_strategies, linear=all_operands))


def _stack_factors(call: Call) -> list[Factor]:
    ndim = call.inputs[0].ndim
    dim = positive(call.arg(1, "dim", 0), ndim + 1)
    return [Factor((d,) * len(call.inputs), (d + (d >= dim),)) for d in range(ndim)]


register(*overloads("stack"), spec=OpSpec(factors=_stack_factors, linear=all_operands))


def _slice_backward_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """(grad, input_sizes, dim, start, end, step): zeros around the gradient, which may be whole blocks."""
    sizes = call.args[1]
    dim = positive(call.args[2], len(sizes))
    first, last = _span(sizes[dim], call.args[3], call.args[4], call.args[5])
    found = []
    for blocks in blocks_of(given, (dim,)):
        width, rest = divmod(last - first, num_units(blocks))
        if call.args[5] == 1 and width and not rest:
            if isinstance(blocks, int) and first % width == 0 and sizes[dim] % width == 0:
                out = Shard(dim, sizes[dim] // width)
                found.append(Strategy((Shard(dim, blocks),), (out,), _emit_slice_backward))
            lengths = [first, *block_lengths(last - first, blocks), sizes[dim] - last]
            out = Shard(dim, blocks_of_lengths([n for n in lengths if n]))
            found.append(Strategy((Shard(dim, blocks),), (out,), _emit_slice_backward))
        if _every(sizes[dim], first, last, call.args[5], num_units(blocks) * size):
            found.append(Strategy((Shard(dim, blocks),), (Shard(dim, blocks),), _emit_every_backward))
    return found


def _emit_every_backward(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    sizes = list(args[1])
    dim = positive(args[2], len(sizes))
    sizes[dim] //= builder.size
    return builder.call(call.op, args[0], sizes, *args[2:])


def _emit_slice_backward(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    sizes = list(args[1])
    dim = positive(args[2], len(sizes))
    first, last = _span(sizes[dim], args[3], args[4], args[5])
    sizes[dim] //= builder.size
    return builder.call(call.op, args[0], sizes, dim, first // builder.size, last // builder.size, 1)


register(
    *overloads("slice_backward"),
    spec=OpSpec(factors=_others(2), strategies=_slice_backward_strategies, linear=first_operand, sizes=1),
)


def _select_backward_factors(call: Call) -> list[Factor]:
    ndim = call.inputs[0].ndim
    dim = positive(call.args[2], ndim + 1)
    return [Factor((d,), (d + (d >= dim),)) for d in range(ndim)]


register(*overloads("select_backward"), spec=OpSpec(factors=_select_backward_factors, linear=first_operand, sizes=1))


def _diagonal_backward_factors(call: Call) -> list[Factor]:
    """(grad, input_sizes, offset, dim1, dim2): the diagonal is the gradient's last dim."""
    ndim = len(call.args[1])
    gone = {positive(d, ndim) for d in call.args[3:5]}
    return [Factor((i,), (d,)) for i, d in enumerate(d for d in range(ndim) if d not in gone)]


def _unfold_backward_factors(call: Call) -> list[Factor]:
    """(grad, input_sizes, dim, size, step): windows along dim, whose elements are in the gradient's last dim."""
    ndim = len(call.args[1])
    dim = positive(call.args[2], ndim)
    return [Factor((d,), (d,)) for d in range(ndim) if d != dim]


register(
    *overloads("diagonal_backward"), spec=OpSpec(factors=_diagonal_backward_factors, linear=first_operand, sizes=1)
)
register(*overloads("unfold_backward"), spec=OpSpec(factors=_unfold_backward_factors, linear=first_operand, sizes=1))


def _slice_scatter_factors(call: Call) -> list[Factor]:
    """(x, src, dim, start, end, step): src replaces a slice of x."""
    ndim = call.inputs[0].ndim
    dim = positive(call.arg(2, "dim", 0), ndim)
    return [Factor((d, d), (d,)) for d in range(ndim) if d != dim]


def _select_scatter_factors(call: Call) -> list[Factor]:
    ndim = call.inputs[0].ndim
    dim = positive(call.args[2], ndim)
    return [Factor((d, d - (d > dim)), (d,)) for d in range(ndim) if d != dim]


register(*overloads("slice_scatter"), spec=OpSpec(factors=_slice_scatter_factors, linear=all_operands))
register(*overloads("select_scatter"), spec=OpSpec(factors=_select_scatter_factors, linear=all_operands))


def _off_diagonal(ndim: int, args: Args, kwargs: Kwargs, first: int, default: int) -> list[int]:
    """The dims that a diagonal does not run through."""
    given = (args[first + n] if len(args) > first + n else kwargs.get(f"dim{n + 1}", default + n) for n in range(2))
    gone = {positive(d, ndim) for d in given}
    return [d for d in range(ndim) if d not in gone]


def _diag_embed_factors(call: Call) -> list[Factor]:
    """(x, offset, dim1, dim2): x's last dim becomes the diagonal of two new dims."""
    kept = _off_diagonal(call.inputs[0].ndim + 1, call.args, call.kwargs, 2, -2)
    return [Factor((place,), (d,)) for place, d in enumerate(kept)]


def _diagonal_scatter_factors(call: Call) -> list[Factor]:
    """(x, src, offset, dim1, dim2): src replaces a diagonal of x, which is its last dim."""
    kept = _off_diagonal(call.inputs[0].ndim, call.args, call.kwargs, 3, 0)
    return [Factor((d, place), (d,)) for place, d in enumerate(kept)]


register(*overloads("diag_embed"), spec=OpSpec(factors=_diag_embed_factors, linear=first_operand))
register(*overloads("diagonal_scatter"), spec=OpSpec(factors=_diagonal_scatter_factors, linear=all_operands))
