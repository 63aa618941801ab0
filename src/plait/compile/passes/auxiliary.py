"""Auxiliary calls, on which neither the loss nor a gradient depends: auto sharding keeps no weight whole for them."""

from __future__ import annotations

from torch.fx import Graph, Node

from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import output_node
from plait.compile.ir.node_info import info_of, set_info


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
