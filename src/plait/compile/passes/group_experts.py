"""Rows of a mixture of experts, sorted by expert, on the ranks that have their experts.

    expert_mm(x, weight, ids)  ->  x[order] -> grouped_mm -> back to the order of the tokens           one rank has all
    expert_mm(x, weight, ids, axis, parts)
                               ->  x to its experts' ranks -> grouped_mm -> back to the tokens' ranks   ranks have parts

Calls of a model's experts follow each other: a product, an activation function, a product. What lies between two of
them, and works on each row by itself, stays with the experts; rows are sent to them once and back once, in the forward
pass and in the backward pass (Lepikhin et al. 2020, "GShard"; Rajbhandari et al. 2022, "DeepSpeed-MoE").

With `fixed` shapes rows travel in equal parts, so that nothing has to wait for how many there are. Without a `capacity`
a part has room for all rows of a rank, and none is lost. With one it has room for `capacity` times the rows that it
would have if all experts got the same number, and a row beyond that has zero as the result of its expert.

Else the rows that there are travel, and the host waits for their number once for each mixture. Values between are then
as long as there are rows; the graph has them as they are if all ranks get the same number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from plait.compile.ir.calls import call_of, is_item, num_bytes, op_spec_of, output_node, tensor_inputs
from plait.compile.ir.node_info import info_of
from plait.compile.ops import Shard, comm_ops, experts
from plait.compile.ops.experts import EXPERT_ADDMM, EXPERT_MM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS
from plait.compile.sharding.partition import LocalBuilder, memo_of
from plait.spec.layout import REPLICATE

_aten = torch.ops.aten
_PRODUCTS = (EXPERT_MM, EXPERT_ADDMM, EXPERT_OUTER, EXPERT_ROWS, EXPERT_SUMS)
_GIVES_ROWS = (EXPERT_MM, EXPERT_ADDMM, EXPERT_ROWS)
# Positions of the weights of experts, or of their number, and of the arguments that have rows.
_EXPERTS: dict[Target, int] = {EXPERT_MM: 1, EXPERT_ADDMM: 2, EXPERT_ROWS: 0, EXPERT_OUTER: 3, EXPERT_SUMS: 2}
_ROWS: dict[Target, tuple[int, ...]] = {
    EXPERT_MM: (0,), EXPERT_ADDMM: (1,), EXPERT_ROWS: (), EXPERT_OUTER: (0, 1), EXPERT_SUMS: (0,),
}  # fmt: skip


@dataclass(frozen=True)
class ExpertRoute:
    """Where rows go: by the values of `ids`, to experts that are on this rank, or along an axis.

    Attributes:
        ids: the node of the expert of each row.
        num_experts: of one rank.
        axis: the axis whose ranks have parts of the experts; empty if this rank has all.
        parts: the number of these ranks.
    """

    ids: Node
    num_experts: int
    axis: str
    parts: int


def group_experts(graph: Graph, capacity: float = 0.0, fixed: bool = True) -> Graph:
    """Write out the calls of experts of a local graph. Returns another graph, or the same if there are none."""
    if not any(node.target in _PRODUCTS for node in graph.nodes):
        return graph
    found = _Grouper(graph, capacity, fixed).run()
    found.eliminate_dead_code()
    found.lint()
    return found


def route_of(node: Node) -> ExpertRoute:
    """The route of a call of experts."""
    op = node.target
    axis, parts = experts.axis_of(node.args, op)
    if parts == 0:  # no axis has cut what it has
        axis, parts = "", 1
    ids = node.args[experts.IDS[op]]
    assert isinstance(ids, Node)
    num = node.args[_EXPERTS[op]]
    if isinstance(num, Node):  # the weights of the experts
        num = num.meta["val"].shape[0]
    return ExpertRoute(ids, num, axis, parts)  # type: ignore[arg-type]


def _row_inputs(node: Node) -> list[Node]:
    """The inputs of a call of experts that have rows."""
    return [node.args[i] for i in _ROWS[node.target]]  # type: ignore[misc]


class _Grouper:
    def __init__(self, graph: Graph, capacity: float, fixed: bool) -> None:
        self.graph = graph
        self.capacity = capacity
        self.fixed = fixed
        self.b = LocalBuilder("", 1, memo_of(graph))
        self.natural: dict[Node, Any] = {}  # old node -> new node, rows in the order of the tokens
        self.grouped: dict[Node, Node] = {}  # old node -> new node, rows with their experts
        self.routes: dict[ExpertRoute, _Route] = {}
        self.sent: dict[tuple[Node, ExpertRoute], Node] = {}
        self.follows = self._find_followers()

    def _find_followers(self) -> dict[Node, ExpertRoute]:
        """The calls between calls of experts that work on each row by itself, and their routes."""
        routes: dict[Node, ExpertRoute] = {}
        for node in self.graph.nodes:
            if node.target in _GIVES_ROWS:
                routes[node] = route_of(node)
            elif node.op == "call_function" and node.target not in _PRODUCTS and (route := _follows(node, routes)):
                routes[node] = route
        wanted: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if node.target in _PRODUCTS:
                route = route_of(node)
                wanted |= {each for each in _row_inputs(node) if routes.get(each) == route}
            elif node in wanted and node.target not in _GIVES_ROWS:
                wanted |= {each for each in node.all_input_nodes if each in routes}
        found = {node: route for node, route in routes.items() if node in wanted or node.target in _GIVES_ROWS}
        for node, route in routes.items():
            if node not in found and (_is_added(node, found) or _sends_less(node, found)):
                found[node] = route
        return found

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.b.info = info_of(node)
            if node.op == "output":
                (results,) = node.args
                self.b.graph.output(map_arg(results, self._natural))
                output_node(self.b.graph).meta = dict(node.meta)
            elif node.target in _PRODUCTS:
                self._product(node)
            elif node in self.follows:
                self._follow(node)
            else:
                copy = self.b.graph.node_copy(node, self._natural)
                copy.meta = dict(node.meta)
                self.natural[node] = copy
        return self.b.graph

    def _natural(self, node: Node) -> Node:
        """The value with rows in the order of the tokens, on the ranks of the tokens."""
        if node not in self.natural:
            if is_item(node) or not isinstance(node.meta["val"], (tuple, list)):
                self.natural[node] = self._route(self.follows[node]).back(self.grouped[node])
            else:
                raise AssertionError(f"{node} is read as a whole")
        return self.natural[node]  # type: ignore[no-any-return]

    def _with_experts(self, node: Node, route: ExpertRoute) -> Node:
        """The value with each row where its expert is."""
        if self.follows.get(node) == route:
            return self.grouped[node]
        key = (node, route)
        if key not in self.sent:
            source, times = _repeated(node)
            self.sent[key] = self._route(route).there(self._natural(source), times)
        return self.sent[key]

    def _route(self, route: ExpertRoute) -> _Route:
        if route not in self.routes:
            ids, num_rows = self._natural(route.ids), route.ids.meta["val"].shape[0]
            if not route.axis:
                self.routes[route] = _Route(self.b, ids, route)
            elif self.fixed:
                self.routes[route] = _FixedRoute(
                    self.b, ids, route, experts.pair_rows(num_rows, route.parts, self.capacity)
                )
            else:
                self.routes[route] = _CountedRoute(self.b, ids, route, num_rows)
        return self.routes[route]

    def _product(self, node: Node) -> None:
        route = route_of(node)
        where = self._route(route)
        rows = [self._with_experts(each, route) for each in _row_inputs(node)]
        if node.target is EXPERT_MM:
            weight = self._natural(node.args[1])  # type: ignore[arg-type]
            self.grouped[node] = self.b.call(experts.GROUPED_MM, *rows, weight, where.ends)
        elif node.target is EXPERT_ADDMM:
            bias, weight = (self._natural(node.args[i]) for i in (0, 2))  # type: ignore[arg-type]
            self.grouped[node] = self.b.call(experts.GROUPED_ADDMM, bias, *rows, weight, where.ends)
        elif node.target is EXPERT_ROWS:
            table = self._natural(node.args[0])  # type: ignore[arg-type]
            self.grouped[node] = self.b.call(experts.grouped_rows, table, where.ends, where.order)
        elif node.target is EXPERT_OUTER:
            self.natural[node] = self.b.call(experts.GROUPED_OUTER, *rows, where.ends)
        else:
            self.natural[node] = self.b.call(experts.grouped_sums, *rows, where.ends)

    def _follow(self, node: Node) -> None:
        def local(each: Node) -> Node:
            return self.grouped[each] if each in self.follows else self._natural(each)

        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), local)
        if is_item(node):
            maker, index = args
            self.grouped[node] = self.b.node(operator.getitem, (maker, index), {}, maker.meta["val"][index])
            return
        if op_spec_of(node).communicates is not None:
            self.grouped[node] = self.b.collective(node.target, args[0], self.b.shape(args[0]), *args[2:], axis=args[1])
            return
        position = op_spec_of(node).sizes
        if position is not None:
            rows = next(self.grouped[i] for i in node.all_input_nodes if i in self.follows)
            num_rows = rows.meta["val"].shape[0] if self.fixed else self.b.call(experts.num_rows_of, rows)
            args = (*args[:position], [num_rows, *args[position][1:]], *args[position + 1 :])
        self.grouped[node] = self.b.call(node.target, *args, **kwargs)


class _Route:
    """The calls of one route: where each row goes, and from where it comes back. Here all experts are on this rank."""

    def __init__(self, b: LocalBuilder, ids: Node, route: ExpertRoute) -> None:
        self.b = b
        self.axis = route.axis
        self.order, self.places, self.ends = self._sorted(ids, route)

    def there(self, x: Node, times: int) -> Node:
        """Rows in the order of the tokens, each row of `x` standing for several -> rows with their experts."""
        return self.b.call(experts.take_rows, x, self.order, times)

    def back(self, y: Node) -> Node:
        """Rows with their experts -> rows in the order of the tokens."""
        return self.b.call(experts.take_rows, y, self.places)

    def _sorted(self, ids: Node, route: ExpertRoute) -> list[Node]:
        """What `expert_order` returns, of the rows on this rank."""
        return self._several(experts.expert_order, ids, route.num_experts)

    def _several(self, function: Callable[..., Any], *args: Any) -> list[Node]:
        made = self.b.call(function, *args)
        return [self.b.node(operator.getitem, (made, i), {}, value) for i, value in enumerate(made.meta["val"])]

    def _exchange(self, x: Node) -> Node:
        return self.b.collective(comm_ops.exchange, x, self.b.shape(x), axis=self.axis)


class _FixedRoute(_Route):
    """Rows travel in equal parts, with room for `room` rows."""

    def __init__(self, b: LocalBuilder, ids: Node, route: ExpertRoute, room: int) -> None:
        self.room = room
        super().__init__(b, ids, route)

    def _sorted(self, ids: Node, route: ExpertRoute) -> list[Node]:
        self.slots, self.rows, local = self._several(
            experts.expert_slots, ids, route.num_experts, route.parts, self.room
        )
        return super()._sorted(self._exchange(local), route)

    def there(self, x: Node, times: int) -> Node:
        return super().there(self._exchange(self.b.call(experts.take_rows, x, self.rows, times)), 1)

    def back(self, y: Node) -> Node:
        return self.b.call(experts.return_rows, self._exchange(super().back(y)), self.slots)


class _CountedRoute(_Route):
    """The rows that there are travel; the graph has `num_rows` of them on each rank."""

    def __init__(self, b: LocalBuilder, ids: Node, route: ExpertRoute, num_rows: int) -> None:
        self.num_rows = num_rows
        super().__init__(b, ids, route)

    def _sorted(self, ids: Node, route: ExpertRoute) -> list[Node]:
        self.rows, self.slots, ends = self._several(experts.expert_order, ids, route.num_experts * route.parts)
        sent = self.b.call(experts.expert_counts, ends)
        received = self._exchange(sent)
        self.counts = self.b.call(experts.RANK_COUNTS, sent, received, route.parts)
        return self._several(experts.ARRIVED_ORDER, received, self.counts, self.num_rows)

    def there(self, x: Node, times: int) -> Node:
        return super().there(self._travel(self.b.call(experts.take_rows, x, self.rows, times), back=False), 1)

    def back(self, y: Node) -> Node:
        return self.b.call(experts.return_rows, self._travel(super().back(y), back=True), self.slots)

    def _travel(self, x: Node, back: bool) -> Node:
        return self.b.collective(comm_ops.exchange_rows, x, self.b.shape(x), self.counts, back, axis=self.axis)


def _follows(node: Node, routes: dict[Node, ExpertRoute]) -> ExpertRoute | None:
    """The route of a call each of whose rows is computed from the same row of values of that route; else None."""
    found = {routes[each] for each in node.all_input_nodes if each in routes}
    if len(found) != 1:
        return None
    if is_item(node):
        return next(iter(found))
    row = op_spec_of(node)
    if node.target is comm_ops.all_reduce and node.args[1] != next(iter(found)).axis:
        return next(iter(found))  # of ranks with the same rows, which split the columns of experts
    if not row.known or row.emit is not None or row.communicates or row.random is not None:
        return None
    call = call_of(node)
    given = tuple(Shard(0) if each in routes else REPLICATE for each in tensor_inputs(node))
    for factor in row.factors(call):
        has = tuple(Shard(0) if dim == 0 else REPLICATE for dim in factor.inputs)
        if has == given and all(dim == 0 for dim in factor.outputs) and all(d in (0, None) for d in factor.inputs):
            return next(iter(found))
    return None


def _sends_less(node: Node, stay: Collection[Node]) -> bool:
    """Whether it is less to send the result of a call back than those of its inputs that `stay` with the experts, as
    the sum of a product and a bias is."""
    if isinstance(node.meta["val"], (tuple, list)) or is_item(node):
        return False
    inputs = [each for each in node.all_input_nodes if each in stay]
    alone = [each for each in inputs if all(user is node or user in stay for user in each.users)]
    return len(inputs) > 0 and num_bytes(node.meta["val"]) < sum(num_bytes(each.meta["val"]) for each in alone)


def _is_added(node: Node, stay: Collection[Node]) -> bool:
    """Whether a sum over ranks that split columns is of what stays, and is added to what stays, such as a bias, so that
    only the result is sent back."""
    if node.target is not comm_ops.all_reduce or node.args[0] not in stay:
        return False
    return any(_sends_less(user, {*stay, node}) for user in node.users)


def _repeated(node: Node) -> tuple[Node, int]:
    """A value of which each row stands for several rows of this one, and how many: those of a token for each of its
    experts. The value itself, and 1, if it is not made so."""
    source: Any = node
    while source.op == "call_function" and source.target is not _aten.expand.default:
        if op_spec_of(source).view is None and op_spec_of(source).copies != 0:
            return node, 1
        source = source.args[0]
    once: Any = source.args[0] if source.op == "call_function" else None
    if once is None or once.target is not _aten.unsqueeze.default or once.args[1] not in (1, -2):
        return node, 1
    base, value = once.args[0], node.meta["val"]
    (num, *width), times = base.meta["val"].shape, source.meta["val"].shape[1]
    same = tuple(value.shape) == (num * times, *width) and base.meta["val"].dtype == value.dtype
    return (base, times) if same and source.meta["val"].shape[2:] == base.meta["val"].shape[1:] else (node, 1)
