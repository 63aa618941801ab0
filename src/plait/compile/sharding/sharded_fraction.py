"""The fraction of a step that is split by an axis that splits weights, and the weights that stay whole."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph

from plait.compile.ir.estimate import flops_of
from plait.spec.layout import Layout, Replicate

_NAMED = 3  # how many of the weights that stay whole are named
_WORTH_NAMING = 0.002  # a fraction of all parameters
NO_PARTNER = "no other weight contracts its output"  # the reason why most weights stay whole


@dataclass(frozen=True)
class WholeParameter:
    """Weights of one kind that every rank has whole. If several layers have them, `name` has * for the layer's
    number."""

    name: str
    num: int
    share: float  # fraction of the elements of all parameters
    why: str


@dataclass(frozen=True)
class ShardedFraction:
    """The fractions of the model's parameters, and of the step's floating-point operations, that `axis` splits."""

    axis: str
    size: int
    parameters: float
    flops: float
    whole: tuple[WholeParameter, ...]  # the largest first

    def __str__(self) -> str:
        text = (
            f"{self.axis}={self.size} splits {_percent(self.parameters)} of the parameters and {_percent(self.flops)}"
            " of the floating-point operations"
        )
        named = [each for each in self.whole if each.share >= _WORTH_NAMING][:_NAMED]
        if not named:
            return text
        told = [
            f"{each.name} ({f'{each.num} weights, ' if each.num > 1 else ''}{_percent(each.share)}: {each.why})"
            for each in named
        ]
        return f"{text}; whole on every rank: {', '.join(told)}"


def step_flops(graph: Graph) -> int:
    """Floating-point operations of matrix products, convolutions and attention in one run of the graph."""
    return sum(flops_of(node) for node in graph.nodes if node.op == "call_function")


def sharded_fraction(
    layouts: Mapping[str, Layout], axis: str, size: int, before: int, after: int, reasons: Mapping[str, str]
) -> ShardedFraction:
    """The fraction of a step that an axis splits.

    Args:
        layouts: the layouts of all parameters, by name.
        axis: the name of the axis, of `size` ranks.
        before: floating-point operations of the step on all ranks of the axis together.
        after: floating-point operations of the step on one rank.
        reasons: why weights stay whole, by name.
    """
    total = sum(math.prod(layout.shape) for layout in layouts.values())
    whole: dict[str, list[str]] = defaultdict(list)
    for name, layout in layouts.items():
        if isinstance(layout.on(axis), Replicate):
            whole[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    kinds = []
    kept = 0
    for kind, names in whole.items():
        num = sum(math.prod(layouts[name].shape) for name in names)
        kept += num
        why = next((reasons[name] for name in names if name in reasons), NO_PARTNER)
        kinds.append(WholeParameter(kind if len(names) > 1 else names[0], len(names), num / max(total, 1), why))
    kinds.sort(key=lambda each: -each.share)
    flops = (1 - after / before) / (1 - 1 / size) if before else 0.0
    return ShardedFraction(axis, size, 1 - kept / max(total, 1), min(max(flops, 0.0), 1.0), tuple(kinds))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
