"""Sharding a step: which parameters are cut over each axis of the plan's mesh, and the graph that one rank runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from plait.compile.capture.captured import Captured, Output
from plait.compile.compiled import Draft
from plait.compile.ir.calls import is_view, op_spec_of, output_node, placeholders, tensor_inputs
from plait.compile.ir.dtypes import dtype_name
from plait.compile.ir.node_info import is_backward
from plait.compile.ops import Call
from plait.compile.ops.context_attention import divides_heads
from plait.compile.ops.expert_parameters import expert_of, owner_of, stack_experts
from plait.compile.ops.experts import mark_experts
from plait.compile.passes.find_experts import expert_parameters, expert_weights, is_stack, uncast
from plait.compile.sharding.auto_sharding import auto_sharding
from plait.compile.sharding.narrow_gathers import gathered_of, mark_gathered
from plait.compile.sharding.paddings import join_paddings, write_paddings
from plait.compile.sharding.partition import partition
from plait.compile.sharding.propagate import Propagation, propagate
from plait.compile.sharding.sequence import (
    attention_calls,
    constrain_sequence,
    constrain_sums,
    needs_stripes,
    what_is_cut,
    whole_attention,
    whole_sequences,
)
from plait.compile.sharding.sharded_fraction import sharded_fraction, step_flops
from plait.compile.sharding.shifted_losses import keep_last_positions
from plait.compile.sharding.stage_parallelism import (
    give_roles,
    propagate_stage_parallelism,
    split_by_weights,
    weights_role,
)
from plait.compile.stages.split import cut_in_stages
from plait.errors import PlanError, UnevenBatchError
from plait.plan.annotation import resolve_annotations
from plait.plan.axes import AxisKind, axes_in_order, axis_kind
from plait.plan.legality import uneven_parts
from plait.plan.plan import Plan
from plait.plan.refused_cuts import (
    little_of_the_step,
    no_experts,
    no_sequence,
    uncut_attention,
    uneven_experts,
    unsplit_attention,
)
from plait.spec.layout import REPLICATE, Layout, Only, Partial, Placement, Replicate, Shard

aten = torch.ops.aten
_NOTHING = 0.02  # of a step's operations: an axis that splits less has found only labels to cut


def check_batch(draft: Draft) -> None:
    """Raise UnevenBatchError where the plan does not divide the rows of a microbatch. Of the short last batch of an
    evaluation every rank has all of it."""
    plan, rows = draft.plan, draft.captured.rows
    if refusal := uneven_parts(plan, rows, draft.trains):
        raise UnevenBatchError(refusal)


def assign_roles(draft: Draft) -> None:
    """Find the stages in the whole graph if they use an axis differently: layouts depend on that."""
    plan = draft.plan
    schedule, draft.begins = cut_in_stages(draft.graph, draft.captured, plan, draft.cluster, draft.settled.stages)
    give_roles(draft.graph, [plan.stages[schedule.where(stage)[0]][0] for stage in range(schedule.num_stages)])


def choose_layouts(draft: Draft) -> None:
    """Choose the placement of every parameter along each axis; LayoutError for a bad annotation."""
    inputs = draft.captured.inputs
    values = {node.name: node.meta["val"] for node in placeholders(draft.graph)}
    shapes = {i.name: tuple(values[i.node].shape) for i in inputs if i.kind == "parameter"}
    annotated = resolve_annotations(draft.annotations, shapes, draft.plan.mesh)
    nodes = {i.name: i.node for i in inputs}
    draft.chosen, draft.reasons = _choose_parameters(
        draft.graph, draft.plan, annotated, draft.settled.layouts, nodes, draft.captured.unmerged
    )  # fmt: skip


def shard(draft: Draft) -> None:
    """Propagate placements and write the graph of one rank, along one axis after the other."""
    graph, plan, captured = draft.graph, draft.plan, draft.captured
    values = {node.name: node.meta["val"] for node in placeholders(graph)}
    names = {i.node: i.name for i in captured.inputs}
    nodes = {i.name: i.node for i in captured.inputs}
    placements: dict[str, list[tuple[str, Placement]]] = {name: [] for name in nodes}
    even = captured.rows % plan.num_batch_parts == 0
    leaves = {i.name for i in captured.inputs if i.kind == "batch"} if even else set[str]()
    split = {name: Shard(dim) for name, dim in captured.row_dims.items() if name in leaves}
    draft.reduce_axes = {o.name: () for o in captured.outputs if o.kind == "gradient"}
    flops: dict[str, tuple[int, int]] = {}  # by axis that splits weights: before it does, and after
    for kind in axes_in_order():
        axis, size = kind.name, plan.mesh.axis_size(kind.name)
        if size == 1 or kind.has_stages:
            continue
        fixed, origin = draft.chosen[axis]
        if kind.cuts_rows:
            fixed |= {nodes[name]: placement for name, placement in split.items()}
            origin |= {nodes[name]: f"batch: {name}" for name in split}
        if kind.cuts_weights:
            _products_first(graph)
        before = step_flops(graph) if kind.cuts_weights or kind.cuts_sequence else 0
        cuts = _constrain(draft, graph, kind, fixed)
        wanted = tuple(
            fixed.get(nodes[o.name], REPLICATE) if o.kind == "gradient" else REPLICATE for o in captured.outputs
        )
        if kind.cuts_experts:
            mark_experts(graph, axis)
            _mark_stacks(graph, fixed, wanted)
        if kind.per_stage:
            rows = {nodes[name]: placement for name, placement in split.items()}
            laid_out = propagate_stage_parallelism(graph, size, fixed, rows, wanted, origin, axis)
        else:
            laid_out = propagate(graph, size, fixed | cuts, wanted, origin, _local_norm(plan, kind), axis, bool(cuts))
        for name in _summed(laid_out, captured.outputs):
            draft.reduce_axes[name] += (axis,)
        graph = partition(laid_out, axis, plan.context_kind)
        write_paddings(graph)
        if kind.cuts_sequence and cuts and before and draft.trains:
            draft.whole_sequences = tuple(whole_sequences(laid_out))
            _check_cut(draft, axis, laid_out, (1 - step_flops(graph) / before) / (1 - 1 / size))
        if kind.cuts_weights:
            flops[axis] = before, step_flops(graph)
        draft.without_rule |= laid_out.without_rule
        for node, placement in fixed.items():
            if not isinstance(placement, Replicate):
                placements[names[node]].append((axis, placement))
                draft.origins[names[node]] = origin.get(node, "")
    draft.graph = graph
    draft.layouts = {
        i.name: Layout(dtype_name(values[i.node].dtype), tuple(values[i.node].shape), tuple(placements[i.name]))
        for i in captured.inputs
        if isinstance(values[i.node], torch.Tensor)
    }
    parameters = {i.name: draft.layouts[i.name] for i in captured.inputs if i.kind == "parameter"}
    for axis, (before, after) in flops.items():
        draft.share = sharded_fraction(parameters, axis, plan.mesh.axis_size(axis), before, after, draft.reasons)


def _choose_parameters(
    graph: Graph,
    plan: Plan,
    annotated: Mapping[str, Mapping[str, Placement]],
    settled: Mapping[str, Layout] | None,
    nodes: Mapping[str, str],
    unmerged: str,
) -> tuple[dict[str, tuple[dict[str, Placement], dict[str, str]]], dict[str, str]]:
    """Placement of parameters along each axis, by node, and where it came from; and why others stay whole, by name.
    Auto sharding reads the captured graph, before any axis has changed it."""
    chosen = {}
    reasons: dict[str, str] = {}
    names = {node: name for name, node in nodes.items()}
    for axis, size in plan.mesh.axes:
        kind = axis_kind(axis)
        if kind.has_stages:
            continue
        if settled is not None:
            chosen[axis] = ({nodes[name]: layout.on(axis) for name, layout in settled.items()}, dict[str, str]())
            if kind.cuts_weights and size > 1:
                mark_gathered(gathered_of(graph, size, chosen[axis][0]), axis)
            continue
        fixed = {nodes[name]: on[axis] for name, on in annotated.items() if axis in on}
        origin = {nodes[name]: f"layouts: {name}" for name in annotated}
        if kind.cuts_weights and size > 1:
            if kind.per_stage:
                among = split_by_weights(graph)
                role = weights_role(plan.stages)
                found, why, gathered = auto_sharding(graph, size, fixed, role, among) if among else ({}, {}, set())
            else:
                found, why, gathered = auto_sharding(graph, size, fixed, axis)
            mark_gathered(gathered | (gathered_of(graph, size, fixed | found, list(fixed)) if fixed else set()), axis)
            reasons |= {names[node]: reason for node, reason in why.items() if node not in found}
            reasons |= {name: "layouts= says so" for name, on in annotated.items() if axis in on}
            origin |= {node: f"auto sharding: {names[node]}" for node in found}
            fixed |= found
        if kind.cuts_experts and size > 1:
            found = _experts(graph, axis, size, names, fixed, unmerged)
            origin |= {node: f"experts: {names[node]}" for node in found}
            fixed |= found
        chosen[axis] = (fixed, origin)
    return chosen, reasons


def _experts(
    graph: Graph, axis: str, size: int, names: Mapping[str, str], annotated: Collection[str], unmerged: str
) -> dict[str, Placement]:
    """The placements of the weights of experts along an axis, by node. Raises PlanError if there are none, or if the
    axis does not divide them."""
    found = {node: num for node, num in expert_weights(graph).items() if node not in annotated}
    own = {node: where for node, where in expert_parameters(graph).items() if node not in annotated}
    for node, num in [*found.items(), *((node, num) for node, (_, num) in own.items())]:
        if refusal := uneven_experts(axis, size, names[node], num):
            raise PlanError(refusal)
    if not found and not own and not annotated:
        refusal = no_experts(axis, size, unmerged)
        raise PlanError(refusal)
    placements: dict[str, Placement] = {node: Shard(0) for node in found}
    return placements | {node: owner_of(number, num, size) for node, (number, num) in own.items()}


def _mark_stacks(graph: Graph, fixed: Mapping[str, Placement], wanted: Sequence[Placement]) -> None:
    """Write the stacks of parameters that are on one rank each, and their gradients, as calls that have a strategy for
    that. Changes the graph. `wanted` are the placements of its outputs."""
    for node in graph.nodes:
        if is_stack(node) and all(isinstance(fixed.get(uncast(each).name), Only) for each in tensor_inputs(node)):
            node.target, node.args, node.kwargs = stack_experts, node.args[:1], {}
    (results,) = output_node(graph).args
    waiting = [result for result, placement in zip(results, wanted, strict=True) if isinstance(placement, Only)]  # type: ignore[arg-type]
    for node in waiting:
        if not isinstance(node, Node):
            continue
        if node.target is aten.select.int and node.args[1] == 0:
            node.target, node.args = expert_of, (node.args[0], node.args[2])
        elif node.target is aten.add.Tensor or len(node.all_input_nodes) == 1:  # a cast, or a sum
            waiting += tensor_inputs(node)


def _summed(laid_out: Propagation, outputs: Sequence[Output]) -> list[str]:
    """The parameters whose gradient is a sum of terms of the ranks along the axis."""
    (results,) = output_node(laid_out.graph).args
    return [
        output.name
        for output, result in zip(outputs, results, strict=True)  # type: ignore[arg-type]
        if output.kind == "gradient" and isinstance(result, Node) and isinstance(laid_out.placement(result), Partial)
    ]


def _products_first(graph: Graph) -> None:
    """Let sums of gradients add products with weights first, so that these terms are summed over ranks at once, as of
    what queries, keys, values and a residual stream read. Changes the graph."""
    for node in reversed(list(graph.nodes)):
        if not _is_sum(node) or any(_is_sum(user) and len(node.users) == 1 for user in node.users):
            continue
        sums, terms = [node], list[Node]()
        for each in sums:
            for term in reversed(tensor_inputs(each)):
                (sums if _is_sum(term) and len(term.users) == 1 else terms).append(term)
        if len(sums) < 2 or len(terms) != len(sums) + 1:
            continue
        products = [term for term in reversed(terms) if op_spec_of(_without_views(term)).weighted]
        rest = [term for term in reversed(terms) if term not in products]
        if len(products) < 2 or not rest:
            continue
        total, *others = *products, *rest
        for each, term in zip(reversed(sums), others, strict=True):
            each.args = (total, term)
            if each is not node:
                node.prepend(each)
            total = each


def _is_sum(node: Node) -> bool:
    """Whether the node adds two gradients of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or not is_backward(node) or len(tensor_inputs(node)) != 2:
        return False
    forms = {(each.meta["val"].shape, each.meta["val"].dtype) for each in (node, *tensor_inputs(node))}
    return len(forms) == 1 and node.args[0] is not node.args[1]


def _without_views(node: Node) -> Node:
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _constrain(draft: Draft, graph: Graph, kind: AxisKind, parameters: Mapping[str, Placement]) -> dict[str, Placement]:
    """Constrain values to parts of the sequence along an axis that cuts it. Changes the graph.

    Returns the placements of these values, by the names of the calls that constrain them; none along other axes.
    """
    plan, captured = draft.plan, draft.captured
    size = plan.mesh.axis_size(kind.name)
    nodes = {i.name: i.node for i in captured.inputs}
    dims = {nodes[name]: dim for name, dim in captured.sequence_dims.items()}
    if kind.cuts_weights and plan.sequence == "yes":
        return constrain_sums(graph, dims, size, parameters, kind.name)
    if not kind.cuts_sequence:
        return {}
    calls = attention_calls(graph)
    if refusal := uncut_attention(plan, kind.name, size, [divides_heads(call, size) for call in calls]):
        raise PlanError(refusal)
    join_paddings(graph)
    keep_last_positions(graph, size)
    blocks = _blocks(calls, plan, size)
    cuts = constrain_sequence(graph, dims, size, blocks)
    if not cuts and draft.trains:
        refusal = no_sequence(kind.name, size, sequence_lengths(captured), blocks or 1)
        raise PlanError(refusal)
    names = {i.node: i.name for i in captured.inputs}
    for leaf, what in what_is_cut(graph, cuts).items():
        draft.origins[names[leaf]] = f"{what} over {kind.name}"
    return cuts


def _check_cut(draft: Draft, axis: str, laid_out: Propagation, share: float) -> None:
    """Raise PlanError if an axis that cuts the sequence splits too small a `share` of the step's floating-point
    operations, or no attention in the way that the plan asks for."""
    plan, size, lengths = draft.plan, laid_out.size, sequence_lengths(draft.captured)
    if plan.context_kind != "auto" and (whole := whole_attention(laid_out)):
        refusal = unsplit_attention(plan, axis, size, whole)
        raise PlanError(refusal)
    if little := little_of_the_step(axis, size, share, draft.whole_sequences, draft.captured.sequence_dims):
        uneven = share < _NOTHING and all(length % size for length in lengths.values())
        refusal = no_sequence(axis, size, lengths) if uneven else little
        raise PlanError(refusal)


def sequence_lengths(captured: Captured) -> dict[str, int]:
    """The length of the sequence of each tensor of the batch that has one."""
    values = {node.name: node.meta["val"] for node in placeholders(captured.graph)}
    shapes = {i.name: values[i.node].shape for i in captured.inputs if i.name in captured.sequence_dims}
    return {name: shapes[name][dim] for name, dim in captured.sequence_dims.items()}


def _blocks(calls: Sequence[Call], plan: Plan, size: int) -> int | None:
    """The blocks of the sequence that an axis cuts; None if each rank has every n-th position."""
    if needs_stripes(calls, size, plan.context_kind):
        return None
    cut = [plan.mesh.axis_size(kind.name) for kind in axes_in_order() if kind.cuts_weights]
    return math.prod(cut) if plan.sequence == "yes" else 1


def _local_norm(plan: Plan, kind: AxisKind) -> bool:
    return kind.cuts_rows and plan.batchnorm == "local"
