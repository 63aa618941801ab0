"""Recompute: which values of the forward pass live on until the backward pass, and which are worked out again there.

Within a layer the values that backward reads may be dropped; what a layer hands to others is always kept, so that what
is worked out again at a time is no more than one layer (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost"). With a budget, the tensors to keep are the solution of an integer program: least time spent again within so
many bytes (as in Checkmate, Jain et al. 2020, with each value worked out again at most once). Sums over ranks are kept
and never sent again. Dropout masks are the same the second time, because they follow from the step's key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import Graph, Node

from plait.compile.ir.calls import num_bytes, op_spec_of, output_values
from plait.compile.ir.estimate import seconds_of
from plait.compile.ir.node_info import info_of, is_backward, is_forward, set_info
from plait.compile.ir.views import is_view
from plait.errors import PlanError, Refusal
from plait.plan.kinds import Bytes
from plait.plan.recompute import Recompute
from plait.plan.step_refusals import layer_of, no_layer
from plait.schedule.keep import KeptValue, choose_kept

Layer = tuple[str, int | None]  # its module's name, and which stage of a pipeline's


def recompute(graph: Graph, how: Recompute) -> Graph:
    """Drop values of the forward pass as the plan says. Changes the local graph of a step and returns it.

    PlanError where there is no layer, or where a budget cannot be met (with the least that can).
    """
    if how.kind == "none":
        return graph
    forward = [n for n in graph.nodes if n.op == "call_function" and is_forward(n)]
    layers = _layers(forward, how)
    kept_anyway = _handed_on(forward, layers) | _read_in_another_stage(graph)
    dropped = {n for n in forward if n in layers and n not in kept_anyway and not op_spec_of(n).communicates}
    if how.kind == "budget":
        dropped -= _kept_within(forward, dropped, how)
    _work_out_again(graph, dropped)
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def _layers(forward: list[Node], how: Recompute) -> dict[Node, Layer]:
    """The layer of each forward node that is in one. Of a layer that a pipeline cuts, each stage's part is one."""
    if refusal := no_layer(how, {info_of(n).module for n in forward}):
        raise PlanError(refusal)
    found = {node: (layer, info_of(node).stage) for node in forward if (layer := layer_of(info_of(node).module, how))}
    if not found:  # a budget is of the model as a whole then
        found = {node: ("model", info_of(node).stage) for node in forward}
    return found


def _handed_on(forward: list[Node], layers: dict[Node, Layer]) -> set[Node]:
    """What a layer's nodes give to forward nodes outside of it, and the memory which that is a view of."""
    found: set[Node] = set()
    for node in forward:
        for source in node.all_input_nodes:
            if source in layers and layers.get(node) != layers[source]:
                found.add(source)
                while is_view(source) and layers.get(source.all_input_nodes[0]) == layers[source]:
                    source = source.all_input_nodes[0]
                    found.add(source)
    return found


def _read_in_another_stage(graph: Graph) -> set[Node]:
    """What backward reads in another stage than made it: that one's backward would come too late to make it again."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and is_backward(node) and info_of(node).stage is not None:
            found |= {s for s in node.all_input_nodes if info_of(s).stage not in (None, info_of(node).stage)}
    return found


def _kept_within(forward: list[Node], droppable: set[Node], how: Recompute) -> set[Node]:
    """Which of the droppable nodes to keep so that all that is saved fits the budget."""
    needed = {n for n in forward if any(is_backward(u) for u in n.users)}
    fixed = {n for n in forward if n not in droppable and not is_view(n)}
    wanted = _with_sources(needed, set(forward), fixed)
    order = [n for n in forward if n in wanted]
    index = {node: i for i, node in enumerate(order)}
    values = []
    for node in order:
        several = not hasattr(node.meta.get("val"), "numel")
        values.append(
            KeptValue(
                bytes=sum(num_bytes(v) for v in output_values(node) if hasattr(v, "numel")),
                seconds=seconds_of(node),
                needed=node in needed,
                keepable=not is_view(node) and (node in fixed or not several),
                droppable=node not in fixed,
                sources=() if node in fixed else tuple(index[s] for s in node.all_input_nodes if s in index),
            )
        )
    chosen = choose_kept(values, how.budget_bytes)
    if chosen is None:
        least = sum(values[i].bytes for i in choose_kept(values, None) or ())
        raise PlanError(
            Refusal(
                f"recompute=budget={Bytes().show(how.budget_bytes)} cannot be met", "with all that can be dropped"
                f" worked out again, {_rounded_up(least)} of activations stay from forward to backward",
                "give that much, a smaller batch, or more of data, tensor or micro",
            )
        )  # fmt: skip
    return {order[i] for i in chosen} & droppable


def _rounded_up(num_bytes: int) -> str:
    """A size that a plan can name: no smaller, of few digits."""
    unit = 2**20 if num_bytes >= 2**26 else 2**10
    return Bytes().show(-(-num_bytes // unit) * unit)


def _with_sources(nodes: Iterable[Node], within: Collection[Node], ends: Collection[Node] = ()) -> set[Node]:
    """The nodes, and what they come from as far as it lies within; of `ends` not what they come from."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [s for s in node.all_input_nodes if s in within] if node not in ends else []
    return found


def _work_out_again(graph: Graph, dropped: set[Node]) -> None:
    """Where backward reads a dropped value, work it out again just before its first reader."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    again: dict[Node, Node] = {}
    for reader in [n for n in graph.nodes if n.op == "call_function" and is_backward(n)]:
        missing = [s for s in reader.all_input_nodes if s in dropped]
        for node in sorted(
            _with_sources([s for s in missing if s not in again], dropped - again.keys()), key=order.__getitem__
        ):
            with graph.inserting_before(reader):
                copy = graph.node_copy(node, lambda n: again.get(n, n))
            set_info(copy, phase="backward", recomputed=True)
            again[node] = copy
        for source in missing:
            reader.replace_input_with(source, again[source])
