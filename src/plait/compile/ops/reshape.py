"""view and similar ops: which dim of the output a shard of an input dim becomes, and in how many blocks.

Within a group of dims that are merged and split among themselves, a Shard(dim, blocks) over N ranks reads the flat
index as (left, N, right), where left = (sizes of the dims before it in the group) * blocks. The output dim with these N
is the one where left divides into (sizes before it) * (its blocks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from plait.compile.ops.base import Call, OpSpec, Placements, Shard, Strategy, View, register, state
from plait.compile.ops.dims import first_operand, overloads

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
    """What a shard of `source` over `size` ranks is in the view `target`; None if it is no shard of it."""
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
    *overloads("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy"),
    spec=OpSpec(strategies=_strategies, linear=first_operand, sizes=1),
)
state(*overloads("view", "_unsafe_view", "reshape", "_reshape_alias"), view=View.RESHAPE)
