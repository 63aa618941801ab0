"""The rule of `draw`: a rank can draw any part, because an element's number depends on its global position only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from plait.compile.ops.base import Builder, Call, OpSpec, Placements, Shard, Strategy, register
from plait.compile.ops.draw import draw

_BLOCKS = (1, 2, 3, 4)  # numbers of blocks that a reader may want


def _parts(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    """Sharded along any dim, in any number of blocks."""
    local = list(call.arg(2))
    for _, parts, dim, _ in call.arg(7, "cuts", ()):
        local[dim] //= parts
    return [Strategy((), (Shard(d, b),)) for d, n in enumerate(local) for b in _BLOCKS if n and n % (b * size) == 0]


def emit_draw(b: Builder, call: Call, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """The same draw with one more cut."""
    (placement,) = strategy.outputs
    *head, cuts = args if len(args) == 8 else (*args, ())
    if isinstance(placement, Shard):
        cuts = (*cuts, (b.coordinate(), b.size, placement.dim, placement.blocks))
    return b.call(draw, *head, cuts)


register(draw, spec=OpSpec(strategies=_parts, emit=emit_draw))
