"""Recipes: which parameters to shard over an axis, found in the graph's structure and not in anybody's names.

From each weight the recipe follows its output dim through the forward graph. If the dim reaches another weight that
contracts it, and nothing on the way needs it whole, the two are a column-parallel and a row-parallel weight (Shoeybi
et al. 2019, "Megatron-LM"): an MLP, two convolutions, or attention, where what the path meets on its side (keys,
values, biases) turns out to be wanted in sharded form too. A path that ends in a softmax loss is a vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from plait.errors import PlanError
from plait.graph.calls import call_of, is_item, placeholders, rule_of, tensor_inputs
from plait.graph.propagate import fits
from plait.graph.rules import Call, Strategy, strategies_of
from plait.graph.views import RESHAPES
from plait.spec.layout import REPLICATE, Partial, Placement, Replicate, Shard, divides

aten = torch.ops.aten
_WEIGHTED = frozenset({aten.mm.default, aten.addmm.default, aten.convolution.default, aten.bmm.default})
_LOOKUP = frozenset({aten.embedding.default})
_SOFTMAX = frozenset({aten._log_softmax.default})
_LOSS = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
_BLOCKS = (1, 2, 3, 4)  # of fused weights: gate and up; query, key and value; the gates of an LSTM
_MAX_REGION = 2000


@dataclass
class Region:
    """What one path found: a placement for every value on it, the parameters among them, and how often it ended."""

    placements: dict[Node, Placement] = field(default_factory=dict)
    parameters: dict[Node, Placement] = field(default_factory=dict)
    spared: set[Node] = field(default_factory=set)
    ends: int = 0


class Recipe:
    def __init__(
        self,
        graph: Graph,
        size: int,
        taken: Mapping[str, Placement],
        axis: str,
        among: Collection[str] | None = None,
    ) -> None:
        self.size = size
        self.axis = axis
        self.stuck: tuple[Node, int] | None = None  # where a path ended only because the size does not divide a dim
        self.spared: set[Node] = set()  # weights that an accepted region reads whole by design (few key-value heads)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.graph = graph
        self.parameters = {n for n in placeholders(graph) if n.meta.get("kind") == "parameter"}
        self.taken = {n: taken[n.name] for n in self.parameters if n.name in taken}
        self.others = {n for n in self.parameters if among is not None and n.name not in among}  # to be left whole
        self.from_parameter: dict[Node, Node] = {n: n for n in self.parameters}
        self.from_batch: set[Node] = {n for n in placeholders(graph) if n.meta.get("kind") == "batch"}
        self.calls: dict[Node, Call] = {}
        for node in graph.nodes:
            inputs = tensor_inputs(node) if node.op == "call_function" else []
            if len(inputs) == 1 and inputs[0] in self.from_parameter and node.target not in _LOOKUP:
                self.from_parameter[node] = self.from_parameter[inputs[0]]
            if any(i in self.from_batch for i in inputs):
                self.from_batch.add(node)

    def run(self) -> dict[str, Placement]:
        """Placement of each parameter that is to be sharded, by placeholder name."""
        found: dict[Node, Placement] = {}
        for node in self.graph.nodes:
            if not self._forward(node):
                continue
            for parameter in self._weights(node):
                if parameter in self.taken or parameter in found or parameter in self.others:
                    continue
                region = self._best_region(parameter, node)
                decided = found.keys() | self.taken.keys() | self.others
                if region is not None and decided.isdisjoint(region.parameters):
                    found.update(region.parameters)
                    self.spared |= region.spared
        return {node.name: placement for node, placement in found.items()}

    def _forward(self, node: Node) -> bool:
        return node.op == "call_function" and node.meta.get("phase") == "forward"

    def _weights(self, node: Node) -> list[Node]:
        """Parameters of which the node is a weighted sum or a lookup."""
        if node.target in _LOOKUP:
            table, ids = tensor_inputs(node)[:2]
            return [self.from_parameter[table]] if table in self.from_parameter and ids in self.from_batch else []
        if node.target not in _WEIGHTED:
            return []
        return [self.from_parameter[i] for i in tensor_inputs(node) if i in self.from_parameter]

    def _best_region(self, parameter: Node, use: Node) -> Region | None:
        shape = tuple(parameter.meta["val"].shape)
        if len(shape) < 2:
            return None
        dims = [0] if use.target in _LOOKUP else range(len(shape))
        self.stuck = None
        for dim in dims:
            for blocks in _BLOCKS:
                seed = Shard(dim, blocks)
                if divides(shape, seed, self.size):
                    region = self._follow(parameter, seed, use)
                    if region is not None:
                        return region
        if self.stuck is not None and parameter not in self.spared:
            self._refuse(parameter, *self.stuck)
        return None

    def _refuse(self, parameter: Node, node: Node, works: int) -> None:
        size = self.size
        shape = list(node.meta["val"].shape)
        name = parameter.meta["name"]
        raise PlanError(
            f"{self.axis}={size} does not divide the dim that {name} is split into (such as heads): shape {shape} in"
            f" {node.meta.get('module') or 'the model'}; use {self.axis}={works}, or leave the weight whole with"
            f" layouts={{{name!r}: '-'}}"
        )

    def _follow(self, parameter: Node, seed: Shard, use: Node) -> Region | None:
        region = Region()
        region.placements[parameter] = region.parameters[parameter] = seed
        queue: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def push(node: Node) -> None:
            for user in node.users:
                if user.op == "call_function" and self._forward(user) and user not in queued:
                    queued.add(user)
                    heapq.heappush(queue, (self.order[user], user))

        push(parameter)
        while queue:
            _, node = heapq.heappop(queue)
            queued.discard(node)
            if node in region.placements:
                continue
            if len(region.placements) > _MAX_REGION:
                return None
            outcome = self._step(node, region)
            if outcome is None:
                return None
            if isinstance(outcome, Shard):
                region.placements[node] = outcome
                push(node)
            for source in list(self._wanted(node, region)):
                if not self._absorb(source, region, push):
                    return None
        own = [n for n in use.users if n in region.placements] or use in region.placements
        seeded = bool(own) or use.target in _LOOKUP
        return region if region.ends and seeded else None

    def _step(self, node: Node, region: Region) -> Placement | None:
        """Placement of the node's output, REPLICATE where the path ends in a sum, None where it cannot go on."""
        if is_item(node):
            source = node.args[0]
            strategy = self._strategy(source, region)  # type: ignore[arg-type]
            return None if strategy is None else strategy.outputs[node.args[1]]  # type: ignore[index]
        inputs = tensor_inputs(node)
        given = tuple(region.placements.get(i, REPLICATE) for i in inputs)
        if node.target in _SOFTMAX and isinstance(given[0], Shard) and given[0].dim == _softmax_dim(node):
            return given[0]  # worked out with two small sums over the axis
        if node.target in _LOSS and isinstance(given[0], Shard) and given[0].dim == 1:
            region.ends += 1
            return REPLICATE
        strategy = self._strategy(node, region)
        if strategy is None:
            self._note_stuck(node, region)
            return None
        if any(isinstance(p, Partial) for p in strategy.outputs):
            if self._ends_here(node, inputs, region):
                region.ends += 1
            elif not all(i in self.from_parameter for i in inputs if i in region.placements):
                return None  # else it is a penalty on the weight or its norm: a small sum
            return REPLICATE
        if len(strategy.outputs) == 1:
            return strategy.outputs[0]
        return REPLICATE if all(isinstance(p, Replicate) for p in strategy.outputs) else Shard(-1)

    def _note_stuck(self, node: Node, region: Region) -> None:
        """Remember if a smaller axis, one that divides this one, could go on here."""
        if node.target not in RESHAPES:
            return
        given = tuple(region.placements.get(i, REPLICATE) for i in tensor_inputs(node))
        rule = rule_of(node)
        for size in range(self.size - 1, 1, -1):
            if rule is not None and self.size % size == 0:
                options = strategies_of(rule, self.calls[node], given, size)
                if any(s.inputs == given and fits(s, self.calls[node], size) for s in options):
                    self.stuck = self.stuck or (node, size)
                    return

    def _ends_here(self, node: Node, inputs: list[Node], region: Region) -> bool:
        """A sum over the sharded dim is a good end if a weight contracts it, or if rows of a table are looked up."""
        if node.target in _LOOKUP:
            return True
        if node.target not in _WEIGHTED:
            return False
        activations = [i for i in inputs if i not in self.from_parameter and i in region.placements]
        return bool(activations) and any(i in self.from_parameter for i in inputs)

    def _strategy(self, node: Node, region: Region) -> Strategy | None:
        """The one that keeps every shard that the inputs have; what is whole may be cut."""
        inputs = tensor_inputs(node)
        given = tuple(region.placements.get(i, REPLICATE) for i in inputs)
        rule = rule_of(node)
        if rule is None:
            return None
        if node not in self.calls:
            self.calls[node] = call_of(node)
        call = self.calls[node]
        for strategy in strategies_of(rule, call, given, self.size):
            keeps = all(
                isinstance(have, Replicate) or have == want for have, want in zip(given, strategy.inputs, strict=True)
            )
            free = not any(isinstance(want, Partial) for want in strategy.inputs)
            if keeps and free and fits(strategy, call, self.size):
                return strategy
        return None

    def _wanted(self, node: Node, region: Region) -> list[tuple[Node, Placement]]:
        """Inputs that the node wants cut and that are whole."""
        if is_item(node) or node.target in _SOFTMAX or node.target in _LOSS:
            return []
        strategy = self._strategy(node, region)
        if strategy is None:
            return []
        return [
            (source, want)
            for source, want in zip(tensor_inputs(node), strategy.inputs, strict=True)
            if isinstance(want, Shard) and source not in region.placements
        ]

    def _absorb(self, wanted: tuple[Node, Placement], region: Region, push: object) -> bool:
        """Make what is wanted in sharded form so at its source: back to the parameters, if nobody wants it whole."""
        stack = [wanted]
        while stack:
            node, want = stack.pop()
            if node in region.placements:
                if region.placements[node] != want:
                    return False
                continue
            if node in self.parameters:
                if not isinstance(want, Shard) or not divides(tuple(node.meta["val"].shape), want, self.size):
                    return False
                region.placements[node] = region.parameters[node] = want
                push(node)  # type: ignore[operator]
                continue
            if node.op != "call_function" or is_item(node) or len(list(filter(self._forward, node.users))) > 1:
                self._spare(node, region)
                continue  # stays whole: a slice of it is free
            strategy = self._producing(node, want)
            if strategy is None:
                self._spare(node, region)
                continue
            region.placements[node] = want
            stack += [
                (source, need)
                for source, need in zip(tensor_inputs(node), strategy.inputs, strict=True)
                if isinstance(need, Shard)
            ]
        return True

    def _spare(self, node: Node, region: Region) -> None:
        """The weights just before a value that stays whole."""
        near = {node}
        for _ in range(12):
            inner = [n for n in near if n.op == "call_function" and n not in self.from_parameter]
            near = {source for n in inner for source in n.all_input_nodes}
            region.spared |= {self.from_parameter[n] for n in near if n in self.from_parameter}

    def _producing(self, node: Node, want: Placement) -> Strategy | None:
        rule = rule_of(node)
        if rule is None:
            return None
        call = call_of(node)
        given = (REPLICATE,) * len(call.inputs)
        for strategy in strategies_of(rule, call, given, self.size):
            if strategy.outputs == (want,) and fits(strategy, call, self.size):
                return strategy
        return None


def _softmax_dim(node: Node) -> int:
    dim, ndim = node.args[1], node.meta["val"].ndim
    assert isinstance(dim, int)
    return dim % ndim  # type: ignore[no-any-return]


def recipe(
    graph: Graph, size: int, taken: Mapping[str, Placement], axis: str, among: Collection[str] | None = None
) -> dict[str, Placement]:
    """Placements over one axis of `size` ranks for parameters that `taken` does not name, by placeholder name; of those
    in `among` only, if given.

    Raises PlanError if the axis divides nothing at all, or does not divide heads that it must split.
    """
    found = Recipe(graph, size, taken, axis, among).run()
    if not found and not any(not isinstance(p, Replicate) for p in taken.values()):
        raise PlanError(
            f"{axis}={size} splits no pair of weights of this model: no weight has an output dim that {size} divides"
            f" and that reaches a weight which sums it with nothing on the way that needs it whole. Choose a size that"
            f" divides its heads and widths, say by layouts={{...}} what to split, or leave {axis} out of the plan"
        )
    return found
