"""Propagation: choose a placement for every value of a graph along one mesh axis.

The placements of placeholders are given (annotated parameters, the batch). In the order of the graph, each op gets the
strategy of its rule that communicates the fewest bytes. Then, in reverse order, a value that all readers want in the
same sharded form is computed in that form if this needs no communication (a mask, a table of positions, a random draw).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    call_of,
    is_item,
    is_tensor,
    is_whole_view,
    op_spec_of,
    output_node,
    output_values,
    placeholders,
    tensor_inputs,
)  # fmt: skip
from plait.compile.ir.node_info import info_of
from plait.compile.ir.shapes import ProcessMemo, frozen, spec_of
from plait.compile.ops import Call, OpSpec, Strategy, TensorSpec, View, strategies_of
from plait.compile.sharding.decompose import decompose_node
from plait.compile.sharding.deferred_sums import DeferredSums
from plait.cost.collective_time import CollectiveKind, ring_bytes
from plait.errors import PlanError, Refusal
from plait.spec.layout import REPLICATE, Only, Partial, Placement, Replicate, Shard, divides

# A collective on a parameter costs this many times its bytes: it would undo a decision to shard the parameter.
PARAMETER_WEIGHT = 1000.0
aten = torch.ops.aten


class CallInput(NamedTuple):
    """What is known of an input of a call where a strategy for the call is chosen."""

    have: Placement
    available: frozenset[Placement]  # placements in which the value exists already
    has_whole: bool  # whether it is a view of a value that exists whole
    of_parameter: bool  # whether it is a parameter, or a view or cast of one
    is_shared: bool  # whether other calls read it too
    behind: float | None = None  # what is sent for it behind the call, if it is a sum that is better put off


_NOWHERE: frozenset[Placement] = frozenset()
_chosen = ProcessMemo(1 << 14)  # strategies, by the call and what is known of its inputs: layers repeat, and plans too


@dataclass
class Propagation:
    """The strategy of every op and the placement of every value, along one axis of `size` ranks."""

    graph: Graph
    size: int
    strategies: dict[Node, Strategy] = field(default_factory=dict)
    placements: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)  # one for each output
    required: tuple[Placement, ...] = ()  # placements of the graph's outputs
    origin: dict[Node, str] = field(default_factory=dict)  # the annotation or search that a placement comes from
    without_rule: set[str] = field(default_factory=set)
    broadcast_outputs: frozenset[int] = (
        frozenset()
    )  # outputs that all ranks take from rank 0 (statistics of batchnorm=local)

    def placement(self, node: Node) -> Placement:
        """The placement of the value of a node with a single output, or of the item that it takes from another node."""
        if is_item(node):
            source, index = node.args
            return self.placements[source][index]  # type: ignore[index]
        return self.placements[node][0]


class Propagator:
    """One propagation over a graph. With `local_statistics` (batchnorm=local) each rank has batch statistics of its
    own."""

    def __init__(
        self,
        graph: Graph,
        size: int,
        local_statistics: bool = False,
        axis: str = "",
        keeps_sequence: bool = False,
    ) -> None:
        self.axis = axis
        self.keeps_sequence = keeps_sequence
        self.fixed: Mapping[str, Placement] = {}
        self.found = Propagation(graph, size)
        self.size = size
        self.local_statistics = local_statistics
        self.calls: dict[Node, Call] = {}
        self.sums = DeferredSums(size, self.call, CollectiveKind.ALL_REDUCE.ways if not keeps_sequence else 1)
        self.available: dict[Node, set[Placement]] = {}  # placements in which a value exists already
        self.from_parameter: set[Node] = set()
        self.own: set[Node] = set()  # statistics of local rows, which differ between ranks

    def run(
        self, fixed: Mapping[str, Placement], origin: Mapping[str, str], required: tuple[Placement, ...]
    ) -> Propagation:
        found = self.found
        found.required = required
        for node in placeholders(found.graph):
            placement = fixed.get(node.name, REPLICATE)
            found.placements[node] = (placement,)
            if not isinstance(placement, Replicate):
                found.origin[node] = origin.get(node.name, node.name)
            if info_of(node).kind == "parameter":
                self.from_parameter.add(node)
        self.fixed = fixed
        node = next(iter(found.graph.nodes))
        while node.op != "output":
            node = self._visit(node)
        self._sink(required)
        (results,) = output_node(found.graph).args
        found.broadcast_outputs = frozenset(i for i, node in enumerate(results) if node in self.own)  # type: ignore[arg-type]
        if found.without_rule:
            names = ", ".join(sorted(found.without_rule))
            warnings.warn(f"plait has no rule for {names}: it runs on whole inputs on every rank", stacklevel=2)
        return found

    def _visit(self, node: Node) -> Node:
        """Choose the strategy of one node. Returns the next node to visit."""
        if self.own and node.op == "call_function":
            self._follow_own(node)
        if node.op != "call_function" or is_item(node):
            return node.next
        inputs = tensor_inputs(node)
        if node.name in self.fixed:
            want = self.fixed[node.name]
            self._set(node, inputs, Strategy((want,), (want,)))
            if isinstance(self.found.placement(inputs[0]), Replicate):
                self.available[node] = {REPLICATE}
            return node.next
        given = tuple(self._given(i) for i in inputs)
        row = op_spec_of(node)
        local = self.local_statistics and row.batch_statistics
        if local and is_statistical(self.call(node)):
            self._check_rows(node, given)
        if all(isinstance(p, Replicate) for p in given):  # the most common case
            self._set(node, inputs, whole_strategy(given, node))
            return node.next
        if local and (of_rows := self._local(node, given)) is not None:
            self._set(node, inputs, of_rows)
            return node.next
        call = self.call(node)
        if not row.known:
            self.found.without_rule.add(str(node.target))
        strategy, cost, sharded = self.best(node, row, call, inputs, given)
        if cost > 0 and sharded and row.decompose is not None:
            return decompose_node(node, row.decompose)
        self._set(node, inputs, strategy)
        return node.next

    def _given(self, node: Node) -> Placement:
        """The placement in which readers get a value: one that is marked as gathered along the axis is whole."""
        placement = self.found.placement(node)
        gathered = isinstance(placement, Shard) and self.axis in info_of(node).gathered
        return REPLICATE if gathered else placement

    def _local(self, node: Node, given: tuple[Placement, ...]) -> Strategy | None:
        """A strategy for batch norm over local rows: values with rows stay sharded, and gradients of weights are
        partial.

        None if no rows are sharded, and for instance norm, which views samples as channels.
        """
        call = self.call(node)
        shape = max((spec.shape for spec in call.inputs), key=len)
        rows = [p for p, spec in zip(given, call.inputs, strict=True) if spec.shape == shape and isinstance(p, Shard)]
        if not rows or rows[0].dim == 1:
            return None
        part = rows[0]
        inputs = tuple(part if spec.shape == shape else REPLICATE for spec in call.inputs)
        forward = is_statistical(call)
        rest: Placement = REPLICATE if forward else Partial()
        if forward:
            self.own |= {user for user in node.users if is_item(user) and user.args[1] != 0}
        return Strategy(inputs, tuple(part if o is not None and o.shape == shape else rest for o in call.outputs))

    def _check_rows(self, node: Node, given: tuple[Placement, ...]) -> None:
        """Raise PlanError if the input of a batch norm in training has no local rows, or too few for statistics."""
        x, where = self.call(node).inputs[0], info_of(node).module or "the loss"
        part = given[0]
        if isinstance(part, Shard) and part.dim == 1:
            return  # instance norm
        if not isinstance(part, Shard) or part.dim != 0 or part.blocks != 1:
            why = (
                f"the input of the batch norm {where}, of shape {list(x.shape)}, is not cut into contiguous rows along"
                f" its first dim (its placement is {part})"
            )
            raise PlanError(Refusal("batchnorm=local", why, "take batchnorm=global"))
        count = math.prod(x.shape) // (x.shape[1] * self.size)
        if count < 2:
            why = (
                f"a rank has {count} value per channel for the batch norm {where}, whose input of shape"
                f" {list(x.shape)} is cut over {self.size} ranks, but a variance needs 2"
            )
            instead = "use a larger batch, fewer ranks along the axes that cut the batch, a smaller micro="
            raise PlanError(Refusal("batchnorm=local", why, f"{instead}, or batchnorm=global"))

    def _follow_own(self, node: Node) -> None:
        """Raise PlanError if the node reads local batch statistics, so that its value would differ between ranks.

        Running statistics and the backward of the batch norm may read them.
        """
        row = op_spec_of(node)
        if (self.local_statistics and row.batch_statistics) or self.own.isdisjoint(node.all_input_nodes):
            return
        if row.copies is None and row.view is not View.ALIAS:
            why = (
                f"{node.target} in {info_of(node).module or 'the loss'} reads statistics of a batch norm, which differ"
                " between ranks"
            )
            raise PlanError(Refusal("batchnorm=local", why, "take batchnorm=global"))
        self.own.add(node)

    def call(self, node: Node) -> Call:
        if node not in self.calls:
            self.calls[node] = call_of(node)
        return self.calls[node]

    def best(
        self, node: Node, rule: OpSpec, call: Call, inputs: list[Node], given: tuple[Placement, ...]
    ) -> tuple[Strategy, float, bool]:
        """The cheapest strategy, the bytes that it moves, and whether it changes the placement of a sharded input."""
        sources = tuple([self._source(node, i, have) for i, have in zip(inputs, given, strict=True)])
        leaves = rule.copies is not None and only_leaves(node)
        options = (leaves, self.size, self.keeps_sequence)
        if not all(map(is_tensor, node.all_input_nodes)):  # the arguments hold a node, which must not be kept
            return _cheapest(rule, call, sources, *options)
        arguments = frozen(call.args, spec_of), frozen(call.kwargs, spec_of)
        key = (call.op, id(rule), *arguments, call.outputs, sources, options)
        if key not in _chosen:
            _chosen[key] = (_cheapest(rule, call, sources, *options), rule)  # the rule lives as long as its id is used
        found: tuple[Strategy, float, bool] = _chosen[key][0]
        return found

    def _source(self, reader: Node, node: Node, have: Placement) -> CallInput:
        is_shared = len(node.users) > 1
        if isinstance(have, Replicate):  # nothing has to be moved but to a rank's own part
            return CallInput(have, _NOWHERE, False, False, is_shared)
        known = frozenset(self.available.get(node, ()))
        behind = self.sums.sent_behind(reader, node) if isinstance(have, Partial) else None
        return CallInput(have, known, self._has_whole(node), node in self.from_parameter, is_shared, behind)

    def _has_whole(self, node: Node) -> bool:
        """Whether a value is a view, such as a transpose, of one that exists whole already."""
        while node.op == "call_function" and op_spec_of(node).view is not None and not is_item(node):
            node = tensor_inputs(node)[0]
            if REPLICATE in self.available.get(node, ()):
                return True
        return False

    def _set(self, node: Node, inputs: list[Node], strategy: Strategy) -> None:
        found = self.found
        found.strategies[node] = strategy
        found.placements[node] = strategy.outputs
        for source, want in zip(inputs, strategy.inputs, strict=True):
            self.available.setdefault(source, set()).add(want)
            if source in found.origin and node not in found.origin and not isinstance(want, Replicate):
                found.origin[node] = found.origin[source]
        numels = [value.numel() for value in output_values(node) if hasattr(value, "numel")]
        if len(inputs) == 1 and inputs[0] in self.from_parameter and inputs[0].meta["val"].numel() == sum(numels):
            self.from_parameter.add(node)  # a view or a cast of a parameter

    def _sink(self, required: tuple[Placement, ...]) -> None:
        """Compute values in the sharded form that all of their readers want."""
        found = self.found
        wanted: dict[Node, set[Placement]] = {}
        (results,) = output_node(found.graph).args
        for result, want in zip(results, required, strict=True):  # type: ignore[arg-type]
            if isinstance(result, Node):
                wanted.setdefault(result, set()).add(want)
        for node in reversed(found.graph.nodes):
            if node.op != "call_function" or is_item(node):
                continue
            inputs = tensor_inputs(node)
            strategy = found.strategies[node]
            wishes = wanted.get(node, set())
            better = self._free(node, inputs, wishes) if strategy.outputs == (REPLICATE,) else None
            if better is not None:
                found.strategies[node] = strategy = better
                found.placements[node] = better.outputs
                readers = [user for user in node.users if user in found.origin]
                if readers:
                    found.origin[node] = found.origin[readers[0]]
            for source, placement in zip(inputs, strategy.inputs, strict=True):
                wanted.setdefault(source, set()).add(placement)

    def _free(self, node: Node, inputs: list[Node], wanted: set[Placement]) -> Strategy | None:
        """A strategy that gives the one sharded form that all readers want, if its inputs need no communication."""
        want = next(iter(wanted), REPLICATE)
        rule = op_spec_of(node)
        if not rule.known or len(wanted) != 1 or not isinstance(want, Shard):
            return None
        call = self.call(node)
        given = tuple(self.found.placement(i) for i in inputs)
        for strategy in strategies_of(rule, call, given, self.size):
            if strategy.outputs == (want,) and fits(strategy, call, self.size):
                moves = zip(given, strategy.inputs, call.inputs, strict=True)
                if not any(_conversion_bytes(*each, self.size, self.keeps_sequence) for each in moves):
                    return strategy
        return None


def only_leaves(node: Node) -> bool:
    """Whether all readers of the node add it to other values that leave the step.

    The sum over ranks can then come last, where a term that was cast to a wider dtype is sent in the narrower one.
    """
    return all(
        user.op == "output"
        or ((is_whole_view(user) or user.target is aten.add.Tensor) and len(user.users) == 1 and only_leaves(user))
        for user in node.users
    )


def whole_strategy(given: tuple[Placement, ...], node: Node) -> Strategy:
    """The strategy with whole inputs and outputs."""
    return Strategy((REPLICATE,) * len(given), (REPLICATE,) * len(output_values(node)))


def only_strategies(call: Call, given: tuple[Placement, ...]) -> list[Strategy]:
    """A strategy that runs where the inputs are, if some are on one rank only and all of these on the same one."""
    places = {p for p in given if isinstance(p, Only)}
    if len(places) != 1:
        return []
    (place,) = places
    return [Strategy((place,) * len(given), (place,) * len(call.outputs))]


def is_statistical(call: Call) -> bool:
    """Whether a batch norm computes statistics of its input: a forward pass in training."""
    return sum(spec.shape == call.inputs[0].shape for spec in call.inputs) == 1


def fits(strategy: Strategy, call: Call, size: int) -> bool:
    """Whether every dim that the strategy shards is divisible by the number of ranks."""
    return all(
        not isinstance(p, Shard) or (spec is not None and divides(spec.shape, p, size))
        for spec, p in (
            *zip(call.inputs, strategy.inputs, strict=True),
            *zip(call.outputs, strategy.outputs, strict=True),
        )
    )


def propagate(
    graph: Graph,
    size: int,
    fixed: Mapping[str, Placement],
    required: tuple[Placement, ...],
    origin: Mapping[str, str] | None = None,
    local_statistics: bool = False,
    axis: str = "",
    keeps_sequence: bool = False,
) -> Propagation:
    """Choose placements along one axis of `size` ranks.

    Args:
        graph: the graph. It changes if an op is replaced by simpler ones that can be sharded.
        fixed: placements by node name, of placeholders, of which others are whole, and of calls of `constrain`.
        required: the placement of each output of the graph.
        origin: the annotations or searches that `fixed` comes from, by node name.
        local_statistics: whether each rank has batch statistics of its own (batchnorm=local).
        axis: the name of the axis.
        keeps_sequence: whether values are not exchanged for parts along another dim, to send less: the axis is for
            sequences that are too long for one rank.

    Raises:
        PlanError: local statistics cannot be had.
    """
    return Propagator(graph, size, local_statistics, axis, keeps_sequence).run(fixed, origin or {}, required)


def _cheapest(
    rule: OpSpec, call: Call, sources: tuple[CallInput, ...], leaves: bool, size: int, keeps_sequence: bool
) -> tuple[Strategy, float, bool]:
    """The cheapest strategy along an axis of `size` ranks, the bytes that it moves, and whether it changes the
    placement of a sharded input. `leaves` says that the results, of a cast, only leave the step."""
    given = tuple(source.have for source in sources)
    options = [s for s in strategies_of(rule, call, given, size) if fits(s, call, size)]
    options += only_strategies(call, given)
    bytes_out = sum(spec.num_bytes for spec in call.outputs if spec is not None)
    if leaves and call.inputs[0].num_bytes < bytes_out:
        bytes_out = call.inputs[0].num_bytes

    def moved(strategy: Strategy) -> float:
        total = 0.0
        any_shard = any(isinstance(p, Shard) for p in given)
        for source, want, spec in zip(sources, strategy.inputs, call.inputs, strict=True):
            have = source.have
            if have == want or want in source.available or (want == REPLICATE and source.has_whole):
                continue
            cost = _conversion_bytes(have, want, spec, size, keeps_sequence)
            if isinstance(have, Partial) and isinstance(want, Shard) and not any_shard:
                # No other input is sharded: a gather would follow, which costs what a reduce-scatter saves.
                cost *= 2.02
            if REPLICATE in source.available:
                cost = min(cost, _conversion_bytes(REPLICATE, want, spec, size, keeps_sequence))
            total += cost * (PARAMETER_WEIGHT if source.of_parameter else 1.0)
        return total

    def rank(strategy: Strategy) -> tuple[float, int]:
        cost = moved(strategy)
        terms = sum(isinstance(p, Partial) for p in strategy.inputs)
        if terms:
            # A sum that is deferred has to be paid later. It counts slightly more if the value has other readers, so
            # that the value is summed once for all of them.
            deferred = [one for one, p in zip(sources, strategy.inputs, strict=True) if isinstance(p, Partial)]
            behind = deferred[0].behind if terms == 1 else None
            put_off = CollectiveKind.ALL_REDUCE.ways * ring_bytes(bytes_out, size) if behind is None else behind
            again = behind is None and any(one.is_shared for one in deferred)
            cost += put_off * (1.01 if again and len(sources) > 1 and terms == 1 else 1.0)
        changes = sum(have != want for have, want in zip(given, strategy.inputs, strict=True))
        return cost, changes

    best = min(options, key=rank)
    sharded = any(isinstance(have, Shard) and have != want for have, want in zip(given, best.inputs, strict=True))
    return best, moved(best), sharded


def _conversion_bytes(have: Placement, want: Placement, spec: TensorSpec, size: int, keeps: bool = False) -> float:
    """The bytes that each of `size` ranks sends to change a placement, with ring algorithms; infinite if impossible.

    `spec` is that of the whole tensor. With `keeps` an exchange of one dim for another counts as a gather.
    """
    if have == want:
        return 0.0
    share = ring_bytes(spec.num_bytes, size)
    match have, want:
        case Replicate(), Shard() | Only():
            return 0.0
        case Only(), Partial(op="sum"):
            return 0.0
        case _, Partial():
            return math.inf
        case Partial(), Shard():
            return share
        case Partial(), _:
            return CollectiveKind.ALL_REDUCE.ways * share
        case Shard(dim=a), Shard(dim=b):
            return share / size if a != b and not keeps else share
        case Only(), _:
            return float(spec.num_bytes)
        case _:
            return share
