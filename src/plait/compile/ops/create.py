"""Ops that create tensors: whole or in parts, as their readers want."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Kwargs,
    OpSpec,
    Partial,
    Placements,
    Replicate,
    Shard,
    Strategy,
    register,
    state,
)
from plait.compile.ops.dims import aten, overloads

_TRIED = (1, 2, 3, 4)  # numbers of blocks that a reader may want


def _parts(shape: Sequence[int], size: int) -> list[Shard]:
    return [Shard(d, b) for d, n in enumerate(shape) for b in _TRIED if n and n % (b * size) == 0]


def _constant(call: Call, given: Placements, size: int) -> list[Strategy]:
    """full, zeros: a part is like the whole."""
    out = call.outputs[0]
    assert out is not None
    return [Strategy((), (part,)) for part in _parts(out.shape, size)]


def _new(call: Call, given: Placements, size: int) -> list[Strategy]:
    """new_zeros(x, sizes): x gives only its dtype. A dim of x's size is sharded like x's."""
    out = call.outputs[0]
    assert out is not None
    have = given[0]
    found = []
    if isinstance(have, Shard):
        if have.dim < out.ndim and out.shape[have.dim] == call.inputs[0].shape[have.dim]:
            found.append(Strategy(given, (have,)))
    elif isinstance(have, Replicate):
        found = [Strategy(given, (part,)) for part in _parts(out.shape, size)]
    if isinstance(have, Shard | Partial):
        found.append(Strategy(given, (REPLICATE,)))
    return found


def _emit_new(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    (out,), spec = strategy.outputs, call.outputs[0]
    assert spec is not None
    part = out.dim if isinstance(out, Shard) else None
    sizes = [n // builder.size if d == part else n for d, n in enumerate(spec.shape)]
    return builder.call(call.op, args[0], sizes, *args[2:], **kwargs)


def _emit_new_strided(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """new_empty_strided(x, sizes, strides): a part has the same order of dims in memory, without holes."""
    (out,) = strategy.outputs
    part = out.dim if isinstance(out, Shard) else None
    sizes = [n // builder.size if d == part else n for d, n in enumerate(args[1])]
    strides = [0] * len(sizes)
    step = 1
    for d in sorted(range(len(sizes)), key=lambda d: (args[2][d], -d)):
        strides[d], step = step, step * sizes[d]
    return builder.call(call.op, args[0], sizes, strides, *args[3:], **kwargs)


def _arange_bounds(call: Call) -> tuple[Any, Any]:
    """The arguments start and step."""
    if call.op is aten.arange.default:
        return 0, 1
    step = call.arg(2, "step", 1) if call.op is aten.arange.start_step else 1
    return call.args[0], step


def _arange(call: Call, given: Placements, size: int) -> list[Strategy]:
    out = call.outputs[0]
    assert out is not None
    if not all(isinstance(v, int) for v in _arange_bounds(call)) or not out.shape[0] or out.shape[0] % size:
        return []
    return [Strategy((), (Shard(0),))]


def _emit_arange(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    start, step = _arange_bounds(call)
    out = call.outputs[0]
    assert out is not None
    count = out.shape[0] // builder.size
    first = builder.call(aten.arange.start_step, start, start + step * count, step, **{"dtype": out.dtype, **kwargs})
    return builder.call(aten.add.Scalar, first, builder.call(operator.mul, builder.coordinate(), step * count))


register(*overloads("full", "zeros", "ones", "empty.memory_format"), spec=OpSpec(strategies=_constant, sizes=0))
register(*overloads("scalar_tensor"), spec=OpSpec())
register(
    *overloads("new_zeros", "new_ones", "new_full", "new_empty"),
    spec=OpSpec(strategies=_new, emit=_emit_new, reads="shape"),
)
state(*overloads("zeros", "new_zeros"), fills=0)
state(*overloads("ones", "new_ones"), fills=1)
register(*overloads("new_empty_strided"), spec=OpSpec(strategies=_new, emit=_emit_new_strided))
register(*overloads("arange", "arange.start", "arange.start_step"), spec=OpSpec(strategies=_arange, emit=_emit_arange))


def _anything(call: Call, given: Placements, size: int) -> list[Strategy]:
    if not all(isinstance(p, Shard | Partial | Replicate) for p in given):
        return []
    return [Strategy(given, (REPLICATE,) * len(call.outputs), _emit_assert)]


def _emit_assert(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """Only the dtype of a part equals that of the whole."""
    return builder.call(call.op, args[0], None, None, call.arg(3, "dtype"))


register(*overloads("_assert_tensor_metadata"), spec=OpSpec(strategies=_anything))
