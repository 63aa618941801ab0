"""The rule of `draw`: random numbers may be drawn in any part, as every element has its own by global position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from plait.graph.random import draw
from plait.graph.rules.base import Builder, Call, Placements, Rule, Shard, Strategy, register


def _parts(call: Call, given: Placements, size: int) -> Sequence[Strategy]:
    """Sharded along any dim, in one block."""
    shape, cuts = call.arg(2), call.arg(7, "cuts", ())
    local = list(shape)
    for _, size, dim, _ in cuts:
        local[dim] //= size
    return [Strategy((), (Shard(dim),)) for dim, n in enumerate(local) if n > 1]


def emit_draw(b: Builder, call: Call, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """The same draw with one cut more."""
    (placement,) = strategy.outputs
    *head, cuts = args if len(args) == 8 else (*args, ())
    if isinstance(placement, Shard):
        cuts = (*cuts, (b.coordinate(), b.size, placement.dim, placement.blocks))
    return b.call(draw, *head, cuts)


register(draw, rule=Rule(strategies=_parts, emit=emit_draw))
