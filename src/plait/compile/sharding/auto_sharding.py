"""Auto sharding: which parameters to shard over an axis, found from the graph's structure and not from names.

The search follows the output dim of each weight through the forward graph. If the dim reaches another weight that
contracts it, and no op on the way needs it whole, the two are a column-parallel and a row-parallel weight (Shoeybi et
al. 2019, "Megatron-LM"). Examples are an MLP, two convolutions, and attention, where the other inputs on the way (keys,
values, biases) are sharded too. A weight whose path ends in a softmax loss is that of a vocabulary. No weight is kept
whole for auxiliary calls, on which neither the loss nor a gradient depends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import is_item, op_spec_of, output_node, placeholders, tensor_inputs, view_of
from plait.compile.ir.node_info import info_of, is_forward, set_info
from plait.compile.ops import View
from plait.compile.ops.view import view_groups
from plait.compile.sharding.narrow_gathers import by_width, condition, with_gathers
from plait.compile.sharding.region import Grower, Region, leads_to_loss
from plait.compile.sharding.sharded_fraction import NO_PARTNER
from plait.errors import PlanError, Refusal
from plait.spec.layout import REPLICATE, Blocks, Placement, Replicate, Shard, blocks_of_lengths, divides

aten = torch.ops.aten
_BLOCKS = (1, 2, 3, 4)  # numbers of fused weights: gate and up; query, key and value; the gates of an LSTM
_MAX_BLOCKS = 12
_MAX_READERS = 120  # readers to search for splits and slices
_MAX_POINTS = 3


class AutoSharding:
    """The search for parameters to shard along one axis; `auto_sharding` runs it."""

    def __init__(
        self,
        graph: Graph,
        size: int,
        taken: Mapping[str, Placement],
        axis: str,
        among: Collection[str] | None = None,
    ) -> None:
        self.graph = graph
        self.size = size
        self.axis = axis
        parameters = {n for n in placeholders(graph) if info_of(n).kind == "parameter"}
        self.decided: dict[Node, Placement] = {n: taken[n.name] for n in parameters if n.name in taken}
        self.decided |= {n: REPLICATE for n in parameters if among is not None and n.name not in among}
        self.spared: set[Node] = set()  # weights that an accepted region reads whole (a few key-value heads)
        self.grower = Grower(graph, size, self.decided)
        self.gathered: set[Node] = set()  # sharded values to gather for their readers
        self.reasons: dict[str, str] = {}  # why a weight stays whole, by placeholder name

    def run(self) -> dict[str, Placement]:
        """The placement of each parameter to shard, by placeholder name."""
        found: dict[Node, Placement] = {}
        for node in self.graph.nodes:
            if node.op != "call_function" or not is_forward(node):
                continue
            for parameter in self._weights(node):
                if parameter in self.decided:
                    continue
                region = self._best_region(parameter, node)
                if region is not None:
                    found.update(region.parameters)
                    self.decided.update(region.parameters)
                    self.spared |= region.spared
                    self.gathered |= region.gathered
                elif parameter.name not in self.reasons:
                    self.reasons[parameter.name] = self._reason(parameter, node)
        return {node.name: placement for node, placement in found.items()}

    def _weights(self, node: Node) -> list[Node]:
        """The parameters with which the node multiplies, or the table in which it looks up rows."""
        own, from_batch = self.grower.from_parameter, self.grower.from_batch
        if op_spec_of(node).role == "lookup":
            table, ids = tensor_inputs(node)[:2]
            return [own[table]] if table in own and ids in from_batch else []
        return [own[i] for i in tensor_inputs(node) if i in own] if self.grower.weighted(node) else []

    def _best_region(self, parameter: Node, use: Node) -> Region | None:
        shape = tuple(parameter.meta["val"].shape)
        if len(shape) < 2:
            return None
        region = _first_region(self.grower, parameter, use)
        stuck = self.grower.stuck
        if region is None and stuck is not None and parameter not in self.spared:
            node, works = stuck
            if _first_region(Grower(self.graph, works, self.decided), parameter, use) is not None:
                self._refuse(parameter, node, works)
        return region

    def _reason(self, parameter: Node, use: Node) -> str:
        halted, cut = self.grower.halted, f"{self.axis}={self.size}"
        shape = parameter.meta["val"].shape
        if parameter in self.spared and self.grower.stuck is not None:
            return f"{cut} does not divide its heads"
        if len(shape) < 2:
            return "it has one dim, and the values that it is combined with are whole"
        if all(n % self.size for n in shape):
            return f"{cut} divides no dim of its shape {list(shape)}"
        if op_spec_of(use).role == "lookup":
            return f"{cut} does not divide its {shape[0]} rows" if shape[0] % self.size else NO_PARTNER
        if halted is None:
            return NO_PARTNER
        module = info_of(halted).module or "the loss"
        if view_of(halted) is View.RESHAPE:
            return f"{cut} does not divide its output as {module} views it, {list(halted.meta['val'].shape)}"
        return f"{halted.target} in {module} needs its whole output"

    def _refuse(self, parameter: Node, node: Node, works: int) -> None:
        size = self.size
        shape = list(node.meta["val"].shape)
        name = info_of(parameter).name
        raise PlanError(
            Refusal(
                f"{self.axis}={size} does not divide the dim into which the output of {name} is viewed (such as heads)",
                f"shape {shape} in {info_of(node).module or 'the model'}",
                f"use {self.axis}={works}, or leave the weight whole with layouts={{{name!r}: '-'}}",
            )
        )


def _cut_points(use: Node, num: int) -> list[Blocks]:
    """The blocks into which the readers of a weight's output divide a dim of length `num`.

    A choice of blocks comes from the first splits and slices, one from these and the next ones, and so on. One more
    comes from the first view, whose inner dim may be the one to shard.
    """
    points = {0, num}
    found: list[Blocks] = []
    views: list[Blocks] = []
    queue, seen = deque([(use, 0, num)]), {use}
    while queue and len(seen) < _MAX_READERS:
        node, start, length = queue.popleft()
        for user in node.users:
            if not leads_to_loss(user) or user in seen:
                continue
            seen.add(user)
            if is_item(user):
                continue
            pieces = pieces_of(user, length)
            if view_of(user) is View.RESHAPE and (inner := _outer_of(user, length)) is not None and num % length == 0:
                views.append(num // length * inner)
            known = len(points)
            points.update(start + edge for piece in pieces for edge in piece[1:])
            if known < len(points) <= _MAX_BLOCKS + 1:
                found.append(blocks_of_lengths([last - first for first, last in itertools.pairwise(sorted(points))]))
            queue.extend((value, start + first, last - first) for value, first, last in pieces)
            value = user.meta.get("val")
            if not pieces and isinstance(value, torch.Tensor) and length in value.shape and length > 1:
                queue.append((user, start, length))
    return [*found[:_MAX_POINTS], *found[-1:], *views[:1]]


def _outer_of(view: Node, num: int) -> int | None:
    """The length of the outer dim into which a view divides a dim of length `num`, which is the number of blocks."""
    (source,) = tensor_inputs(view)
    shape: tuple[int, ...] = tuple(source.meta["val"].shape)
    target: tuple[int, ...] = tuple(view.meta["val"].shape)
    for dims, into in view_groups(shape, target):
        if len(dims) == 1 and shape[dims.start] == num and len(into) > 1:
            return target[into.start]
    return None


def pieces_of(node: Node, num: int) -> list[tuple[Node, int, int]]:
    """The pieces that a split or a slice makes of a dim of length `num`: the node of each, its start and its end."""
    source = next(iter(tensor_inputs(node)), None)
    if source is None or not isinstance(source.meta.get("val"), torch.Tensor):
        return []
    shape = source.meta["val"].shape
    if node.target is aten.slice.Tensor:
        given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
        dim, first, last, step = given
        if shape[dim] != num or step != 1:
            return []
        first, last, _ = slice(first, last, 1).indices(num)
        return [(node, first, last)] if last - first < num else []
    if node.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return []
    dim = node.args[2] if len(node.args) > 2 else 0
    assert isinstance(dim, int)
    if shape[dim] != num:
        return []
    widths = [value.shape[dim] for value in node.meta["val"]]
    ends = list(itertools.accumulate(widths))
    items: dict[Any, Node] = {user.args[1]: user for user in node.users if is_item(user)}
    return [(items[i], ends[i] - widths[i], ends[i]) for i in sorted(items)]


def _first_region(grower: Grower, parameter: Node, use: Node) -> Region | None:
    shape = tuple(parameter.meta["val"].shape)
    grower.stuck = grower.halted = None
    cut = []
    for dim in [0] if op_spec_of(use).role == "lookup" else range(len(shape)):
        points = _cut_points(use, shape[dim])
        for blocks in dict.fromkeys((1, *points, *_BLOCKS)):
            seed = Shard(dim, blocks)
            stuck = grower.stuck
            if divides(shape, seed, grower.size) and (region := grower.follow(parameter, seed, use)) is not None:
                return region
            if not isinstance(
                blocks, int
            ):  # fused weights with few key-value heads: these are read whole, as separate weights are
                grower.stuck = stuck
        cut += [seed for blocks in (*points, 1) if divides(shape, seed := Shard(dim, blocks), grower.size)]
    if op_spec_of(use).role == "lookup":
        return by_width(grower, parameter, use)
    stuck, halted = grower.stuck, grower.halted
    for seed in cut:
        region = condition(grower, parameter, seed, use) or with_gathers(grower, parameter, seed, use)
        if region is not None:
            return region
    grower.stuck, grower.halted = stuck, halted
    return None


def auto_sharding(
    graph: Graph, size: int, taken: Mapping[str, Placement], axis: str, among: Collection[str] | None = None
) -> tuple[dict[str, Placement], dict[str, str], set[Node]]:
    """Choose which parameters to shard over one axis of `size` ranks.

    Args:
        graph: the captured graph.
        taken: placements of parameters that are decided already, by placeholder name.
        axis: the name of the axis, for messages.
        among: the parameters to choose from, by placeholder name; None for all that are not taken.

    Returns:
        The placements of the parameters to shard, the reasons why other weights stay whole, both by placeholder name,
        and the sharded values to gather for their readers.

    Raises:
        PlanError: the axis divides no parameter, or not the heads that it must split.
    """
    made = AutoSharding(graph, size, taken, axis, among)
    found = made.run()
    if not found and not any(not isinstance(p, Replicate) for p in taken.values()):
        raise PlanError(
            Refusal(
                f"{axis}={size} splits no pair of weights of this model",
                f"no weight has an output dim that {size} divides and that another weight contracts, without an op"
                " between them that needs it whole",
                "choose a size that divides its heads and widths, name the weights to split with layouts={...}, or"
                f" leave {axis} out of the plan",
            )
        )
    return found, made.reasons, made.gathered


def mark_auxiliary(graph: Graph, captured: Captured) -> None:
    """Mark calls that only outputs beside the loss need, and updates of buffers from weights. Changes `graph`."""
    _mark_buffer_updates(graph, [i for i, o in enumerate(captured.outputs) if o.kind == "buffer"])
    results = output_node(graph).args[0]
    stack = [
        result
        for output, result in zip(captured.outputs, results, strict=True)  # type: ignore[arg-type]
        if output.kind not in ("aux", "aux_weight") and isinstance(result, Node)
    ]
    needed = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                stack.append(source)
    for node in graph.nodes:
        if node.op == "call_function" and node not in needed:
            set_info(node, auxiliary=True)


def _mark_buffer_updates(graph: Graph, outputs: list[int]) -> None:
    """Mark calls on buffers and parameters alone that compute a buffer's new value, such as a mean of weights."""
    from_batch: set[Node] = set()
    for node in graph.nodes:
        if info_of(node).kind == "batch" or any(source in from_batch for source in node.all_input_nodes):
            from_batch.add(node)
    (results,) = output_node(graph).args
    stack = [results[i] for i in outputs]  # type: ignore[index]
    marked: set[Node] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node.op == "call_function" and node not in from_batch | marked:
            set_info(node, auxiliary=True)
            marked.add(node)
            stack += node.all_input_nodes
