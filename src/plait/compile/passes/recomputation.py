"""Activation recomputation: forward values that are dropped after forward and recomputed in backward.

Values within a layer may be dropped. The outputs of a layer are kept, so that at most one layer is recomputed at a time
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). With a budget, an integer program chooses the
values to keep: it minimises the time of recomputation within so many bytes (as in Checkmate, Jain et al. 2020, with
each value recomputed at most once). What was gathered is gathered once more (Korthikanti et al. 2022), and what an
all-to-all has brought, such as rows for experts, is sent once more, except within a budget; results of other
collectives are kept. Dropout masks are the same the second time, because they depend on the key of the step only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import Graph, Node

from plait.compile.ir.calls import drop_dead_calls, is_cast, is_view, num_bytes, op_spec_of, output_values
from plait.compile.ir.estimate import seconds_of
from plait.compile.ir.node_info import info_of, is_backward, is_forward, set_info
from plait.compile.ops import CollectiveKind
from plait.compile.ops.dims import HALF
from plait.errors import PlanError, Refusal
from plait.plan.key_values import Bytes, Recompute
from plait.plan.legality import layer_of, no_layer
from plait.schedule.recompute_solver import KeptValue, choose_kept
from plait.spec.cluster import DeviceSpec

Layer = tuple[str, int | None]  # name of the module, and stage of the pipeline
_SENT_AGAIN = {CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL}  # if a layer is recomputed


def recompute(graph: Graph, how: Recompute, device: DeviceSpec) -> Graph:
    """Recompute activations in backward, as `recompute=` of the plan says. Changes the local graph and returns it.

    `device` is what the step runs on, for the time of what is recomputed.

    Raises:
        PlanError: the model has no layer that `how` names, or the budget is smaller than what must be kept.
    """
    if how.kind == "none":
        return graph
    forward = [n for n in graph.nodes if n.op == "call_function" and is_forward(n)]
    if how.kind == "gathers":
        dropped = _received(forward, {CollectiveKind.ALL_GATHER}) - _read_in_another_stage(graph)
    else:
        layers = _layers(forward, how)
        kept_anyway = _layer_outputs(forward, layers) | _read_in_another_stage(graph)
        dropped = {n for n in forward if n in layers and n not in kept_anyway and not op_spec_of(n).communicates}
        if how.kind == "budget":
            dropped -= _kept_within(forward, dropped, how, device)
        else:
            dropped |= {n for n in _received(forward, _SENT_AGAIN) if n in layers and n not in kept_anyway}
    _recompute_in_backward(graph, dropped)
    drop_dead_calls(graph)
    graph.lint()
    return graph


def widen_again(graph: Graph) -> Graph:
    """Let backward widen half-precision values for itself where it reads what forward has widened. Changes the local
    graph and returns it.

    A norm that computes in float32 within a model in half precision keeps its input for backward in float32, which is
    twice the bytes of the value that it is a copy of. Widening is exact, and cheap. Parameters are left as they are:
    with zero=3 backward might have to gather them for nothing else.
    """
    other_stages = _read_in_another_stage(graph)
    found = {
        node
        for node in graph.nodes
        if node.op == "call_function" and is_forward(node) and _widens(node) and node not in other_stages
    }
    _recompute_in_backward(graph, found)
    return graph


def _widens(node: Node) -> bool:
    """Whether a call is a cast of an activation in half precision to a wider dtype."""
    if not is_cast(node):
        return False
    source = base = node.all_input_nodes[0]
    while base.op == "call_function" and (is_view(base) or is_cast(base)):
        base = base.all_input_nodes[0]
    narrow, wide = source.meta["val"].dtype, node.meta["val"].dtype
    return base.op == "call_function" and narrow in HALF and wide.is_floating_point and wide.itemsize > narrow.itemsize


def _received(forward: list[Node], kinds: Collection[CollectiveKind]) -> set[Node]:
    """The values that whole collectives of these kinds bring, and views of these."""
    found: set[Node] = set()
    for node in forward:
        row = op_spec_of(node)
        if row.view is None:
            does = row.communicates
            if does is not None and does.part == "whole" and does.kind in kinds:
                found.add(node)
        elif node.all_input_nodes[0] in found:
            found.add(node)
    return found


def _layers(forward: list[Node], how: Recompute) -> dict[Node, Layer]:
    """The layer of each forward node that is in one. A layer that the pipeline cuts counts as one layer per stage."""
    if refusal := no_layer(how, {info_of(n).module for n in forward}):
        raise PlanError(refusal)
    found = {node: (layer, info_of(node).stage) for node in forward if (layer := layer_of(info_of(node).module, how))}
    if not found:  # a model without layers is one layer for a budget
        found = {node: ("model", info_of(node).stage) for node in forward}
    return found


def _layer_outputs(forward: list[Node], layers: dict[Node, Layer]) -> set[Node]:
    """The values that forward nodes outside of their layer read, and the bases of those that are views."""
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
    """The values that backward reads on another stage than theirs, whose own backward runs later."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and is_backward(node) and info_of(node).stage is not None:
            found |= {s for s in node.all_input_nodes if info_of(s).stage not in (None, info_of(node).stage)}
    return found


def _kept_within(forward: list[Node], droppable: set[Node], how: Recompute, device: DeviceSpec) -> set[Node]:
    """The droppable nodes to keep so that all that is saved for backward fits the budget."""
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
                seconds=seconds_of(node, device),
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
                f"recompute=budget={Bytes().show(how.budget_bytes)} cannot be met", f"{_rounded_up(least)} of"
                " activations stay from forward to backward even if all others are recomputed",
                "give that much, a smaller batch, or a larger data=, tensor= or micro=",
            )
        )  # fmt: skip
    return {order[i] for i in chosen} & droppable


def _rounded_up(num_bytes: int) -> str:
    """A size of few digits that a plan can name, not smaller than `num_bytes`."""
    unit = 2**20 if num_bytes >= 2**26 else 2**10
    return Bytes().show(-(-num_bytes // unit) * unit)


def _with_sources(nodes: Iterable[Node], within: Collection[Node], ends: Collection[Node] = ()) -> set[Node]:
    """The nodes and all their sources that are in `within`. Sources of `ends` are not followed."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [s for s in node.all_input_nodes if s in within] if node not in ends else []
    return found


def _recompute_in_backward(graph: Graph, dropped: set[Node]) -> None:
    """Recompute each dropped value that backward reads, right before its first reader."""
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
