"""The order of everything: the passes that turn a captured step into the program of a plan's ranks. Start reading here.

    captured step -> sharded over the mesh -> split into the cells of a pipeline -> the sharding plan of its parameters
                  -> parameters gathered for their use -> gradients reduce-scattered -> repeated over microbatches

A pass is a function that changes a Draft (compile/compiled.py). It names the facts that it requires and provides.
A backend has a list of passes of its own, such as EAGER_PASSES of backends/eager/passes.py.
"""

from __future__ import annotations

from dataclasses import replace

from plait.compile.capture.captured import Captured
from plait.compile.compiled import NOTHING_SETTLED, Compiled, Draft, Settled
from plait.compile.ir.calls import copy_graph, device_type, placeholders
from plait.compile.ir.node_info import set_info
from plait.compile.ir.rewriting import collection_paused
from plait.compile.pass_base import Pass, Watcher, run_passes
from plait.compile.passes.accumulation import accumulation_graphs, narrow_dtypes, own_gradients
from plait.compile.passes.find_experts import find_experts
from plait.compile.passes.group_experts import group_experts
from plait.compile.passes.recomputation import recompute, widen_again
from plait.compile.passes.roll_loops import loops_left, roll_loops
from plait.compile.passes.zero import gather_parameters, join_sums, scatter_gradients, sum_last
from plait.compile.rank_program import RankProgram, StepGraph, cell_name
from plait.compile.shard import assign_roles, check_batch, choose_layouts, sequence_lengths, shard
from plait.compile.sharding.auto_sharding import mark_auxiliary
from plait.compile.sharding.flat_shards import cuts_of
from plait.compile.sharding.formats import keep_formats, note_formats
from plait.compile.stages.split import cut_in_stages, split_in_cells
from plait.plan.annotation import Annotations
from plait.plan.axes import axis_kind, stage_axis
from plait.plan.plan import Plan
from plait.plan.sharding_plan import Gather, sharding_plan
from plait.spec.cluster import Cluster
from plait.spec.cluster_file import cluster_of_device


def _name_inputs(draft: Draft) -> None:
    graph = copy_graph(draft.captured.graph)
    inputs = {i.node: i for i in draft.captured.inputs}
    for node in placeholders(graph):
        set_info(node, kind=inputs[node.name].kind, name=inputs[node.name].name)
    draft.graph = graph


def _note_formats(draft: Draft) -> None:
    draft.graph = note_formats(draft.graph, draft.plan.num_processes > 1)


def _mark_auxiliary(draft: Draft) -> None:
    mark_auxiliary(draft.graph, draft.captured)


def _own_gradients(draft: Draft) -> None:
    gradients = [i for i, output in enumerate(draft.captured.outputs) if output.kind == "gradient"]
    draft.graph = own_gradients(draft.graph, gradients)


def _group_experts(draft: Draft) -> None:
    draft.graph = group_experts(draft.graph, draft.plan.expert_capacity or 0.0, draft.plan.fixed_rows)


def _roll_loops(draft: Draft) -> None:
    lengths = sequence_lengths(draft.captured).values()
    draft.graph = roll_loops(draft.graph, lengths)
    if any(axis_kind(axis).cuts_sequence for axis, size in draft.plan.mesh.axes if size > 1):
        draft.whole_loops = loops_left(draft.graph, lengths)


def _join_sums(draft: Draft) -> None:
    draft.graph = join_sums(draft.graph, draft.plan.mesh.joined)


def _find_experts(draft: Draft) -> None:
    draft.graph = find_experts(draft.graph)


def _cuts_values(draft: Draft) -> bool:
    """Whether ranks have parts of values, and not only stages of their own."""
    return any(not axis_kind(axis).has_stages for axis, size in draft.plan.mesh.axes if size > 1)


def _sum_last(draft: Draft) -> None:
    gradients = [i for i, output in enumerate(draft.captured.outputs) if output.kind == "gradient"]
    draft.graph = sum_last(draft.graph, gradients)


def _keep_formats(draft: Draft) -> None:
    draft.graph = keep_formats(draft.graph)


def _assign_stages(draft: Draft) -> None:
    _, draft.begins = cut_in_stages(
        draft.graph, draft.captured, draft.plan, draft.cluster, draft.settled.stages, draft.begins
    )


def _recompute(draft: Draft) -> None:
    draft.graph = recompute(draft.graph, draft.plan.recompute, draft.cluster.device)


def _widen_again(draft: Draft) -> None:
    draft.graph = widen_again(draft.graph)


def _split_in_cells(draft: Draft) -> None:
    found = draft.pipeline = split_in_cells(draft.graph, draft.captured, draft.plan, draft.settled.stages)
    draft.layouts |= {name: found.placed(name, draft.layouts[name]) for name in found.stages}
    draft.reduce_axes |= {
        name: (*axes, stage_axis()) for name, axes in draft.reduce_axes.items() if len(found.ranks_of(name)) > 1
    }
    draft.parts = {
        cell_name(cell): StepGraph(each.graph, each.outputs, found.num_micro(cell), cell)
        for cell, each in found.cells.graphs.items()
    }


def _plan_sharding(draft: Draft) -> None:
    captured = draft.captured
    frozen = captured.frozen if draft.settled.frozen is None else draft.settled.frozen
    parameters = {i.name: draft.layouts[i.name] for i in captured.inputs if i.kind == "parameter"}
    device = device_type(captured.graph)
    draft.sharding = sharding_plan(draft.plan, parameters, frozen=frozen, reduce_axes=draft.reduce_axes, device=device)
    draft.cuts = cuts_of(draft.sharding)


def _narrow_parameters(draft: Draft) -> None:
    graphs, parameters = [part.graph for part in draft.parts.values()], draft.sharding.parameters
    # A part that is gathered for each use is cast before it is gathered.
    names = [name for name in draft.cuts if parameters[name].gather is not Gather.USE]
    draft.sharding = draft.sharding.read_as(narrow_dtypes(graphs, names))


def _gather_parameters(draft: Draft) -> None:
    for part in draft.parts.values():
        part.graph = gather_parameters(part.graph, draft.cuts, _cut_axes(draft))


def _scatter_gradients(draft: Draft) -> None:
    cuts, axes = draft.cuts, _cut_axes(draft)
    for part in draft.parts.values():
        kept = {i: (cuts[name], axes[name]) for i, name in part.gradients.items() if name in cuts}
        part.graph = scatter_gradients(part.graph, kept)


def _cut_axes(draft: Draft) -> dict[str, str]:
    return {name: each.cut_axis for name, each in draft.sharding.parameters.items()}


def _accumulate(draft: Draft) -> None:
    parts = {}
    for name, part in draft.parts.items():
        for place, graph in accumulation_graphs(part, draft.sharding.sums_each_microbatch).items():
            parts[f"{name}.{place}" if name else place] = replace(part, graph=graph, accumulation=place)
    draft.parts = parts


def _is_piped(draft: Draft) -> bool:
    return len(draft.plan.copies) > 1


def _gathers_for_use(draft: Draft) -> bool:
    return bool(draft.sharding.gathered(Gather.USE))


PASSES = (
    Pass("name-inputs", "copies the captured graph and names its inputs", _name_inputs, provides=["named inputs"]),
    Pass("note-formats", "records the memory formats that kernels rely on", _note_formats, ["named inputs"],
         ["formats"]),
    Pass("mark-auxiliary", "marks calls that no loss depends on", _mark_auxiliary, ["named inputs"],
         ["auxiliary calls"]),
    Pass("own-gradients", "gives gradients memory of their own", _own_gradients, ["formats"], ["own gradients"]),
    Pass("check-batch", "checks that the plan divides the batch", check_batch, provides=["even batch"]),
    Pass("assign-roles", "finds the stages that split weights and the stages that split the batch", assign_roles,
         ["own gradients", "even batch"], when=lambda draft: bool(draft.plan.stages)),
    Pass("roll-loops", "writes loops over positions as calls for all positions", _roll_loops,
         ["own gradients", "auxiliary calls"]),
    Pass("find-experts", "finds products with the weights of experts, whatever order their rows are in", _find_experts,
         ["own gradients", "auxiliary calls"], ["experts"], when=_cuts_values),
    Pass("choose-layouts", "chooses which parameters are sharded over each axis", choose_layouts,
         ["own gradients", "auxiliary calls", "experts"], ["choices"]),
    Pass("shard", "propagates placements and writes the graph of one rank", shard,
         ["choices", "even batch"], ["local graph", "layouts"]),
    Pass("group-experts", "sorts rows by expert, and sends them to the ranks that have their experts", _group_experts,
         ["local graph"]),
    Pass("join-sums", "sums gradients over axes that are joined at once", _join_sums, ["local graph"],
         when=lambda draft: bool(draft.plan.mesh.joined)),
    Pass("sum-last", "casts gradients before they are summed over ranks", _sum_last, ["local graph"]),
    Pass("keep-formats", "converts inputs of kernels to the formats they rely on", _keep_formats,
         ["local graph", "formats"]),
    Pass("assign-stages", "assigns a stage of the pipeline to every call", _assign_stages,
         ["local graph"], ["stages"], when=_is_piped),
    Pass("recompute", "recomputes activations in backward", _recompute, ["local graph", "stages"],
         when=lambda draft: draft.plan.recompute.kind != "none"),
    Pass("widen-again", "keeps values in half precision that backward reads in a wider one", _widen_again,
         ["local graph", "stages"]),
    Pass("split-in-cells", "splits the step into the forward and backward of each stage", _split_in_cells,
         ["stages"], ["cells"], when=_is_piped),
    Pass("plan-sharding", "decides how ranks hold each parameter, its gradient and its state", _plan_sharding,
         ["layouts", "cells"], ["sharding plan"]),
    Pass("narrow-parameters", "narrows parameters to the dtype in which they are used", _narrow_parameters,
         ["sharding plan"]),
    Pass("gather-parameters", "gathers parameters before their use", _gather_parameters, ["sharding plan"],
         when=_gathers_for_use),
    Pass("scatter-gradients", "reduce-scatters gradients of which a rank keeps a part", _scatter_gradients,
         ["sharding plan", "cells"], ["scattered gradients"], when=lambda draft: bool(draft.sharding.axis)),
    Pass("accumulate", "writes the graphs of the first, middle and last microbatches", _accumulate,
         ["sharding plan", "cells", "scattered gradients"]),
)  # fmt: skip


@collection_paused()
def compile(
    captured: Captured,
    plan: Plan,
    annotations: Annotations | None = None,
    settled: Settled = NOTHING_SETTLED,
    watcher: Watcher | None = None,
    cluster: Cluster | None = None,
) -> Compiled:
    """Turn a captured step into the program that the ranks of a plan run.

    Args:
        annotations: layouts of parameters by name pattern, as `Trainer(layouts=)` takes them.
        settled: decisions of an earlier batch of the same model, which are kept.
        watcher: sees every pass as it runs.
        cluster: where the step runs, for the time of calls and of what is sent; by default one of devices of the type
            that the step was captured for.

    Raises:
        PlanError: the plan does not fit the step; for example, an axis does not divide what it must split.
        LayoutError: an annotation is wrong.
    """
    whole = StepGraph(captured.graph, tuple(captured.outputs), frozenset({plan.micro}))
    cluster = cluster or cluster_of_device(device_type(captured.graph), "", plan.num_processes)
    draft = Draft(captured, plan, annotations or {}, settled, {"": whole}, cluster)
    run_passes(PASSES, draft, watcher)
    layouts = draft.layouts | {name: each.compute for name, each in draft.sharding.parameters.items()}
    program = RankProgram(draft.parts, captured, plan, layouts, draft.sharding, draft.cuts, cluster, draft.pipeline)
    return Compiled(
        program, draft.origins, frozenset(draft.without_rule), draft.share, draft.whole_sequences, draft.whole_loops
    )
