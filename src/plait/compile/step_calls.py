"""Describes a rank program without graphs: a StepProgram (cost/step_program.py), which the simulator of cost/ runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import (
    is_item,
    is_tensor,
    is_view,
    num_bytes,
    op_spec_of,
    output_node,
    output_values,
    tensor_inputs,
)
from plait.compile.ir.dtypes import dtype_named, torch_name
from plait.compile.ir.estimate import carried_out, flops_of, is_attention
from plait.compile.ir.node_info import info_of, phase_of
from plait.compile.ops import CollectiveKind, Communication
from plait.compile.rank_program import RankProgram, runs_on
from plait.compile.stages.stage_graphs import edges_of
from plait.compile.step_collectives import Collective, sent_by
from plait.cost.step_program import (
    AxisCollective,
    CollectiveCall,
    CopyCall,
    OpCall,
    PipelineCalls,
    ProgramCall,
    StepProgram,
)
from plait.plan.axes import stage_axis
from plait.plan.sharding_plan import DEVICE, Gather, ShardingPlan
from plait.schedule.buckets import bucket_limit, split_buckets
from plait.schedule.readiness import RankAction
from plait.spec.schedule import BACKWARD, SEND, WEIGHT, Action

_KINDS = {kind.title: kind for kind in CollectiveKind}


def step_program(
    program: RankProgram,
    graphs: Mapping[str, Graph],
    rows: int,
    tokens: int,
    updates: tuple[tuple[ProgramCall, ...], ...] = ((),),
    batch_bytes: int = 0,
) -> StepProgram:
    """Describe a step.

    Args:
        program: the program of the plan's ranks.
        graphs: the graphs that a backend runs for it, by their names in the program.
        rows: rows of the global batch.
        tokens: tokens of the global batch.
        updates: the calls of the optimizer's update for each place along the pipeline.
        batch_bytes: bytes of the batch that a rank reads.
    """
    mesh, captured = program.plan.mesh, program.captured
    flops: Counter[str] = Counter()
    for node in captured.graph.nodes:
        if node.op == "call_function" and (more := flops_of(node)):
            flops[torch_name(tensor_inputs(node)[0].meta["val"].dtype)] += more
    micro = program.plan.micro if program.pipeline is None else program.pipeline.schedule.num_micro
    return StepProgram(
        mesh,
        {name: tuple(calls_of(graph, program)) for name, graph in graphs.items()},
        program.micro_graphs if program.pipeline is None else (),
        updates,
        None if program.pipeline is None else _pipeline_calls(program),
        rows,
        tokens,
        float(flops.total() * micro),
        max(flops, key=lambda dtype: flops[dtype], default="float32"),
        batch_bytes,
    )


def calls_of(graph: Graph, program: RankProgram) -> Iterator[ProgramCall]:
    """The calls of a graph, in order. Of a graph with parallel branches, those of the rank that has most."""
    mesh, sharding = program.plan.mesh, program.sharding
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.communicators}
    here = _busiest(graph, program)
    place: dict[Node, int] = {}
    index = 0
    for node in graph.nodes:
        if node.op != "call_function" or not runs_on(node, here):
            continue
        found = _call(node, sizes, sharding, place)
        place[node] = index
        index += 1
        yield found


def signature_of(node: Node) -> str:
    """A call as text: the op, and of its arguments shapes, dtypes and values."""
    target = node.target
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    args = [_text(arg) for arg in node.args] + [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(args)})"


def call_bytes(node: Node) -> int:
    """Bytes that a call reads and writes; 0 for a view."""
    if is_view(node) or is_item(node):
        return 0
    if (puts := op_spec_of(node).puts) is not None:
        source = node.args[puts]
        return 2 * num_bytes(source.meta["val"]) if isinstance(source, Node) else 0
    moved = sum(num_bytes(each.meta["val"]) for each in tensor_inputs(node))
    return moved + sum(num_bytes(value) for value in output_values(node) if isinstance(value, torch.Tensor))


def gathers_after_update(program: RankProgram, here: Mapping[str, int]) -> list[CollectiveCall]:
    """The calls by which the rank at `here` gathers the parts that an update has changed, one bucket ahead."""
    sharding, mesh = program.sharding, program.plan.mesh
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sharding.gathered(Gather.UPDATE):
        each = sharding.parameters[name]
        if each.state.lies_at(dict(here)):
            alike[each.compute.dtype, each.cut_axis].append(name)
    starts = []
    for (dtype, axis), names in alike.items():
        width = dtype_named(dtype).itemsize
        sizes = [math.prod(sharding.parameters[n].compute.local_shape(mesh, dict(here))) * width for n in names]
        limit = bucket_limit(sum(sizes), program.plan.bucket_bytes)
        for members in split_buckets(sizes, limit, limit):
            held = sum(math.prod(program.cuts[names[i]].part_shape(0)) for i in members) * width
            starts.append((AxisCollective(CollectiveKind.ALL_GATHER, axis, held), len(members)))
    found: list[CollectiveCall] = []
    open_: list[int] = []
    for sent, num in starts:
        signature = f"gather_start({sent.axis}, {sent.held} bytes of {num})"
        found.append(CollectiveCall(signature, "update", (sent,), "start", stream=sent.axis, what=f"{num} parameters",
                                    copied=(2.0 * sent.held, 0.0)))  # fmt: skip
        open_.append(len(found) - 1)
        if len(open_) > 1:
            found.append(_wait_of(found, open_.pop(0), mesh.axis_size(sent.axis)))
    for begun in open_:
        found.append(_wait_of(found, begun, mesh.axis_size(found[begun].transfers[0].axis)))
    return found


def _wait_of(calls: list[CollectiveCall], begun: int, size: int) -> CollectiveCall:
    start = calls[begun]
    whole = 2.0 * start.transfers[0].held * size
    return replace(
        start, signature=start.signature.replace("start", "wait"), part="wait", begun=begun, copied=(0.0, whole)
    )


def _call(node: Node, sizes: Mapping[str, int], sharding: ShardingPlan, place: Mapping[Node, int]) -> ProgramCall:
    row, phase = op_spec_of(node), phase_of(node)
    if row.communicates is not None:
        return _collective(node, row.communicates, sizes, place, phase)
    if row.transfers:
        return _copy(node, sharding, place, phase)
    if is_view(node) or is_item(node):
        return OpCall(signature_of(node), phase, module=info_of(node).module)
    inputs = tensor_inputs(node)
    dtype = torch_name(inputs[0].meta["val"].dtype) if inputs else "float32"
    moved = float(call_bytes(node))
    module = info_of(node).module
    return OpCall(signature_of(node), phase, carried_out(node), moved, dtype, module, is_attention(node))


def _collective(
    node: Node, does: Communication, sizes: Mapping[str, int], place: Mapping[Node, int], phase: str
) -> CollectiveCall:
    begun = -1
    source = node
    if does.part == "wait":
        source = next(each for each in node.all_input_nodes if each in place and _begins(each))
        begun = place[source]
        found = op_spec_of(source).communicates
        assert found is not None
        does_of = found
    else:
        does_of = does
    sent = sent_by(source, does_of, sizes)
    transfers = tuple(_transfer(one, sizes) for one in sent)
    # Reduce-scatters of gradients have a channel of their own (comm/protocol.py).
    stream = transfers[0].axis + (" reductions" if does_of.counted and _reduces(does_of.kind) else "")
    what = info_of(source).what or info_of(source).source
    copied = _copied(transfers[0], sizes[transfers[0].axis], does.part, does_of.counted)
    return CollectiveCall(signature_of(node), phase, transfers, does.part, begun, stream, what, copied)


def _copied(sent: AxisCollective, size: int, part: str, joined: bool) -> tuple[float, float]:
    """Bytes that a rank reads and writes around a collective, to have the parts of ranks one after the other.

    A bucket is laid out by calls of its own, and its sums are views of it. What is all-reduced lies as it is.
    """
    whole = 2.0 * sent.kind.whole_bytes(sent.held, size)
    before = {CollectiveKind.REDUCE_SCATTER: whole, CollectiveKind.ALL_TO_ALL: whole}.get(sent.kind, 0.0)
    after = {CollectiveKind.ALL_GATHER: whole, CollectiveKind.ALL_TO_ALL: whole}.get(sent.kind, 0.0)
    if joined:
        before = 2.0 * sent.held if sent.kind is CollectiveKind.ALL_GATHER else 0.0
    return before if part != "wait" else 0.0, after if part != "start" else 0.0


def _reduces(kind: CollectiveKind) -> bool:
    return kind is CollectiveKind.REDUCE_SCATTER


def _begins(node: Node) -> bool:
    does = op_spec_of(node).communicates
    return does is not None and does.part == "start"


def _transfer(one: Collective, sizes: Mapping[str, int]) -> AxisCollective:
    return AxisCollective(_KINDS[one.kind], one.axis, one.tensor_bytes)


def _copy(node: Node, sharding: ShardingPlan, place: Mapping[Node, int], phase: str) -> CopyCall:
    """A call that begins a copy from or to a home, or waits for one (backends/eager/rewrites/offload_rewrites.py)."""
    starts = [each for each in node.all_input_nodes if each in place and op_spec_of(each).transfers]
    tensors = tensor_inputs(node)
    fetched = [
        value
        for user in node.users
        for value in output_values(user)
        if op_spec_of(user).transfers and isinstance(value, torch.Tensor)
    ]
    values = [value for value in output_values(node) if isinstance(value, torch.Tensor)]
    if values and starts:  # the arrival of a fetch
        return CopyCall(signature_of(node), phase, sum(map(num_bytes, values)), "wait", place[starts[0]])
    moved = sum(num_bytes(each.meta["val"]) for each in tensors) or sum(map(num_bytes, fetched))
    keys = [key for arg in node.args for key in _keys(arg)]
    homes = {sharding.parameters[key.partition("/")[2]].memory for key in keys} or {sharding.activation_memory}
    home = next((each for each in sorted(homes) if each != DEVICE), "host")
    return CopyCall(signature_of(node), phase, moved, "start", home=home)


def _keys(arg: object) -> list[str]:
    """The keys of tensors off the device, such as input/NAME, in an argument."""
    several = arg if isinstance(arg, (tuple, list)) else [arg]
    return [each for each in several if isinstance(each, str)]


def _busiest(graph: Graph, program: RankProgram) -> dict[str, int]:
    """The coordinates of a rank whose branch of a graph has the most floating-point operations."""
    here = dict.fromkeys(program.plan.mesh.names, 0)
    work: Counter[tuple[tuple[str, int], ...]] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and (owner := info_of(node).owner):
            work[tuple(sorted(owner.items()))] += flops_of(node) + 1
    return here | dict(max(work.items(), key=lambda each: each[1])[0]) if work else here


def _text(arg: object) -> str:
    if isinstance(arg, Node):
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            strides = "" if value.is_contiguous() else f"/{','.join(map(str, value.stride()))}"
            return f"{torch_name(value.dtype)}[{','.join(map(str, value.shape))}{strides}]"
        return "..." if value is None or isinstance(value, (tuple, list)) else str(value)
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_text(each) for each in arg)}]"
    return str(arg)


def _pipeline_calls(program: RankProgram) -> PipelineCalls:
    pipeline = program.pipeline
    assert pipeline is not None
    cells, schedule = pipeline.cells, pipeline.schedule
    mesh = program.plan.mesh
    micro_graphs = {}
    for rank, stages in enumerate(schedule.stages):
        for cell in cells.graphs:
            if cell[1] in stages:
                num = schedule.num_micro_of(rank, stages.index(cell[1]))
                micro_graphs[rank, cell] = program.micro_graphs_of_cell(cell, num)
    messages: dict[RankAction, int] = {}
    made: dict[Hashable, list[Any]] = defaultdict(list)
    for value in cells.values:
        made[value.source].append(value)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == SEND:
                messages[rank, action] = _sent(schedule, made, rank, action)
    exchanged = []
    shared = [name for name, each in program.sharding.parameters.items() if stage_axis() in each.reduce_axes]
    for rank in range(schedule.num_ranks):
        here = mesh.coordinates(0) | {stage_axis(): rank}
        total = 0
        for name in shared:
            if rank in pipeline.ranks_of(name):
                layout = program.sharding.parameters[name].state
                total += math.prod(layout.local_shape(mesh, here)) * program.dtype_of(name).itemsize
        exchanged.append(total)
    losses = sum(output.kind in ("loss", "sum", "weight") for each in cells.graphs.values() for output in each.outputs)
    after = []
    for name in dict.fromkeys(o.name for each in cells.graphs.values() for o in each.outputs if o.kind == "buffer"):
        value = next(
            result.meta["val"]
            for each in cells.graphs.values()
            for output, result in zip(each.outputs, output_node(each.graph).args[0], strict=True)  # type: ignore[arg-type]
            if (output.kind, output.name) == ("buffer", name) and is_tensor(result)
        )
        sent = AxisCollective(CollectiveKind.BROADCAST, stage_axis(), num_bytes(value))
        after.append(CollectiveCall(f"broadcast of {name}", "update", (sent,), stream=stage_axis(), what=name))
    sent = AxisCollective(CollectiveKind.ALL_REDUCE, stage_axis(), 8 * losses * schedule.num_micro)
    after.append(CollectiveCall("sum of losses", "update", (sent,), stream=stage_axis(), what="losses"))
    return PipelineCalls(
        stage_axis(), schedule, edges_of(cells.values), micro_graphs, messages, tuple(exchanged), tuple(after)
    )


def _sent(schedule: Any, made: Mapping[Any, list[Any]], rank: int, action: Action) -> int:
    """Bytes that a SEND moves. A backward that is not split moves the values of both its cells."""
    stage = schedule.stages[rank][action.chunk]
    whole = action.of == BACKWARD and not schedule.splits(rank, action.producer)
    cells = [(action.of, stage), (WEIGHT, stage)] if whole else [(action.of, stage)]
    total = 0
    for cell in cells:
        for value in made[cell]:
            if any(schedule.where(other, action.micro)[0] == action.peer for other in value.stages()):
                total += value.num_bytes
    return total
