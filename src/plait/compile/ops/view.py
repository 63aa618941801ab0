"""Ops that rename, drop, add or repeat dims: each maps dims of its output to dims of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plait.compile.ops.base import (
    REPLICATE,
    Builder,
    Call,
    Factor,
    OpSpec,
    Placements,
    Shard,
    Strategy,
    View,
    register,
    state,
)
from plait.compile.ops.dims import blocks_of, dims_of, first_operand, overloads, positive, put

DimMap = Callable[[Call], Sequence[int | None]]  # for each dim of the output, the dim of the input or None


def _mapped(dim_map: DimMap) -> OpSpec:
    def factors(call: Call) -> list[Factor]:
        return [Factor((source,), (d,)) for d, source in enumerate(dim_map(call))]

    return OpSpec(factors=factors, linear=first_operand)


def _swap(call: Call, a: int, b: int) -> list[int | None]:
    dims: list[int | None] = list(range(call.inputs[0].ndim))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _t(call: Call) -> Sequence[int | None]:
    return _swap(call, 0, -1)


def _transpose(call: Call) -> Sequence[int | None]:
    ndim = call.inputs[0].ndim
    return _swap(call, positive(call.args[1], ndim), positive(call.args[2], ndim))


def _permute(call: Call) -> Sequence[int | None]:
    return [positive(d, call.inputs[0].ndim) for d in call.args[1]]


def _squeeze(call: Call) -> Sequence[int | None]:
    shape = call.inputs[0].shape
    dims = dims_of(call.args[1], len(shape)) if len(call.args) > 1 else range(len(shape))
    return [d for d, n in enumerate(shape) if not (d in dims and n == 1)]


def _unsqueeze(call: Call) -> Sequence[int | None]:
    ndim = call.inputs[0].ndim
    new = positive(call.args[1], ndim + 1)
    return [*range(new), None, *range(new, ndim)]


def _expand(call: Call) -> Sequence[int | None]:
    shape, out = call.inputs[0].shape, call.outputs[0]
    assert out is not None
    new = out.ndim - len(shape)
    return [d - new if d >= new and shape[d - new] == n else None for d, n in enumerate(out.shape)]


def _select(call: Call) -> Sequence[int | None]:
    dim = positive(call.args[1], call.inputs[0].ndim)
    return [d for d in range(call.inputs[0].ndim) if d != dim]


def _diagonal_dims(args: Sequence[Any], kwargs: dict[str, Any], first: int, ndim: int) -> tuple[int, int]:
    found = (args[first + i] if len(args) > first + i else kwargs.get(f"dim{i + 1}", i) for i in range(2))
    a, b = (positive(d, ndim) for d in found)
    return a, b


def _diagonal(call: Call) -> Sequence[int | None]:
    ndim = call.inputs[0].ndim
    gone = _diagonal_dims(call.args, call.kwargs, 2, ndim)
    return [*(d for d in range(ndim) if d not in gone), None]


def _sliding(call: Call) -> Sequence[int | None]:
    """unfold: windows along one dim, with their elements in a new last dim."""
    ndim = call.inputs[0].ndim
    dim = positive(call.args[1], ndim)
    return [*(None if d == dim else d for d in range(ndim)), None]


def _keeping(whole: Callable[[Call], Sequence[int]], exact: bool = True) -> OpSpec:
    """An op that keeps the order of dims and needs some of them whole. `exact` says whether it is linear."""

    def factors(call: Call) -> list[Factor]:
        busy = whole(call)
        return [Factor((d,), (d,)) for d in range(call.inputs[0].ndim) if d not in busy]

    return OpSpec(factors=factors, linear=first_operand) if exact else OpSpec(factors=factors)


def _flipped(call: Call) -> Sequence[int]:
    return dims_of(call.args[1], call.inputs[0].ndim) if call.args[1] else ()


def _rolled(call: Call) -> Sequence[int]:
    return dims_of(call.arg(2, "dims"), call.inputs[0].ndim)


def _triangle(call: Call) -> Sequence[int]:
    ndim = call.inputs[0].ndim
    return (ndim - 2, ndim - 1)


for _names, _map in {
    ("t",): _t,
    ("transpose.int",): _transpose,
    ("permute",): _permute,
    ("squeeze", "squeeze.dim", "squeeze.dims"): _squeeze,
    ("unsqueeze",): _unsqueeze,
}.items():
    register(*overloads(*_names), spec=replace(_mapped(_map), view=View.WHOLE))


def _existing(dim_map: DimMap) -> OpSpec:
    """As `_mapped`, but dims that the input does not have stay whole."""

    def factors(call: Call) -> list[Factor]:
        return [Factor((source,), (d,)) for d, source in enumerate(dim_map(call)) if source is not None]

    return OpSpec(factors=factors, linear=first_operand)


def _expand_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    return [Strategy((REPLICATE,), (Shard(d),)) for d, source in enumerate(_expand(call)) if source is None]


for _name, _map in {"select.int": _select, "diagonal": _diagonal, "unfold": _sliding}.items():
    register(*overloads(_name), spec=replace(_existing(_map), view=View.PART))
register(
    *overloads("expand"),
    spec=OpSpec(
        factors=_existing(_expand).factors,
        strategies=_expand_strategies,
        linear=first_operand,
        sizes=1,
        view=View.PART,
    ),
)
register(*overloads("flip"), spec=_keeping(_flipped))


def _to_complex(call: Call) -> Sequence[int | None]:
    return range(call.inputs[0].ndim - 1)


def _to_real(call: Call) -> Sequence[int | None]:
    return [*range(call.inputs[0].ndim), None]


# Real and imaginary parts are a last dim of two, which stays whole. Sums come first: they are communicated as reals.
register(
    *overloads("view_as_complex", "view_as_complex_copy"),
    spec=OpSpec(factors=_existing(_to_complex).factors, formats=True),
)
register(*overloads("view_as_real", "view_as_real_copy"), spec=OpSpec(factors=_existing(_to_real).factors))
state(*overloads("view_as_complex", "view_as_real"), view=View.PART)  # the dtype differs
register(*overloads("roll"), spec=_keeping(_rolled))
register(*overloads("tril", "triu"), spec=_keeping(_triangle))


def _repeat_strategies(call: Call, given: Placements, size: int) -> list[Strategy]:
    """Copies of a sharded dim, one after the other, are blocks; a dim of one element is repeated in parts."""
    shape, repeats = call.inputs[0].shape, call.args[1]
    new = len(repeats) - len(shape)
    found = []
    for d, times in enumerate(repeats):
        own = d - new if d >= new else None
        if own is not None and shape[own] > 1:
            found += [Strategy((Shard(own, b),), (Shard(d, b * times),)) for b in blocks_of(given, (own,))]
        elif times % size == 0 and times > 0:
            found.append(Strategy((REPLICATE,), (Shard(d),), _emit_fewer))
    return found


def _emit_fewer(builder: Builder, call: Call, strategy: Strategy, args: Any, kwargs: Any) -> Any:
    (out,) = strategy.outputs
    assert isinstance(out, Shard)
    repeats = list(args[1])
    repeats[out.dim] //= builder.size
    return builder.call(call.op, *put(args, 1, repeats), **kwargs)


register(*overloads("repeat"), spec=OpSpec(strategies=_repeat_strategies, linear=first_operand))


def _padded(call: Call) -> Sequence[int]:
    """The dims that constant_pad_nd changes: its argument has pairs of widths from the last dim on."""
    pad, ndim = call.args[1], call.inputs[0].ndim
    return [ndim - 1 - i // 2 for i, width in enumerate(pad) if width != 0]


def _pad_groups(call: Call) -> list[tuple[int, ...]]:
    return [(0,)] if call.arg(2, "value", 0) == 0 else []


register(*overloads("constant_pad_nd"), spec=OpSpec(factors=_keeping(_padded).factors, linear=_pad_groups))


def _border(num_dims: int) -> OpSpec:
    """Padding with the tensor's own border in the last dims, and its backward."""

    def factors(call: Call) -> list[Factor]:
        return [Factor((d,) * len(call.inputs), (d,)) for d in range(call.inputs[0].ndim - num_dims)]

    return OpSpec(factors=factors, linear=first_operand)


for _n in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        register(*overloads(f"{_kind}_pad{_n}d", f"{_kind}_pad{_n}d_backward"), spec=_border(_n))
