"""Regions: the values that are sharded together with a weight, from its use to where the sharded dim is summed.

A region grows from one weight. The search follows the readers of each sharded value, which run as the rules of their
ops allow. If a reader wants another input sharded too, the search traces that input back to weights, and follows all
readers of the values in between. An input that cannot be computed in sharded form stays whole, and each rank takes its
part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    call_of,
    is_item,
    num_bytes,
    op_spec_of,
    output_values,
    placeholders,
    tensor_inputs,
    view_of,
)
from plait.compile.ir.node_info import info_of, is_forward
from plait.compile.ops import Call, Strategy, View, strategies_of
from plait.compile.sharding.propagate import fits
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate, Shard, divides

_MAX_REGION = 2000
_MAX_BRANCH = 400  # values that may be sharded because a reader wants one more sharded input
_MAX_STEPS = 20_000  # readers to look at for one region, which may be looked at again after each attempt that fails
_MAX_TOTAL = 200_000  # the same for all regions, after which each gets few
_FEW_STEPS = 2_000
_SMALL = 8  # a sum is small if its input has at least this many times its bytes


@dataclass
class Region:
    """A region as far as it has grown.

    placements    of every sharded value, with those of parameters
    parameters    placements of the parameters that the region decides
    whole         calls after which a value is whole again
    spared        weights that are read whole although a part would do
    gathered      sharded values that are gathered for their readers
    ends          how often the sharded dim is summed by a weight, a lookup or a loss
    contractions  how often by a weight
    sums          how often in a small sum, such as that of a norm
    """

    placements: dict[Node, Placement] = field(default_factory=dict)
    parameters: dict[Node, Placement] = field(default_factory=dict)
    whole: dict[Node, None] = field(default_factory=dict)
    spared: set[Node] = field(default_factory=set)
    gathered: frozenset[Node] = frozenset()
    ends: int = 0
    contractions: int = 0
    sums: int = 0

    def mark(self) -> tuple[int, ...]:
        """The state of the region, for `undo`."""
        return (
            len(self.placements), len(self.parameters), len(self.whole), self.ends, self.contractions, self.sums
        )  # fmt: skip

    def undo(self, mark: tuple[int, ...]) -> None:
        """Restore the state at the mark, except for `spared`."""
        grown: tuple[dict[Any, Any], ...] = (self.placements, self.parameters, self.whole)
        for found, num in zip(grown, mark, strict=False):
            while len(found) > num:
                found.popitem()
        self.ends, self.contractions, self.sums = mark[3:]


class Grower:
    """Grows regions in one graph along one axis of `size` ranks.

    `decided` are placements of parameters that a region may rely on but not change.
    """

    def __init__(self, graph: Graph, size: int, decided: Mapping[Node, Placement]) -> None:
        self.size = size
        self.decided = decided
        self.stuck: tuple[Node, int] | None = (
            None  # where a path ended because the size does not divide a dim, and a size that does
        )
        self.halted: Node | None = None  # the furthest reader that needed a sharded value whole
        self.failed: tuple[Node, Region] | None = None  # the last region that failed, and the reader at which it did
        self._left = 0  # steps that the region that grows may still take
        self._total = _MAX_TOTAL
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.parameters = {n for n in placeholders(graph) if info_of(n).kind == "parameter"}
        self.from_parameter: dict[Node, Node] = {n: n for n in self.parameters}
        self.from_batch: set[Node] = {n for n in placeholders(graph) if info_of(n).kind == "batch"}
        self._calls: dict[Node, Call] = {}
        self._strategies: dict[tuple[Node, tuple[Placement, ...]], Strategy | None] = {}
        self._producers: dict[tuple[Node, int, Shard, tuple[Placement, ...]], Strategy | None] = {}
        self._inputs: dict[Node, list[Node]] = {}
        self._readers: dict[Node, list[Node]] = {}  # on the way to the loss
        self._weights: dict[Node, set[Node]] = {}  # behind a value
        for node in graph.nodes:
            inputs = self._inputs[node] = tensor_inputs(node) if node.op == "call_function" else []
            self._readers[node] = [user for user in node.users if leads_to_loss(user)]
            alone = len(inputs) == 1 and op_spec_of(node).role != "lookup"
            # Parameters of experts that are modules of their own: what is sharded of one is of all.
            alike = bool(inputs) and node.target is torch.ops.aten.stack.default
            if (alone or alike) and all(each in self.from_parameter for each in inputs):
                self.from_parameter[node] = self.from_parameter[inputs[0]]
            if any(i in self.from_batch for i in inputs):
                self.from_batch.add(node)

    def follow(self, parameter: Node, seed: Shard, use: Node, gathered: frozenset[Node] = frozenset()) -> Region | None:
        """The region of a weight that is sharded as `seed` says; None if an op needs a sharded value whole.

        Values that are `gathered` are whole for their readers. `use` is the call that reads the weight.
        """
        region = Region(gathered=gathered)
        self.failed = None
        self._left = given = _MAX_STEPS if self._total > 0 else _FEW_STEPS
        has_grown = self._grow([(parameter, seed)], region, _MAX_REGION)
        self._total -= given - self._left
        if not has_grown:
            return None
        own = [n for n in use.users if n in region.placements] or use in region.placements
        seeded = bool(own) or op_spec_of(use).role == "lookup"
        return region if (region.ends or use in gathered) and seeded else None

    def weighted(self, node: Node) -> bool:
        """Whether the node multiplies with a weight and sums, as a matrix product or a convolution does."""
        return op_spec_of(node).weighted

    def _grow(self, new: list[tuple[Node, Placement]], region: Region, limit: int) -> bool:
        """Shard these values with their sources and readers. Returns False if a reader needs one of them whole."""
        limit += len(region.placements)
        queue: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def put(node: Node, placement: Placement) -> None:
            region.placements[node] = placement
            for user in self._readers[node]:
                if user not in queued:
                    queued.add(user)
                    heapq.heappush(queue, (self.order[user], user))

        for node, want in new:
            if not self._back(node, want, region, put):
                return False
        while queue:
            _, node = heapq.heappop(queue)
            queued.discard(node)
            self._left -= 1
            if len(region.placements) > limit or self._left < 0:
                return False
            known = region.placements.get(node)
            if known is None and node in region.whole:
                known = REPLICATE
            outcome = self._step(node, region, count=known is None)
            if outcome is None or (known is not None and outcome != known):
                if self.halted is None or self.order[self.halted] < self.order[node]:
                    self.halted = node
                self.failed = node, region
                return False
            if known is not None:
                continue
            if isinstance(outcome, Shard):
                put(node, outcome)
            else:
                region.whole[node] = None
            for source, want in self._wanted(node, region):
                if not self._absorb(source, want, region) and self._cut_otherwise(source):
                    self.failed = node, region
                    return False
        return True

    def _cut_otherwise(self, source: Node) -> bool:
        """Whether the value is a weight that is decided to be sharded in another way than a reader wants."""
        parameter = self.from_parameter.get(source)
        return parameter is not None and isinstance(self.decided.get(parameter), Shard)

    def _absorb(self, source: Node, want: Placement, region: Region) -> bool:
        """Shard an input that a reader wants sharded. Returns False if that is not possible."""
        mark, stuck = region.mark(), self.stuck
        if source in region.placements or self._grow([(source, want)], region, _MAX_BRANCH):
            return True
        region.undo(mark)
        self.stuck, self.failed = stuck, None
        region.spared |= self._behind(source)
        return False

    def _back(self, node: Node, want: Placement, region: Region, put: Callable[[Node, Placement], None]) -> bool:
        """Shard a value, and trace it back to the weights that it is computed from. Returns False if that is not
        possible."""
        stack = [(node, want)]
        while stack:
            node, want = stack.pop()
            if node in region.placements:
                if region.placements[node] != want:
                    return False
                continue
            if node in self.parameters:
                shape = tuple(node.meta["val"].shape)
                if not isinstance(want, Shard) or not divides(shape, want, self.size):
                    return False
                if self.decided.get(node, want) != want:
                    return False
                if node not in self.decided:
                    region.parameters[node] = want
                put(node, want)
                continue
            if node.op != "call_function":
                return False
            item = is_item(node)
            maker = node.args[0] if item else node
            assert isinstance(maker, Node)
            strategy = self._producing(maker, node.args[1] if item else 0, want, region)  # type: ignore[arg-type]
            if strategy is None:
                return False
            if item and maker not in region.placements:
                put(maker, Shard(-1))
            put(node, want)
            needs = [
                (source, need)
                for source, need in zip(self._inputs[maker], strategy.inputs, strict=True)
                if isinstance(need, Shard)
            ]
            if not needs and self._inputs[maker]:
                return False  # each rank takes its part of a whole value: nothing else needs to be sharded
            stack += needs
        return True

    def _step(self, node: Node, region: Region, count: bool) -> Placement | None:
        """The placement of the node's output; REPLICATE if the path ends in a sum, None if it cannot continue.

        With `count`, the sum is counted in the region.
        """
        if is_item(node):
            source = node.args[0]
            if (part := self._normalised(source, region)) is not None:  # type: ignore[arg-type]
                return REPLICATE if node.args[1] else part
            strategy = self._strategy(source, region)  # type: ignore[arg-type]
            return None if strategy is None else strategy.outputs[node.args[1]]  # type: ignore[index]
        inputs = self._inputs[node]
        given = self._given(node, region)
        if op_spec_of(node).role == "softmax" and isinstance(given[0], Shard) and given[0].dim == _softmax_dim(node):
            return given[0]  # its rule needs two small sums over the axis
        if op_spec_of(node).role == "class loss" and isinstance(given[0], Shard) and given[0].dim == 1:
            region.ends += count
            return REPLICATE
        if self._normalised(node, region) is not None:
            region.sums += count
            return Shard(-1) if region.contractions <= 1 else None
        strategy = self._strategy(node, region)
        if strategy is None:
            self._note_stuck(node, region)
            return None
        if any(isinstance(p, Partial) for p in strategy.outputs):
            return REPLICATE if self._may_sum(node, inputs, region, count) else None
        if len(strategy.outputs) == 1:
            return strategy.outputs[0]
        return REPLICATE if all(isinstance(p, Replicate) for p in strategy.outputs) else Shard(-1)

    def _may_sum(self, node: Node, inputs: list[Node], region: Region, count: bool) -> bool:
        """Whether the sharded dim may be summed here: by a weight, in a lookup, or in a small sum.

        Norms are small sums. A region with small sums has a single weight that sums, with an output not much larger
        than its input. Otherwise a whole model could be sharded along its width, with sums of activations everywhere.
        """
        cut = [i for i in inputs if i in region.placements and i not in region.gathered]
        if all(i in self.from_parameter for i in cut) and op_spec_of(node).role != "lookup":
            return True  # such as the norm of a weight, or a penalty on it
        bytes_in = max(num_bytes(i.meta["val"]) for i in cut)
        bytes_out = sum(num_bytes(v) for v in output_values(node) if hasattr(v, "numel"))
        by_weight = self.weighted(node) and any(i in self.from_parameter for i in inputs)
        if by_weight or op_spec_of(node).role == "lookup":
            region.ends += count
            region.contractions += count * by_weight
            return not region.sums or (region.contractions <= 1 and bytes_out <= 2 * bytes_in)
        region.sums += count
        return bytes_out * _SMALL <= bytes_in and region.contractions <= 1

    def _note_stuck(self, node: Node, region: Region) -> None:
        """Set `stuck` if an axis with fewer ranks, a divisor of this number, could continue here."""
        if view_of(node) is not View.RESHAPE:
            return
        given = self._given(node, region)
        rule = op_spec_of(node)
        for size in range(self.size - 1, 1, -1):
            if rule.known and self.size % size == 0:
                options = strategies_of(rule, self._call(node), given, size)
                if any(s.inputs == given and fits(s, self._call(node), size) for s in options):
                    self.stuck = self.stuck or (node, size)
                    return

    def _call(self, node: Node) -> Call:
        if node not in self._calls:
            self._calls[node] = call_of(node)
        return self._calls[node]

    def _strategy(self, node: Node, region: Region) -> Strategy | None:
        """The strategy that keeps the placements of all sharded inputs. It may shard inputs that are whole."""
        given = self._given(node, region)
        key = (node, given)
        if key not in self._strategies:
            self._strategies[key] = self._keeping(node, given)
        return self._strategies[key]

    def _keeping(self, node: Node, given: tuple[Placement, ...]) -> Strategy | None:
        rule = op_spec_of(node)
        if not rule.known:
            return None
        call = self._call(node)
        for strategy in strategies_of(rule, call, given, self.size):
            keeps = all(
                isinstance(have, Replicate) or have == want for have, want in zip(given, strategy.inputs, strict=True)
            )
            free = not any(isinstance(want, Partial) for want in strategy.inputs)
            if keeps and free and fits(strategy, call, self.size):
                return strategy
        return None

    def _wanted(self, node: Node, region: Region) -> list[tuple[Node, Placement]]:
        """The whole inputs that the node wants sharded."""
        if is_item(node) or op_spec_of(node).role == "softmax" or op_spec_of(node).role == "class loss":
            return []
        strategy = self._strategy(node, region)
        if strategy is None:
            return []
        return [
            (source, want)
            for source, want in zip(self._inputs[node], strategy.inputs, strict=True)
            if isinstance(want, Shard) and source not in region.placements
        ]

    def _producing(self, node: Node, index: int, want: Placement, region: Region) -> Strategy | None:
        """A strategy without sums whose output `index` has the placement `want`."""
        if not isinstance(want, Shard):
            return None
        given = self._given(node, region)
        key = (node, index, want, given)
        if key not in self._producers:
            self._producers[key] = self._giving(node, index, want, given)
        return self._producers[key]

    def _giving(self, node: Node, index: int, want: Shard, whole: tuple[Placement, ...]) -> Strategy | None:
        rule = op_spec_of(node)
        if not rule.known:
            return None
        call = self._call(node)
        ways = [whole]
        if want.blocks != 1:  # rules take blocks from the placements of their inputs
            ways += [
                (Shard(d, want.blocks),) * len(whole) for d in range(max((s.ndim for s in call.inputs), default=0))
            ]
        for given in ways:
            for strategy in strategies_of(rule, call, given, self.size):
                summed = any(isinstance(p, Partial) for p in (*strategy.inputs, *strategy.outputs))
                if strategy.outputs[index] == want and not summed and fits(strategy, call, self.size):
                    return strategy
        return None

    def _behind(self, node: Node) -> set[Node]:
        """The weights that a value is computed from, traced back to the last product with a weight."""
        if node not in self._weights:
            self._weights[node] = self._weights_behind(node)
        return self._weights[node]

    def _weights_behind(self, node: Node) -> set[Node]:
        found: set[Node] = set()
        stack, seen = [node], {node}
        while stack and len(seen) < 100:
            for source in stack.pop().all_input_nodes:
                if source in self.from_parameter:
                    found.add(self.from_parameter[source])
                elif source not in seen and source.op == "call_function" and not self.weighted(source):
                    seen.add(source)
                    stack.append(source)
                elif source.op == "call_function" and self.weighted(source):
                    found |= {self.from_parameter[n] for n in source.all_input_nodes if n in self.from_parameter}
        return found

    def _given(self, node: Node, region: Region) -> tuple[Placement, ...]:
        """The placements in which the node gets its inputs."""
        cut, whole = region.placements, region.gathered
        return tuple([REPLICATE if i in whole else cut.get(i, REPLICATE) for i in self._inputs[node]])

    def _normalised(self, node: Node, region: Region) -> Shard | None:
        """The placement of a norm's input, if a dim that the norm sums over is sharded."""
        if op_spec_of(node).role != "norm":
            return None
        part, normalised = self._given(node, region)[0], node.args[1]
        first = node.args[0].meta["val"].ndim - len(normalised)  # type: ignore[union-attr, arg-type]
        return part if isinstance(part, Shard) and part.dim >= first else None


def leads_to_loss(node: Node) -> bool:
    """Whether the node is a forward call on the way to the loss, and not an auxiliary one."""
    return node.op == "call_function" and is_forward(node) and not info_of(node).auxiliary


def _softmax_dim(node: Node) -> int:
    dim, ndim = node.args[1], node.meta["val"].ndim
    assert isinstance(dim, int)
    return dim % ndim  # type: ignore[no-any-return]
