"""The order of the transformations, in one place: from the captured step to the graph that ranks run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.decide.readiness import Cell
from plait.errors import PlanError
from plait.graph.by_role import INNER, give_roles, propagate_by_role, split_by_tensor
from plait.graph.calls import output_node, placeholders
from plait.graph.capture import Captured
from plait.graph.formats import keep_formats, note_formats
from plait.graph.node_info import info_of, set_info
from plait.graph.owning import own_gradients
from plait.graph.partition import partition
from plait.graph.pause import collection_paused
from plait.graph.pipeline import AXIS as PIPELINE
from plait.graph.pipeline import Pipeline, cut_in_stages, pipelined
from plait.graph.propagate import propagate
from plait.graph.recipe import recipe
from plait.graph.recompute import recompute
from plait.graph.rows import Cut
from plait.graph.rules.dims import overloads
from plait.graph.share import SplitShare, split_share, step_flops
from plait.graph.turns import graphs_of_turns, narrowed, turns_of
from plait.graph.zero import cut_of, state_layouts
from plait.spec.annotation import Annotations, resolve_annotations
from plait.spec.layout import REPLICATE, Layout, Placement, Replicate, Shard
from plait.spec.plan import BATCH_AXES, Plan

aten = torch.ops.aten
BATCH_NORM = frozenset(
    overloads(
        "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
        "_batch_norm_with_update", "_batch_norm_with_update_functional", "native_batch_norm_backward",
        "batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward", "_native_batch_norm_legit.no_stats",
    )
)  # fmt: skip
_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool"}


@dataclass(frozen=True)
class Lowered:
    """What every rank of a plan needs to know about one captured step."""

    graphs: dict[str, Graph]  # local; the same for all ranks but for parallel branches (see specialise). By turn, or
    # with a pipeline by cell and turn: F0, B0.first...
    captured: Captured
    plan: Plan
    layouts: dict[str, Layout]  # of parameters, buffers, constants and batch leaves, by name, as the graph reads them
    states: dict[str, Layout]  # of parameters, as the optimizer holds them
    dtypes: dict[str, str]  # in which the graph reads parameters, where that is not their own
    origins: dict[str, str]  # of those of them that are sharded: the annotation or recipe
    without_rule: frozenset[str]  # ops that ran on whole inputs for lack of a rule
    batch_size: int  # of one microbatch
    pipeline: Pipeline | None = None
    share: SplitShare | None = None  # of an axis that splits weights: how much it does

    @property
    def graph(self) -> Graph:
        """The graph of a step's last microbatch, in which gradients are summed over ranks."""
        return self.graphs[self.turns[-1]]

    @property
    def cuts(self) -> dict[str, Cut]:
        """How zero cuts this rank's parameters over `data`."""
        pairs = {name: cut_of(self.layouts[name], state, self.plan) for name, state in self.states.items()}
        return {name: cut for name, cut in pairs.items() if cut is not None}

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a parameter, as the model has it."""
        return dtype_named(self.layouts[name].dtype)

    @property
    def turns(self) -> tuple[str, ...]:
        """Which graph runs each microbatch of a step, in order."""
        return turns_of(self.plan.micro, self.graphs.keys())

    def turns_of_cell(self, cell: Cell, num_micro: int) -> tuple[str, ...]:
        """Which graph runs each of so many microbatches that come to a cell of the pipeline on one rank, in order."""
        name = cell_name(cell)
        turns = {graph.partition(".")[2] for graph in self.graphs if graph.partition(".")[0] == name}
        return tuple(f"{name}.{turn}" for turn in turns_of(num_micro, turns))


def cell_name(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that layouts print: f32, bf16, int64..."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    found = next((dtype for dtype, short in _SHORT.items() if short == name), None)
    return getattr(torch, name) if found is None else found


@collection_paused()
def lower(
    captured: Captured,
    plan: Plan,
    annotations: Annotations | None = None,
    settled: Mapping[str, Layout] | None = None,
    stages: Mapping[str, tuple[int, ...]] | None = None,
    frozen: Collection[str] | None = None,
) -> Lowered:
    """Lay out and partition a captured step along each axis of the plan, then place its collectives in time.

    `settled` are layouts of parameters, `stages` those of a pipeline, and `frozen` the parameters that did not train,
    that an earlier capture of the same model decided: they are kept as they are.
    Raises PlanError where an axis does not divide what it must split, LayoutError for a bad annotation.
    """
    graph = _copy(captured, plan.num_processes > 1)
    values = {node.name: node.meta["val"] for node in placeholders(graph)}
    names = {i.node: i.name for i in captured.inputs}
    nodes = {i.name: i.node for i in captured.inputs}
    shapes = {i.name: tuple(values[i.node].shape) for i in captured.inputs if i.kind == "parameter"}
    annotated = resolve_annotations(annotations or {}, shapes, plan.mesh)
    placements: dict[str, list[tuple[str, Placement]]] = {name: [] for name in nodes}
    origins: dict[str, str] = {}
    without_rule: set[str] = set()
    batch_size, split = captured.rows, _cut_leaves(captured, values)
    if batch_size % plan.num_batch_parts:
        if any(output.kind == "gradient" for output in captured.outputs):
            raise PlanError(_uneven_batch(batch_size, plan))
        split = []  # the short last batch of an evaluation: every rank has all of it
    begins = None
    if plan.stages:
        if batch_size % (plan.num_batch_parts * plan.mesh.axis_size(INNER)):
            raise PlanError(_uneven_batch(batch_size, plan))
        schedule, begins = cut_in_stages(graph, captured, plan, stages)
        give_roles(graph, [plan.stages[schedule.where(stage)[0]][0] for stage in range(schedule.num_stages)])
    chosen, reasons = _choose_parameters(graph, plan, annotated, settled, nodes)
    flops: dict[str, tuple[int, int]] = {}  # by axis that splits weights: before it does, and after
    for axis in (*BATCH_AXES, *(axis for axis in plan.mesh.names if axis not in BATCH_AXES)):
        size = plan.mesh.axis_size(axis)
        if size == 1 or axis == PIPELINE:
            continue
        fixed, origin = chosen[axis]
        if axis in BATCH_AXES:
            fixed |= {nodes[name]: Shard(0) for name in split}
            origin |= {nodes[name]: f"batch: {name}" for name in split}
        wanted = tuple(
            fixed.get(nodes[o.name], REPLICATE) if o.kind == "gradient" else REPLICATE for o in captured.outputs
        )
        if axis == INNER:
            laid_out = propagate_by_role(graph, size, fixed, {nodes[name] for name in split}, wanted, origin)
        else:
            local_ops = BATCH_NORM if _local_norm(plan, axis) else frozenset()
            laid_out = propagate(graph, size, fixed, wanted, origin, local_ops)
        before = 0 if axis in BATCH_AXES else step_flops(graph)
        graph = partition(laid_out, axis)
        if axis not in BATCH_AXES:
            flops[axis] = before, step_flops(graph)
        without_rule |= laid_out.without_rule
        for node, placement in fixed.items():
            if not isinstance(placement, Replicate):
                placements[names[node]].append((axis, placement))
                origins[names[node]] = origin.get(node, "")
    layouts = {
        i.name: Layout(dtype_name(values[i.node].dtype), tuple(values[i.node].shape), tuple(placements[i.name]))
        for i in captured.inputs
        if isinstance(values[i.node], torch.Tensor)
    }
    parameters = {i.name: layouts[i.name] for i in captured.inputs if i.kind == "parameter"}
    share = None
    for axis, (before, after) in flops.items():
        share = split_share(parameters, axis, plan.mesh.axis_size(axis), before, after, reasons)
    graph = keep_formats(graph)
    pipeline = None
    if len(plan.copies) > 1:
        pipeline = pipelined(graph, captured, plan, stages, begins)
        layouts |= {name: pipeline.placed(name, layouts[name]) for name in pipeline.stages}
    else:
        graph = recompute(graph, plan.recompute)
    states = state_layouts(captured, layouts, plan, frozen)
    if pipeline is None:
        dtypes = narrowed([graph], plan, layouts, states)
        graphs = graphs_of_turns(graph, captured.outputs, plan, layouts, states, {plan.micro})
    else:
        cells, several = pipeline.cells.graphs, pipeline.added_up
        dtypes = narrowed([each.graph for each in cells.values()], plan, layouts, states)
        graphs = {
            f"{cell_name(cell)}.{turn}": found
            for cell, each in cells.items()
            for turn, found in graphs_of_turns(
                each.graph, each.outputs, plan, layouts, states, pipeline.num_micro(cell), several
            ).items()
        }
    return Lowered(
        graphs, captured, plan, layouts, states, dtypes, origins, frozenset(without_rule), batch_size, pipeline, share
    )


def _choose_parameters(
    graph: Graph,
    plan: Plan,
    annotated: Mapping[str, Mapping[str, Placement]],
    settled: Mapping[str, Layout] | None,
    nodes: Mapping[str, str],
) -> tuple[dict[str, tuple[dict[str, Placement], dict[str, str]]], dict[str, str]]:
    """Placement of parameters along each axis, by node, and where it came from; and why others stay whole, by name.
    Recipes read the graph as captured, before any axis has changed it."""
    chosen = {}
    reasons: dict[str, str] = {}
    names = {node: name for name, node in nodes.items()}
    for axis, size in plan.mesh.axes:
        if axis == PIPELINE:
            continue
        if settled is not None:
            chosen[axis] = ({nodes[name]: layout.on(axis) for name, layout in settled.items()}, dict[str, str]())
            continue
        fixed = {nodes[name]: on[axis] for name, on in annotated.items() if axis in on}
        origin = {nodes[name]: f"layouts: {name}" for name in annotated}
        if axis not in BATCH_AXES and size > 1:
            if axis == INNER:
                among = split_by_tensor(graph)
                found, why = recipe(graph, size, fixed, "tensor", among) if among else ({}, {})
            else:
                found, why = recipe(graph, size, fixed, axis)
            reasons |= {names[node]: reason for node, reason in why.items() if node not in found}
            reasons |= {name: "layouts= says so" for name, on in annotated.items() if axis in on}
            origin |= {node: f"recipe: {names[node]}" for node in found}
            fixed |= found
        chosen[axis] = (fixed, origin)
    return chosen, reasons


def _local_norm(plan: Plan, axis: str) -> bool:
    return axis in BATCH_AXES and plan.batchnorm == "local"


def _copy(captured: Captured, several: bool) -> Graph:
    """A copy whose placeholders know their kind and name, whose gradients have memory of their own, whose views do not
    rely on the strides of one device, and whose calls know which memory formats they rely on."""
    graph = Graph()
    source = captured.graph.graph
    graph.output(graph.graph_copy(source, {}))
    output_node(graph).meta = dict(output_node(source).meta)
    inputs = {i.node: i for i in captured.inputs}
    for node in placeholders(graph):
        set_info(node, kind=inputs[node.name].kind, name=inputs[node.name].name)
    graph = note_formats(graph, several)
    _mark_upkeep(graph, [i for i, o in enumerate(captured.outputs) if o.kind == "buffer"])
    _mark_aside(graph, captured)
    return own_gradients(graph, [i for i, o in enumerate(captured.outputs) if o.kind == "gradient"])


def _mark_aside(graph: Graph, captured: Captured) -> None:
    """Mark as aside the calls that only outputs beside the loss need: no weight stays whole for their sake."""
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
            set_info(node, aside=True)


def _mark_upkeep(graph: Graph, outputs: list[int]) -> None:
    """Mark as aside what follows buffers and parameters alone and ends in a buffer's new value, such as a mean of
    weights: no weight stays whole for its sake."""
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
            set_info(node, aside=True)
            marked.add(node)
            stack += node.all_input_nodes


def _cut_leaves(captured: Captured, values: dict[str, object]) -> list[str]:
    """The tensors of the batch that have a row for each of its rows."""
    leaves = {i.name: values[i.node] for i in captured.inputs if i.kind == "batch"}
    return [n for n, v in leaves.items() if isinstance(v, torch.Tensor) and v.ndim and v.shape[0] == captured.rows]


def _uneven_batch(batch_size: int, plan: Plan) -> str:
    parts = plan.num_batch_parts
    axes = " x ".join(f"{axis}={n}" for axis, n in plan.mesh.axes if axis in BATCH_AXES and n > 1)
    if plan.stages:
        inner = plan.mesh.axis_size(INNER)
        return (
            f"stages= cuts each microbatch of {batch_size} into {parts} x {inner} parts; give a batch size that is a"
            f" multiple of {parts * inner * plan.micro}, or less of micro"
        )
    what = "the batch" if plan.micro == 1 else "a microbatch"
    return (
        f"{axes} does not divide {what} of {batch_size}; give a batch size that is a multiple of {parts * plan.micro},"
        f" or a plan with data={_divisor_below(batch_size, parts)}"
    )


def _divisor_below(number: int, limit: int) -> int:
    return max((d for d in range(1, limit + 1) if number % d == 0), default=1)
