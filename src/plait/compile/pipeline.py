"""The order of everything: the passes that turn a captured step into the graphs that ranks run. Start reading here.

    captured step -> sharded over the mesh -> cut into the cells of a pipeline -> repeated over microbatches
                  -> its collectives placed in time, in buckets -> its tensors fetched from and sent to their homes

A pass is a function that changes a Draft (compile/draft.py). It says which facts it requires and which it provides.
"""

from __future__ import annotations

from plait.compile.capture.capture import Captured
from plait.compile.draft import Draft, Pass, Watcher
from plait.compile.ir.calls import copy_graph, placeholders
from plait.compile.ir.gc_paused import collection_paused
from plait.compile.ir.node_info import set_info
from plait.compile.lowered import NOTHING_SETTLED, Lowered, Settled, cell_name
from plait.compile.passes import offload
from plait.compile.passes.accumulation import StepGraph, add_parts, by_turn, gradients_of, narrowed
from plait.compile.passes.aside import mark_aside
from plait.compile.passes.bucket import bucket_gradients, overlap
from plait.compile.passes.fetch import fetch_parameters, fetch_sums, leave_early
from plait.compile.passes.gather import gather_parameters
from plait.compile.passes.inplace import reuse_dead_operands
from plait.compile.passes.owning import own_gradients
from plait.compile.passes.recomputation import recompute
from plait.compile.passes.stash import stash_activations
from plait.compile.shard import assign_roles, check_batch, choose_layouts, shard
from plait.compile.sharding.formats import keep_formats, note_formats
from plait.compile.stages.split import cut_in_stages, split_in_cells
from plait.plan.annotation import Annotations
from plait.plan.legality import activations_away, gradients_away, parameters_away
from plait.plan.plan import Plan


def _name_inputs(draft: Draft) -> None:
    graph = copy_graph(draft.captured.graph.graph)
    inputs = {i.node: i for i in draft.captured.inputs}
    for node in placeholders(graph):
        set_info(node, kind=inputs[node.name].kind, name=inputs[node.name].name)
    draft.graph = graph


def _note_formats(draft: Draft) -> None:
    draft.graph = note_formats(draft.graph, draft.plan.num_processes > 1)


def _mark_aside(draft: Draft) -> None:
    mark_aside(draft.graph, draft.captured)


def _own_gradients(draft: Draft) -> None:
    gradients = [i for i, output in enumerate(draft.captured.outputs) if output.kind == "gradient"]
    draft.graph = own_gradients(draft.graph, gradients)


def _keep_formats(draft: Draft) -> None:
    draft.graph = keep_formats(draft.graph)


def _assign_stages(draft: Draft) -> None:
    _, draft.begins = cut_in_stages(draft.graph, draft.captured, draft.plan, draft.settled.stages, draft.begins)


def _recompute(draft: Draft) -> None:
    draft.graph = recompute(draft.graph, draft.plan.recompute)


def _split_in_cells(draft: Draft) -> None:
    found = draft.pipeline = split_in_cells(draft.graph, draft.captured, draft.plan, draft.settled.stages)
    draft.layouts |= {name: found.placed(name, draft.layouts[name]) for name in found.stages}
    draft.parts = {
        cell_name(cell): StepGraph(each.graph, each.outputs, found.num_micro(cell))
        for cell, each in found.cells.graphs.items()
    }


def _lay_out_states(draft: Draft) -> None:
    frozen = draft.captured.frozen if draft.settled.frozen is None else draft.settled.frozen
    parameters = {i.name: draft.layouts[i.name] for i in draft.captured.inputs if i.kind == "parameter"}
    draft.states = draft.plan.sharding.state_layouts(parameters, frozen)


def _narrow_parameters(draft: Draft) -> None:
    graphs = [part.graph for part in draft.parts.values()]
    draft.dtypes = narrowed(graphs, draft.plan, draft.layouts, draft.states)


def _stash_activations(draft: Draft) -> None:
    for part in draft.parts.values():
        part.graph = stash_activations(part.graph, draft.plan.bucket_bytes)


def _gather_parameters(draft: Draft) -> None:
    cuts = draft.cuts
    for part in draft.parts.values():
        part.graph = gather_parameters(part.graph, cuts, draft.plan.sharding.axis, draft.plan.bucket_bytes)


def _accumulate(draft: Draft) -> None:
    parts = {}
    for name, part in draft.parts.items():
        for turn, graph in by_turn(part, draft.plan.sharding.sums_each_microbatch).items():
            parts[f"{name}.{turn}" if name else turn] = StepGraph(graph, part.outputs, part.num_micro, turn)
    draft.parts = parts


def _bucket_gradients(draft: Draft) -> None:
    cuts = draft.cuts
    for part in draft.parts.values():
        gradients = gradients_of(part)
        handed_on = [i for i, output in enumerate(part.outputs) if output.kind == "value"]
        sums = part.turn not in ("first", "middle")
        kept = {i: cuts[name] for i, name in gradients.items() if sums and name in cuts}
        part.graph = bucket_gradients(
            part.graph, draft.plan.bucket_bytes, kept, gradients.keys(), over=draft.plan.sharding.axis, but=handed_on
        )


def _add_parts(draft: Draft) -> None:
    for part in draft.parts.values():
        if part.turn == "more":
            part.graph = add_parts(part.graph, gradients_of(part))


def _overlap(draft: Draft) -> None:
    for part in draft.parts.values():
        part.graph = overlap(part.graph)


def _reuse_operands(draft: Draft) -> None:
    for part in draft.parts.values():
        part.graph = reuse_dead_operands(part.graph)


def _fetch_parameters(draft: Draft) -> None:
    large = offload.large(draft.states)
    for part in draft.parts.values():
        part.graph = fetch_parameters(part.graph, large, draft.plan.bucket_bytes)


def _send_gradients(draft: Draft) -> None:
    staying = draft.pipeline.added_up if draft.pipeline is not None else frozenset()
    large = offload.large(draft.states).difference(staying)
    for part in draft.parts.values():
        kind = "sum" if part.turn in ("first", "middle") else "gradient"
        part.graph = leave_early(part.graph, kind, gradients_of(part), large)
        given = "gradient" if part.turn == "more" else "sum"
        part.graph = fetch_sums(part.graph, given, large, draft.plan.bucket_bytes)


def _is_piped(draft: Draft) -> bool:
    return len(draft.plan.copies) > 1


def _cuts_parameters(draft: Draft) -> bool:
    return draft.plan.sharding.cuts_parameters


PASSES = (
    Pass("name-inputs", "copies the captured graph and names its inputs", _name_inputs, provides=["named inputs"]),
    Pass("note-formats", "notes the memory formats that kernels rely on", _note_formats, ["named inputs"], ["formats"]),
    Pass("mark-aside", "marks what neither loss nor gradients need", _mark_aside, ["named inputs"], ["asides"]),
    Pass("own-gradients", "gives gradients memory of their own", _own_gradients, ["formats"], ["own gradients"]),
    Pass("check-batch", "checks that the plan divides the batch", check_batch, provides=["even batch"]),
    Pass("assign-roles", "finds the stages that split weights and those that split the batch", assign_roles,
         ["own gradients", "even batch"], when=lambda draft: bool(draft.plan.stages)),
    Pass("choose-layouts", "chooses which parameters are split along each axis", choose_layouts,
         ["own gradients", "asides"], ["choices"]),
    Pass("shard", "propagates placements and writes the graph of one rank", shard,
         ["choices", "even batch"], ["local graph", "layouts"]),
    Pass("keep-formats", "brings inputs of kernels into the formats they rely on", _keep_formats,
         ["local graph", "formats"]),
    Pass("assign-stages", "gives every call its stage of the pipeline", _assign_stages,
         ["local graph"], ["stages"], when=_is_piped),
    Pass("recompute", "works activations out again in backward", _recompute, ["local graph", "stages"],
         when=lambda draft: draft.plan.recompute.kind != "none"),
    Pass("split-in-cells", "splits the step into forward and backward of each stage", _split_in_cells,
         ["stages"], ["cells"], when=_is_piped),
    Pass("lay-out-states", "splits what the optimizer holds over data", _lay_out_states, ["layouts", "cells"],
         ["state layouts"]),
    Pass("narrow-parameters", "reads parameters in the dtype in which they are used", _narrow_parameters,
         ["state layouts"]),
    Pass("stash-activations", "sends activations away until backward reads them", _stash_activations,
         ["local graph"], when=lambda d: activations_away(d.plan, d.device) and not _is_piped(d)),
    Pass("gather-parameters", "gathers parameters before their use", _gather_parameters, ["state layouts"],
         when=_cuts_parameters),
    Pass("accumulate", "makes the graphs of the first, middle and last microbatches", _accumulate,
         ["state layouts", "cells"], ["turns"]),
    Pass("bucket-gradients", "sums gradients in buckets while backward runs", _bucket_gradients, ["turns"],
         ["buckets"]),
    Pass("add-parts", "adds the parts of gradients that a rank keeps to those of earlier microbatches", _add_parts,
         ["buckets"]),
    Pass("overlap", "starts collectives early and waits for them late", _overlap, ["buckets"]),
    Pass("reuse-operands", "adds in place where nobody reads the operand again", _reuse_operands, ["turns"]),
    Pass("fetch-parameters", "fetches parameters from their home before their use", _fetch_parameters, ["turns"],
         when=lambda draft: parameters_away(draft.plan, draft.device)),
    Pass("send-gradients", "sends gradients to their home as they are made", _send_gradients, ["buckets"],
         when=lambda draft: gradients_away(draft.plan, draft.device)),
)  # fmt: skip


@collection_paused()
def lower(
    captured: Captured,
    plan: Plan,
    annotations: Annotations | None = None,
    settled: Settled = NOTHING_SETTLED,
    watcher: Watcher | None = None,
) -> Lowered:
    """Turn a captured step into the graphs that the ranks of a plan run.

    What is `settled` is kept as an earlier capture of the same model decided it; `watcher` sees every pass. Raises
    PlanError where an axis does not divide what it must split, LayoutError for a bad annotation.
    """
    whole = StepGraph(captured.graph.graph, tuple(captured.outputs), frozenset({plan.micro}))
    draft = Draft(captured, plan, annotations or {}, settled, {"": whole})
    for each in PASSES:
        if each.when(draft):
            if watcher is None:
                each.run(draft)
            else:
                watcher.run(each, draft)
    return Lowered(
        graphs={name: part.graph for name, part in draft.parts.items()},
        captured=captured,
        plan=plan,
        layouts=draft.layouts,
        states=draft.states,
        dtypes=draft.dtypes,
        origins=draft.origins,
        without_rule=frozenset(draft.without_rule),
        batch_size=captured.rows,
        pipeline=draft.pipeline,
        share=draft.share,
    )
