"""Finds the regions of a graph that can be compiled: runs of tensor calls that nothing has to come between.

    a b c | start | d e | wait | f g        a, b, c are one region; d, e another; f, g a third

A region ends where ranks exchange, where values travel between device and host, where backward begins, and where
another layer of the model does, so that equal layers give equal regions. Other calls that a compiler cannot see into,
such as random draws and copies into buckets, do not end it: they run before the region if they need nothing of it, else
after.

A view belongs to no region. Each region makes its own views of what it reads, as do calls outside. So what goes in and
out of a region has memory of its own, and no two results share any.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from plait.compile.ir.calls import (
    is_item,
    is_tensor,
    is_view,
    op_spec_of,
    output_node,
    output_values,
    view_of,
    writes_in_place,
)
from plait.compile.ir.node_info import info_of
from plait.compile.ops import View
from plait.plan.key_values import Recompute
from plait.plan.legality import layer_of

_LAYERS = Recompute("layer")
_NAMESPACES = ("aten", "prims")  # ops of other libraries are opaque to a compiler
_LEAST = 2  # calls, for which a region is worth a call of its own


@dataclass(frozen=True)
class FusedRegion:
    """Calls that are compiled as one function.

    calls    the calls, without views, in order
    inputs   the tensors from outside that they read, directly or through views, in the order of their first use
    outputs  the calls that are read outside, directly or through views
    """

    calls: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...] = ()


Step = Node | FusedRegion  # a call as it is, or a region in place of its calls


def regions_of(graph: Graph, views: Collection[Node], apart: Collection[str] = ()) -> list[Step]:
    """The calls of a graph in an order that computes the same, with each region in place of its calls.

    `views` are the graph's `free_views`. Calls of modules that match a name pattern in `apart` are in no region.
    """
    found = _Finder(views, apart)
    for node in graph.nodes:
        if node.op == "call_function" and not is_item(node):
            found.add(node)
            for item in filter(is_item, node.users):  # what one call returns stays together
                found.add(item)
    found.close()
    return _with_outputs(found.steps, views, output_node(graph))


def free_views(graph: Graph) -> frozenset[Node]:
    """The calls that cost nothing wherever they run: views of one tensor, by constants, that do not have to copy."""
    return frozenset(node for node in graph.nodes if node.op == "call_function" and _is_free_view(node))


def base_of(node: Node, views: Collection[Node]) -> Node:
    """The tensor that a view is made of; the node itself if it is no view."""
    while node in views:
        (node,) = node.all_input_nodes
    return node


@cache
def functional(op: OpOverload) -> OpOverload | None:
    """The op that computes what an in-place op writes; None if there is none."""
    name = op._schema.name.partition("::")[2].removesuffix("_")
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    return getattr(packet, op._overloadname, None)


class _Finder:
    def __init__(self, views: Collection[Node], apart: Collection[str]) -> None:
        self._views = views
        self._apart = apart
        self.steps: list[Step] = []
        self._open: dict[Node, None] = {}  # the calls of the region that is growing
        self._after: dict[Node, None] = {}  # what has to run behind it
        self._opaque: set[Node] = set()  # of those, what the region cannot compute itself
        self._kind: Any = None

    def add(self, node: Node) -> None:
        sources = node.all_input_nodes
        if needs_all_before(node):
            self.close()
            self.steps.append(node)
        elif is_item(node) and sources[0] in self._open:
            self._open[node] = None
        elif node not in self._views and not is_item(node) and self._compiles(node):
            info = info_of(node)
            kind = (info.phase, layer_of(info.module, _LAYERS), tuple(sorted(info.owner.items())))
            if kind != self._kind or not self._opaque.isdisjoint(sources):
                self.close()
                self._kind = kind
            self._open[node] = None
        elif any(source in self._open or source in self._after for source in sources):
            self._after[node] = None
            if node not in self._views or not self._opaque.isdisjoint(sources):
                self._opaque.add(node)
        else:
            self.steps.append(node)

    def close(self) -> None:
        """End the region that is growing, and then run what needs something of it."""
        calls = tuple(self._open)
        if sum(not is_item(node) for node in calls) >= _LEAST:
            bases = (base_of(s, self._views) for node in calls if not is_item(node) for s in node.all_input_nodes)
            self.steps.append(
                FusedRegion(calls, tuple(dict.fromkeys(base for base in bases if base not in self._open)))
            )
        else:
            self.steps += calls
        self.steps += self._after
        self._open, self._after, self._opaque = {}, {}, set()

    def _compiles(self, node: Node) -> bool:
        """Whether a compiler can see into a call: it takes tensors and constants and returns tensors, and writes to
        nothing that the graph was given."""
        of_torch = isinstance(node.target, OpOverload) and node.target.namespace in _NAMESPACES
        if not of_torch and view_of(node) is None:
            return False
        if _is_within(info_of(node).module, self._apart):
            return False
        if writes_in_place(node) and not self._writes_dead_memory(node):
            return False
        values = [*output_values(node), *(value for source in node.all_input_nodes for value in output_values(source))]
        return all(map(is_tensor, node.all_input_nodes)) and all(
            isinstance(value, torch.Tensor) or value is None for value in values
        )

    def _writes_dead_memory(self, node: Node) -> bool:
        """Whether an in-place call writes to what a call of the graph made, so that it may as well write elsewhere."""
        written = node.args[0]
        assert isinstance(node.target, OpOverload)
        assert isinstance(written, Node)
        while is_view(written):
            written = written.all_input_nodes[0]
        return written.op != "placeholder" and functional(node.target) is not None


def _is_within(module: str, patterns: Collection[str]) -> bool:
    """Whether a module, or one that it is in, has a name that matches a pattern."""
    parts = module.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(path, pattern) for path in paths for pattern in patterns)


def needs_all_before(node: Node) -> bool:
    """Whether a call must stay in its place, because it starts or awaits a collective or a copy to other memory."""
    row = op_spec_of(node)
    return row.communicates is not None or row.transfers


def _is_free_view(node: Node) -> bool:
    if not is_view(node) or is_item(node) or len(node.all_input_nodes) != 1:
        return False
    (source,) = node.all_input_nodes
    if not (is_tensor(node) and is_tensor(source)):
        return False
    if view_of(node) not in (View.RESHAPE, View.PART):
        return True
    like = source.meta["val"]
    memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: memory)
    assert callable(node.target)
    result = node.target(*args, **kwargs)
    return bool(result.untyped_storage()._cdata == memory.untyped_storage()._cdata)


def _with_outputs(steps: Sequence[Step], views: Collection[Node], end: Node) -> list[Step]:
    """The steps with the outputs of regions, and without views that only regions read."""
    read = {*end.all_input_nodes}  # by later steps
    found: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, FusedRegion):
            outputs = tuple(node for node in step.calls if node in read)
            found.append(FusedRegion(step.calls, step.inputs, outputs))
            read.update(step.inputs)
        elif step not in views or step in read:
            found.append(step)
            read.update(step.all_input_nodes)
    return found[::-1]
