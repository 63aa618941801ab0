"""Regions: what must be sharded along with a weight, from where it is used to where its sharded dim is summed.

A region grows from one weight. Forward, each reader of a sharded value runs as its op's rule allows. If the reader
wants another input sharded too, that input is traced back to weights, with everything else that reads the values in
between. A value that cannot be computed in sharded form stays whole, and each rank takes its part of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from plait.compile.ir.calls import call_of, is_item, num_bytes, op_spec_of, output_values, placeholders, tensor_inputs
from plait.compile.ir.node_info import info_of, is_forward
from plait.compile.ir.views import view_of
from plait.compile.ops import Call, Strategy, View, strategies_of
from plait.compile.sharding.propagate import fits
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate, Shard, divides

_MAX_REGION = 2000
_MAX_BRANCH = 400  # values that are sharded because one reader wants one more sharded input
_SMALL = 8  # a sum or a gathered value is small if its source has at least this many times its bytes


@dataclass
class Region:
    """What has grown so far: a placement for every sharded value, parameters included, the calls after which a value is
    whole again, and how often the sharded dim was summed, by weights and in small sums."""

    placements: dict[Node, Placement] = field(default_factory=dict)
    parameters: dict[Node, Placement] = field(default_factory=dict)
    whole: dict[Node, None] = field(default_factory=dict)
    spared: set[Node] = field(default_factory=set)  # weights that are read whole although a part would do
    gathered: frozenset[Node] = frozenset()  # sharded values that are gathered for their readers
    ends: int = 0
    contractions: int = 0
    sums: int = 0

    def mark(self) -> tuple[int, ...]:
        return (
            len(self.placements), len(self.parameters), len(self.whole), self.ends, self.contractions, self.sums
        )  # fmt: skip

    def undo(self, mark: tuple[int, ...]) -> None:
        """Restore the state at the mark, except `spared`."""
        grown: tuple[dict[Any, Any], ...] = (self.placements, self.parameters, self.whole)
        for found, num in zip(grown, mark, strict=False):
            while len(found) > num:
                found.popitem()
        self.ends, self.contractions, self.sums = mark[3:]


class Grower:
    """Grows regions in one graph along one axis of `size` ranks.

    `decided` are placements of parameters that a region may rely on, and must not change.
    """

    def __init__(self, graph: Graph, size: int, decided: Mapping[Node, Placement]) -> None:
        self.size = size
        self.decided = decided
        self.stuck: tuple[Node, int] | None = None  # where a path ended only because the size does not divide a dim
        self.halted: Node | None = None  # the furthest reader that needed a sharded value whole
        self.failed: tuple[Node, Region] | None = None  # the last region that failed, and the reader at which it did
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.parameters = {n for n in placeholders(graph) if info_of(n).kind == "parameter"}
        self.from_parameter: dict[Node, Node] = {n: n for n in self.parameters}
        self.from_batch: set[Node] = {n for n in placeholders(graph) if info_of(n).kind == "batch"}
        self._calls: dict[Node, Call] = {}
        self._strategies: dict[tuple[Node, tuple[Placement, ...]], Strategy | None] = {}
        for node in graph.nodes:
            inputs = tensor_inputs(node) if node.op == "call_function" else []
            if len(inputs) == 1 and inputs[0] in self.from_parameter and op_spec_of(node).role != "lookup":
                self.from_parameter[node] = self.from_parameter[inputs[0]]
            if any(i in self.from_batch for i in inputs):
                self.from_batch.add(node)

    def follow(self, parameter: Node, seed: Shard, use: Node, gathered: frozenset[Node] = frozenset()) -> Region | None:
        """The region of a weight sharded by `seed`; None if a reader needs a sharded value whole that is not
        `gathered`."""
        region = Region(gathered=gathered)
        self.failed = None
        if not self._grow([(parameter, seed)], region, _MAX_REGION):
            return None
        own = [n for n in use.users if n in region.placements] or use in region.placements
        seeded = bool(own) or op_spec_of(use).role == "lookup"
        return region if (region.ends or use in gathered) and seeded else None

    def weighted(self, node: Node) -> bool:
        """Whether the node is a sum weighted by an operand: a matrix product, a convolution."""
        return op_spec_of(node).weighted

    def _grow(self, new: list[tuple[Node, Placement]], region: Region, limit: int) -> bool:
        """Shard these values, their sources and all that follows. Returns whether no reader needs one of them whole."""
        limit += len(region.placements)
        queue: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def put(node: Node, placement: Placement) -> None:
            region.placements[node] = placement
            for user in node.users:
                if leads_to_loss(user) and user not in queued:
                    queued.add(user)
                    heapq.heappush(queue, (self.order[user], user))

        for node, want in new:
            if not self._back(node, want, region, put):
                return False
        while queue:
            _, node = heapq.heappop(queue)
            queued.discard(node)
            if len(region.placements) > limit:
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
        """Whether it is a weight that is known to be sharded otherwise than a reader wants, so that it has no part."""
        parameter = self.from_parameter.get(source)
        return parameter is not None and isinstance(self.decided.get(parameter), Shard)

    def _absorb(self, source: Node, want: Placement, region: Region) -> bool:
        """Shard an input that a reader wants sharded. Returns whether that is possible."""
        mark, stuck = region.mark(), self.stuck
        if source in region.placements or self._grow([(source, want)], region, _MAX_BRANCH):
            return True
        region.undo(mark)
        self.stuck, self.failed = stuck, None
        region.spared |= self._behind(source)
        return False

    def _back(self, node: Node, want: Placement, region: Region, put: Callable[[Node, Placement], None]) -> bool:
        """Trace a value that is to be sharded back to the weights that it is computed from."""
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
                for source, need in zip(tensor_inputs(maker), strategy.inputs, strict=True)
                if isinstance(need, Shard)
            ]
            if not needs and tensor_inputs(maker):
                return False  # a part of what every rank has is no reason to shard anything
            stack += needs
        return True

    def _step(self, node: Node, region: Region, count: bool) -> Placement | None:
        """The placement of the node's output, REPLICATE if the path ends in a sum, None if it cannot continue. With
        `count` its end is counted."""
        if is_item(node):
            source = node.args[0]
            if (part := _normalised(source, region)) is not None:  # type: ignore[arg-type]
                return REPLICATE if node.args[1] else part
            strategy = self._strategy(source, region)  # type: ignore[arg-type]
            return None if strategy is None else strategy.outputs[node.args[1]]  # type: ignore[index]
        inputs = tensor_inputs(node)
        given = _given(node, region)
        if op_spec_of(node).role == "softmax" and isinstance(given[0], Shard) and given[0].dim == _softmax_dim(node):
            return given[0]  # computed with two small sums over the axis
        if op_spec_of(node).role == "class loss" and isinstance(given[0], Shard) and given[0].dim == 1:
            region.ends += count
            return REPLICATE
        if _normalised(node, region) is not None:
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
        """Whether the sharded dim may be summed here: by a weight, in a lookup, or if the sum is small.

        Norms are small sums. A region with any of them has one weight that sums, and whose output is not larger than
        its input: otherwise a whole model could be sharded along its width, with sums of activations everywhere.
        """
        cut = [i for i in inputs if i in region.placements and i not in region.gathered]
        if all(i in self.from_parameter for i in cut) and op_spec_of(node).role != "lookup":
            return True  # a penalty on the weight, or its norm
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
        """Note if a smaller axis, whose size divides this one's, could continue here."""
        if view_of(node) is not View.RESHAPE:
            return
        given = _given(node, region)
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
        """The strategy that keeps every shard of the inputs; whole inputs may be sharded."""
        given = _given(node, region)
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
            for source, want in zip(tensor_inputs(node), strategy.inputs, strict=True)
            if isinstance(want, Shard) and source not in region.placements
        ]

    def _producing(self, node: Node, index: int, want: Placement, region: Region) -> Strategy | None:
        """A strategy whose output `index` has this placement, and that sums nothing."""
        rule = op_spec_of(node)
        if not rule.known or not isinstance(want, Shard):
            return None
        call = self._call(node)
        whole = _given(node, region)
        ways = [whole]
        if want.blocks != 1:  # rules try the blocks of their inputs
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
        """The weights that a value is computed from, back to the last weighted sum."""
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


def _given(node: Node, region: Region) -> tuple[Placement, ...]:
    """Placements of the inputs as the node gets them."""
    cut = region.placements
    return tuple(REPLICATE if i in region.gathered else cut.get(i, REPLICATE) for i in tensor_inputs(node))


def leads_to_loss(node: Node) -> bool:
    """Whether it is a forward call on the way to the loss, and not one aside (lower.py)."""
    return node.op == "call_function" and is_forward(node) and not info_of(node).aside


def _normalised(node: Node, region: Region) -> Shard | None:
    """The shard of a norm's input, if the dim that the norm sums is sharded."""
    if op_spec_of(node).role != "norm":
        return None
    part, normalised = _given(node, region)[0], node.args[1]
    first = node.args[0].meta["val"].ndim - len(normalised)  # type: ignore[union-attr, arg-type]
    return part if isinstance(part, Shard) and part.dim >= first else None


def _softmax_dim(node: Node) -> int:
    dim, ndim = node.args[1], node.meta["val"].ndim
    assert isinstance(dim, int)
    return dim % ndim  # type: ignore[no-any-return]
