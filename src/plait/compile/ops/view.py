"""Views: ops that rename, drop, add or repeat dims, reshapes, and as_strided.

An op of the first kind maps dims of its output to dims of its input. A reshape merges and splits dims within groups:
there a Shard(dim, blocks) over N ranks reads the flat index as (left, N, right), where left = (sizes of the dims before
it in the group) * blocks. The output dim with these N is the one where left divides into (sizes before it) * (its
blocks). as_strided describes memory, which may differ between a rank and one device, so it is rewritten by ops on
elements before all other rewrites (compile/sharding/formats.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.compile.ops.base import (
    REPLICATE,
    Args,
    Builder,
    Call,
    Emitted,
    Factor,
    Kwargs,
    OpSpec,
    Placements,
    Shard,
    Strategy,
    View,
    register,
    state,
)
from plait.compile.ops.dims import aten, blocks_of, dims_of, first_operand, overloads, positive, put
from plait.errors import CaptureError

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


def _squeezed(call: Call) -> list[int]:
    """The dims that a squeeze leaves out: none for an empty list, which other ops take for all dims."""
    shape = call.inputs[0].shape
    if len(call.args) == 1:
        dims: Sequence[int] = range(len(shape))
    else:
        dims = dims_of(call.args[1], len(shape)) if call.args[1] != [] else ()
    return [d for d in dims if shape[d] == 1]


def _squeeze(call: Call) -> Sequence[int | None]:
    out = _squeezed(call)
    return [d for d in range(call.inputs[0].ndim) if d not in out]


def _emit_squeeze(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
    """A part may have size 1 where the whole has not."""
    return builder.call(aten.squeeze.dims, args[0], _squeezed(call))


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


def _diagonal_dims(args: Args, kwargs: Kwargs, first: int, ndim: int) -> tuple[int, int]:
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


def _turned(call: Call) -> Sequence[int]:
    return dims_of(call.arg(2, "dims", [0, 1]), call.inputs[0].ndim)


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
state(*overloads("squeeze", "squeeze.dim", "squeeze.dims"), emit=_emit_squeeze)


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
    *overloads("view_as_complex"),
    spec=OpSpec(factors=_existing(_to_complex).factors, formats=True),
)
register(*overloads("view_as_real"), spec=OpSpec(factors=_existing(_to_real).factors))
state(*overloads("view_as_complex", "view_as_real"), view=View.PART)  # the dtype differs
register(*overloads("roll"), spec=_keeping(_rolled))
register(*overloads("rot90"), spec=_keeping(_turned))
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


def _emit_fewer(builder: Builder, call: Call, strategy: Strategy, args: Args, kwargs: Kwargs) -> Emitted:
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


_TRIED = (1, 2, 3, 4)  # numbers of blocks that a reader may want, if the input has none yet
Shape = tuple[int, ...]
Group = tuple[range, range]  # dims of the input, dims of the output


@functools.lru_cache(maxsize=4096)
def view_groups(source: Shape, target: Shape) -> tuple[Group, ...]:
    """The finest division of the two shapes into runs of dims with equal products."""
    groups: list[Group] = []
    i = j = 0
    while i < len(source) or j < len(target):
        start, begin = i, j
        left = source[i] if i < len(source) else 1
        right = target[j] if j < len(target) else 1
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while left != right:
            if left < right:
                left *= source[i]
                i += 1
            else:
                right *= target[j]
                j += 1
        groups.append((range(start, i), range(begin, j)))
    return tuple(groups)


def carry(source: Shape, target: Shape, shard: Shard, size: int) -> Shard | None:
    """The shard of the view `target` that a shard of `source` over `size` ranks becomes; None if it becomes none."""
    if math.prod(source) == 0:
        return None
    for dims, into in view_groups(source, target):
        if shard.dim not in dims:
            continue
        if not isinstance(shard.blocks, int):
            return _carry_unequal(source, target, shard, size, dims, into)
        left = math.prod(source[dims.start : shard.dim]) * shard.blocks
        before = 1
        for dim in into:
            if left % before == 0 and target[dim] % (left // before * size) == 0:
                return Shard(dim, left // before)
            before *= target[dim]
    return None


def _carry_unequal(source: Shape, target: Shape, shard: Shard, size: int, dims: range, into: range) -> Shard | None:
    """Unequal blocks stay on the first dim of the group, in the same proportions."""
    dim = next((d for d in into if target[d] > 1), None)
    if math.prod(source[dims.start : shard.dim]) > 1 or dim is None or target[dim] % (shard.num_units * size):
        return None
    return Shard(dim, shard.blocks)


@functools.lru_cache(maxsize=65536)
def _view_strategies(source: Shape, target: Shape, given: Shard | None, size: int) -> tuple[Strategy, ...]:
    if given is not None:
        shards: Sequence[Shard] = [given, *[Shard(d) for d in range(len(source)) if d != given.dim]]
        wanted: Sequence[Shard] = []
    else:
        shards = [Shard(d) for d in range(len(source))]
        wanted = [Shard(d, b) for d in range(len(target)) for b in _TRIED]
    found: dict[tuple[Shard, Shard], Strategy] = {}
    for shard in shards:
        if (
            source[shard.dim] % (shard.num_units * size) == 0
            and (out := carry(source, target, shard, size)) is not None
        ):
            found[shard, out] = Strategy((shard,), (out,))
    for out in wanted:
        if target[out.dim] % (out.num_units * size) == 0 and (back := carry(target, source, out, size)) is not None:
            found.setdefault((back, out), Strategy((back,), (out,)))
    return tuple(found.values())


def _strategies(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    out = call.outputs[0]
    assert out is not None
    return _view_strategies(call.inputs[0].shape, out.shape, given[0] if isinstance(given[0], Shard) else None, size)


register(
    *overloads("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"),
    spec=OpSpec(strategies=_strategies, linear=first_operand, sizes=1),
)
state(*overloads("view", "_unsafe_view", "reshape", "_reshape_alias"), view=View.RESHAPE)


def _memory_order(x: Tensor) -> list[int]:
    """Dims of x from the widest stride to the narrowest. Raises CaptureError if its memory has holes or overlaps."""
    order = sorted(range(x.ndim), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    if not x.permute(order).is_contiguous():
        raise CaptureError(
            f"as_strided of a tensor of shape {list(x.shape)} and strides {list(x.stride())}, whose memory has holes or"
            " overlaps; write it with slices or index"
        )
    return order


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The position in memory of each element of the strided view."""
    index = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(n, device=x.device) * step
    return index


def _same_elements(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    """Whether the strided view is all of x, in order."""
    return bool(
        not offset
        and x.is_contiguous()
        and math.prod(size) == x.numel()
        and all(
            n == 1 or step == math.prod(size[d + 1 :]) for d, (n, step) in enumerate(zip(size, stride, strict=True))
        )
    )


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    if _same_elements(x, size, stride, storage_offset):
        return x.view(size)
    memory = x.permute(_memory_order(x)).reshape(-1)
    return memory[_places(x, size, stride, storage_offset)]


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    if _same_elements(x, size, stride, storage_offset):
        return src.reshape(x.shape)
    order = _memory_order(x)
    memory = x.permute(order)
    places = _places(x, size, stride, storage_offset).reshape(-1)
    flat = memory.reshape(-1).index_put((places,), src.reshape(-1))
    back = [order.index(d) for d in range(x.ndim)]
    return flat.view(memory.shape).permute(back)


register(
    *overloads("as_strided"), spec=OpSpec(linear=first_operand, decompose=_as_strided, reads="memory", view=View.PART)
)
register(*overloads("as_strided_scatter"), spec=OpSpec(decompose=_as_strided_scatter, reads="memory"))
