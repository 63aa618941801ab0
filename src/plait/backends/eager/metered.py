"""Graphs that tell a memory meter what runs: the phase, the module, and the class of the memory that calls allocate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.backends.eager.collectives import world_of
from plait.compile.ir.calls import copy_graph, is_item, is_view, op_spec_of, output_node, writes_in_place
from plait.compile.ir.node_info import info_of
from plait.cost.memory_model import ACTIVATIONS, GRADIENTS, PARAMETERS

aten = torch.ops.aten


def with_memory_marks(graph: Graph, gradients: Collection[int]) -> Graph:
    """A copy of a local graph that tells `world.meter` what runs. `gradients` are the indices of the outputs that are
    gradients."""
    copy = copy_graph(graph)
    world = world_of(copy)
    makes = _make_gradients(copy, gradients)
    phase, before = "forward", None
    for node in [node for node in copy.nodes if node.op == "call_function"]:
        phase = info_of(node).phase or phase
        now = (f"{phase} of {info_of(node).module or 'the loss'}", GRADIENTS if node in makes else _class_of(node))
        if now != before:
            with copy.inserting_before(node):
                copy.call_function(mark, (world, *now))
            before = now
        if given := _gives(node):
            with copy.inserting_after(node):
                copy.call_function(claim, (world, node, given))
    return copy


def mark(world: Any, moment: str, label: str) -> None:
    """Tell the meter what runs from now on, and the class of what it allocates."""
    world.meter.at(moment, label)


def claim(world: Any, values: object, label: str) -> None:
    """Tell the meter that tensors belong to another class than the one they were allocated in."""
    world.meter.claim(values, label)


def _gives(node: Node) -> str:
    """The class of what a call returns, if it is not that of what the call allocates."""
    memory = op_spec_of(node).memory
    return "" if memory is None else memory.gives


def _class_of(node: Node) -> str:
    """The class of the memory that a call allocates."""
    row = op_spec_of(node)
    if row.memory is not None:
        return row.memory.makes
    if node.target is aten._to_copy.default:
        source = node.args[0]
        while isinstance(source, Node) and is_view(source):
            source = source.args[0]
        if isinstance(source, Node) and info_of(source).kind == "parameter":
            return PARAMETERS  # cast to the precision that the matmuls compute in
    return ACTIVATIONS


def _make_gradients(graph: Graph, gradients: Collection[int]) -> set[Node]:
    """The calls that allocate the memory of a gradient that the graph returns."""
    found: set[Node] = set()
    (results,) = output_node(graph).args
    for index in gradients:
        node = results[index]  # type: ignore[index]
        while isinstance(node, Node) and node.op == "call_function" and not _gives(node):
            found.add(node)
            inside = is_view(node) or is_item(node) or writes_in_place(node)
            node = node.args[0] if inside else None
    return found
