"""Assign a stage of the pipeline to each call of a step.

A forward call has a position in the order of the program. A backward call has the position of the forward call that it
differentiates (compile/capture/graph_recorder.py). So a list of positions cuts forward and backward into stages at
once. The costs of calls come from the local graph; schedule/cut.py decides where to cut.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from plait.compile.capture.captured import Output
from plait.compile.ir.calls import (
    is_cast,
    is_item,
    is_tensor,
    is_view,
    may_alias,
    num_bytes,
    op_spec_of,
    output_node,
    placeholders,
)
from plait.compile.ir.estimate import flops_of, seconds_of
from plait.compile.ir.node_info import info_of, is_backward, position_of, set_info, stage_of
from plait.compile.ops import comm_ops
from plait.compile.ops.draw import draw
from plait.errors import PlanError, Refusal
from plait.plan.axes import stage_axis
from plait.plan.legality import no_module_to_cut, wrong_number_of_cuts
from plait.plan.plan import Plan
from plait.schedule.cut import Flow, Item, choose_cut
from plait.spec.cluster import Cluster, DeviceSpec

aten = torch.ops.aten
_MOST_ITEMS = 1200  # the search for a cut is quadratic in their number


def place_in_stages(
    graph: Graph,
    plan: Plan,
    copies: Sequence[int],
    anywhere: Collection[Node],
    outputs: Sequence[Output],
    cluster: Cluster,
    settled: Mapping[str, tuple[int, ...]] | None = None,
) -> list[float]:
    """Choose where to cut a step, and set the `stage` of its calls. Changes `graph`.

    A call that reads a buffer is on the same stage as the call that changes it, so that the next microbatch reads the
    new value.

    Args:
        copies: for each stage, the number of ranks that share its microbatches.
        anywhere: calls that each stage repeats for itself. They get no stage.
        outputs: the outputs of the step, one for each result of the graph.
        cluster: where the step runs, for the time of calls and of what is sent between stages.
        settled: the stages of parameters, as an earlier batch decided them.

    Returns:
        The positions at which the stages begin, without the first stage.

    Raises:
        PlanError: the step has fewer calls than stages, `cut=` names no module or leaves a stage empty, or parameters
            cannot stay on their `settled` stages.
    """
    num_stages = len(copies)
    items, first_places = _items(graph, cluster.device)
    flows = _flows(graph, anywhere, first_places, neighbour_bandwidth(cluster, plan))
    if len(items) < num_stages:
        sizes = f"pipeline={len(plan.copies)} x chunks={num_stages // len(plan.copies)}"
        what = f"the step has {len(items)} calls that a stage can begin with, and {num_stages} stages ({sizes})"
        raise PlanError(Refusal(what, "", f"use {len(items)} stages or fewer"))
    allowed = _allowed(graph, plan, num_stages, first_places, settled)
    whole = _whole_items(graph, outputs, first_places)
    free = [i for i in range(1, len(items)) if i not in whole]
    if len(free) < num_stages - 1:
        what = f"the step can be cut at {len(free)} positions, which is too few for {num_stages} stages"
        why = "the calls that read a buffer must be on the stage that changes it"
        raise PlanError(Refusal(what, why, f"use {len(free) + 1} stages or fewer"))
    if plan.cut and settled is None and allowed is not None:
        within = [name for name, places in zip(plan.cut, allowed, strict=True) if whole.intersection(places or ())]
        if within:
            what = f"cut={','.join(within)} begins a stage between calls that must be on one"
            why = "they are of one buffer, or of tokens and the experts to which ranks of expert= exchange them"
            raise PlanError(Refusal(what, why, "begin it with a module before or behind these"))
    if whole:
        allowed = [free if each is None else sorted({*each} - whole) for each in allowed or [None] * (num_stages - 1)]
    found = choose_cut(items, flows, num_stages, allowed, copies=copies)
    if found is None and plan.cut and settled is None:
        what = f"cut={','.join(plan.cut)} leaves a stage empty, or names modules in another order than they run"
        instead = f"name {num_stages - 1} modules in the order in which the model calls them, none of them the first"
        raise PlanError(Refusal(what, "", instead))
    if found is None and settled is not None and allowed is not None:
        found = _with_empty_stages(allowed)
    if found is None:
        raise PlanError(
            "a batch of this shape runs other parts of the model than the first batch did, and no cut leaves each"
            " parameter on its stage; begin with a batch that runs most of the model"
        )
    begins = [first_places[i] if i < len(first_places) else math.inf for i in found]
    stages_from(graph, begins, anywhere)
    return begins


def stages_from(graph: Graph, begins: Sequence[float], anywhere: Collection[Node]) -> None:
    """Set the `stage` of calls, given the positions at which stages begin. Changes `graph`."""
    for node in graph.nodes:
        if node.op == "call_function" and node not in anywhere:
            set_info(node, stage=bisect.bisect_right(begins, position_of(node)))
    _add_where_made(graph)
    _keep_order(graph, anywhere)


def complete_places(graph: Graph) -> None:
    """Set the position of calls that have none, such as collectives: that of what they read. Changes `graph`.

    A sum of gradients from several positions gets that of its reader, so that each term is sent there directly.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_item(node):
            whole = info_of(node.args[0])
            set_info(node, position=whole.position, phase=whole.phase)
        elif info_of(node).position is None:
            sources = [s for s in node.all_input_nodes if s.op == "call_function"]
            last = max(sources, key=_moment, default=None)
            position, phase = (0, "forward") if last is None else (_place(last), info_of(last).phase)
            set_info(node, position=position, phase=phase)
    for node in reversed(graph.nodes):
        if node.target is comm_ops.shard and node.all_input_nodes[-1].op == "placeholder":
            readers = [u for u in node.users if u.op == "call_function"]
            if readers:
                first = min(readers, key=_moment)
                set_info(node, position=_place(first), phase=info_of(first).phase)
        if node.target is aten.add.Tensor and is_backward(node):
            readers = [u for u in node.users if u.op == "call_function"]
            if readers and len(readers) == len(node.users):
                set_info(node, position=min(_place(node), max(map(_place, readers))))


def _moment(node: Node) -> tuple[bool, int]:
    """A key that sorts calls by when they run: forward by rising position, then backward by falling position."""
    return is_backward(node), -_place(node) if is_backward(node) else _place(node)


def repeatable(graph: Graph, written: Collection[str]) -> set[Node]:
    """The calls that each stage repeats for itself, so that their results are neither sent nor kept.

    They are views, parts and casts of parameters, and cheap calls on the batch alone, such as masks and positions.
    Calls that read `written` buffers, which change with every microbatch, are not among them.
    """
    found: set[Node] = set()
    of_parameters: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and info_of(node).kind == "parameter":
            of_parameters.add(node)
        if node.op != "call_function" or op_spec_of(node).communicates or node.target is draw:
            continue
        if info_of(node).owner:
            continue
        sources = node.all_input_nodes
        if any(s.op == "placeholder" and info_of(s).name in written for s in sources):
            continue
        if not all(s.op == "placeholder" or s in found for s in sources) or any(s.name == "scale" for s in sources):
            continue
        if of_parameters.intersection(sources):
            if not may_alias(node) and not is_cast(node):
                continue
            of_parameters.add(node)
        elif flops_of(node):
            continue
        found.add(node)
    return found


def follow_readers(graph: Graph, anywhere: Collection[Node]) -> None:
    """Move views and casts of weights, and their backward, to the position of their first reader. Changes `graph`.

    Their backward makes the gradient of the weight: a cut in between would part a weight from its gradient.
    """
    reader: dict[Node, int] = {}
    moved: dict[int, int] = {}
    for node in reversed(graph.nodes):
        if node in anywhere and not is_backward(node):
            users = [u for u in node.users if u.op == "call_function" and not is_backward(u)]
            places = [reader[u] if u in anywhere else _place(u) for u in users if u not in anywhere or u in reader]
            if places:
                reader[node] = moved[_place(node)] = min(places)
    forward = [n for n in graph.nodes if n.op == "call_function" and not is_backward(n)]
    for place in {_place(node) for node in forward if node not in anywhere}:
        moved.pop(place, None)
    for node in graph.nodes:
        if node.op == "call_function" and _place(node) in moved:
            set_info(node, position=moved[_place(node)])


def base_of(node: Node, anywhere: Collection[Node] = ()) -> Node:
    """The value to send or keep so that a stage can make the view `node`: the smallest one that the view is a part
    of."""
    while node.op == "call_function" and node not in anywhere and is_view(node) and is_tensor(node):
        source = node.all_input_nodes[0]
        if not is_tensor(source) or num_bytes(source.meta["val"]) > num_bytes(node.meta["val"]):
            break
        if len(node.all_input_nodes) > 1:
            break
        node = source
    return node


def _place(node: Node) -> int:
    return info_of(node).position or 0


def _items(graph: Graph, device: DeviceSpec) -> tuple[list[Item], list[int]]:
    """The time of forward and backward at each position, with neighbours joined, and the first position of each
    item."""
    seconds: dict[int, float] = defaultdict(float)
    forward = set()
    for node in graph.nodes:
        if node.op == "call_function" and info_of(node).position is not None:
            seconds[position_of(node)] += seconds_of(node, device)
            if not is_backward(node) and not is_view(node):
                forward.add(position_of(node))
    places = sorted(forward)
    every = sorted(seconds)
    work = [0.0] * len(places)
    for place in every:
        work[max(bisect.bisect_right(places, place) - 1, 0)] += seconds[place]
    while len(places) > _MOST_ITEMS:  # join neighbours, the cheapest pairs
        cheapest = sorted(range(1, len(places)), key=lambda i: work[i - 1] + work[i])[: len(places) // 4]
        for i in sorted(cheapest, reverse=True):
            work[i - 1] += work.pop(i)
            places.pop(i)
    return [Item(each) for each in work], places


def neighbour_bandwidth(cluster: Cluster, plan: Plan) -> float:
    """Bytes/s between neighbours of a pipeline."""
    return cluster.bandwidth_between(0, plan.mesh.stride(stage_axis()))


def _flows(
    graph: Graph, anywhere: Collection[Node], first_places: Sequence[int], bytes_per_second: float
) -> list[Flow]:
    """The forward values that later items read: for each, the seconds to send it and its gradient."""

    def item(node: Node) -> int:
        return max(bisect.bisect_right(first_places, _place(node)) - 1, 0)

    users: dict[Node, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "call_function" and not is_backward(node) and node not in anywhere:
            for source in node.all_input_nodes:
                base = base_of(source, anywhere)
                if base.op == "call_function" and base not in anywhere and is_tensor(base):
                    users[base].add(item(node))
    found = []
    for node, readers in users.items():
        value = node.meta["val"]
        times = 2 if value.dtype.is_floating_point else 1
        later = tuple(sorted(r for r in readers if r > item(node)))
        if later:
            found.append(Flow(item(node), later, times * num_bytes(value) / bytes_per_second))
    return found


def _allowed(
    graph: Graph,
    plan: Plan,
    num_stages: int,
    first_places: Sequence[int],
    settled: Mapping[str, tuple[int, ...]] | None,
) -> list[Collection[int] | None] | None:
    """The items with which each stage but the first may begin; None where any may."""
    if settled is not None:
        return _as_settled(graph, num_stages, first_places, settled)
    if not plan.cut:
        return None
    if refusal := wrong_number_of_cuts(plan, num_stages):
        raise PlanError(refusal)
    return [{bisect.bisect_left(first_places, _begin_of(graph, name))} for name in plan.cut]


def _with_empty_stages(allowed: Sequence[Collection[int] | None]) -> tuple[int, ...] | None:
    """The item with which each stage begins, if stages may be empty: evaluation has fewer calls than training."""
    found: list[int] = []
    for places in allowed:
        later = [place for place in places or () if not found or place >= found[-1]]
        if not later:
            return None
        found.append(min(later))
    return tuple(found)


def _whole_items(graph: Graph, outputs: Sequence[Output], first_places: Sequence[int]) -> set[int]:
    """The items with which no stage may begin: those between the first reader of a buffer and the call that changes
    it, and between the readers of a value that ties them."""
    found: set[int] = set()

    def join(nodes: Iterable[Node]) -> None:
        places = [max(bisect.bisect_right(first_places, _place(node)) - 1, 0) for node in nodes]
        found.update(range(min(places) + 1, max(places) + 1))

    (results,) = output_node(graph).args
    written = {o.name: r for o, r in zip(outputs, results, strict=True) if o.kind == "buffer"}  # type: ignore[arg-type]
    for node in placeholders(graph):
        result = written.get(info_of(node).name)
        if info_of(node).kind != "buffer" or not isinstance(result, Node) or result.op != "call_function":
            continue
        join([*(u for u in node.users if u.op == "call_function" and not is_backward(u)), result])
    for node in graph.nodes:
        if op_spec_of(node).ties:
            join([node, *(u for u in node.users if u.op == "call_function")])
    return found


def _begin_of(graph: Graph, name: str) -> int:
    forward = [n for n in graph.nodes if n.op == "call_function" and not is_backward(n) and not is_view(n)]
    places = [_place(n) for n in forward if f"{info_of(n).module}.".startswith(f"{name}.")]
    if not places:
        refusal = no_module_to_cut(name, [info_of(node).module for node in forward])
        assert refusal is not None
        raise PlanError(refusal)
    return min(places)


def _as_settled(
    graph: Graph, num_stages: int, first_places: Sequence[int], settled: Mapping[str, tuple[int, ...]]
) -> list[Collection[int] | None]:
    """For each stage but the first, the items with which it may begin so that every parameter stays on its stage."""
    low, high = [0] * num_stages, [len(first_places)] * num_stages
    for node in placeholders(graph):
        stages = settled.get(info_of(node).name)
        if info_of(node).kind != "parameter" or stages is None or len(stages) != 1:
            continue
        readers = _readers(node)
        if not readers:
            continue
        items = [max(bisect.bisect_right(first_places, _place(r)) - 1, 0) for r in readers]
        for stage in range(1, num_stages):
            if stages[0] < stage:
                low[stage] = max(low[stage], max(items) + 1)
            else:
                high[stage] = min(high[stage], min(items))
    return [range(low[stage], high[stage] + 1) for stage in range(1, num_stages)]


def _readers(node: Node) -> list[Node]:
    """The forward calls that read a parameter, directly or through views and casts of it."""
    found, stack = [], [node]
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or is_backward(user):
                continue
            if is_view(user) or is_cast(user):
                stack.append(user)
            else:
                found.append(user)
    return found


def _add_where_made(graph: Graph) -> None:
    """Move sums of gradients of one stage to that stage, so that it sends the sum only."""
    for node in graph.nodes:
        if node.target is aten.add.Tensor and is_backward(node) and info_of(node).stage is not None:
            stages = {info_of(s).stage for s in node.all_input_nodes if s.op == "call_function"}
            if len(stages) == 1 and (stage := stages.pop()) is not None:
                set_info(node, stage=max(stage, stage_of(node)))


def _keep_order(graph: Graph, anywhere: Collection[Node]) -> None:
    """Move forward calls to the latest stage that they read, and backward calls to the earliest."""
    for node in graph.nodes:
        if node.op != "call_function" or node in anywhere:
            continue
        same = [
            stage_of(s)
            for s in node.all_input_nodes
            if s.op == "call_function" and info_of(s).stage is not None and is_backward(s) == is_backward(node)
        ]
        if same:
            set_info(node, stage=(min if is_backward(node) else max)(*same, stage_of(node)))
