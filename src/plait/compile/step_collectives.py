"""The collectives of a step, with the bytes that each rank sends in them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Graph, Node

from plait.compile.ir.calls import num_bytes, op_spec_of, output_values
from plait.compile.ir.dtypes import dtype_named
from plait.compile.ir.node_info import NodeInfo, info_of
from plait.compile.ops import CollectiveKind, Communication
from plait.compile.rank_program import RankProgram
from plait.compile.stages.split import Pipeline
from plait.plan.sharding_plan import Gather
from plait.schedule.readiness import Cell


@dataclass(frozen=True)
class Collective:
    """One collective of a step. `sent_bytes` are those that one rank sends with a ring algorithm."""

    kind: str
    axis: str
    tensor_bytes: int
    sent_bytes: float
    phase: str
    module: str
    value: str  # the node whose placement it changes
    origin: str  # the annotation that led to it
    stage: int | None = None  # of a pipeline


def collectives(graph: Graph, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of the graph, in order. `sizes` are the numbers of ranks along each axis."""
    found: list[Collective] = []
    for node in graph.nodes:
        does = op_spec_of(node).communicates
        if does is not None and does.part != "wait":
            found += sent_by(node, does, sizes)
    return found


def step_collectives(program: RankProgram, graphs: Mapping[str, Graph]) -> list[Collective]:
    """Every collective of all microbatches of a step and of its update.

    For a stage of a pipeline they are those of one rank. `graphs` are those that a backend runs, by their names in the
    program.
    """
    mesh = program.plan.mesh
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.communicators}
    by_graph = {name: collectives(graph, sizes) for name, graph in graphs.items()}
    gathered = program.sharding.gathered(Gather.UPDATE)
    if program.pipeline is None:
        found = [one for name in program.micro_graphs for one in by_graph[name]]
        return found + _gathers_of_parts(program, gathered, sizes)
    found = []
    for cell in program.pipeline.cells.graphs:
        names = [name for num in _runs(program.pipeline, cell) for name in program.micro_graphs_of_cell(cell, num)]
        found += [replace(one, stage=cell[1]) for name in names for one in by_graph[name]]
    for stage in range(program.pipeline.cells.num_stages) if gathered else ():
        names = [name for name in gathered if stage in program.pipeline.stages[name]]
        found += [replace(one, stage=stage) for one in _gathers_of_parts(program, names, sizes)]
    return found


def collective_order(graphs: Mapping[str, Graph], pipeline: Pipeline | None = None) -> str:
    """The number of collectives of graphs, and a checksum of their order, axes and sizes, and of a pipeline's
    transfers.

    Ranks whose texts differ would wait for each other, or exchange the wrong tensors.
    """
    sums, num_calls = hashlib.sha256(), 0
    for name, graph in graphs.items():
        sums.update(f"{name}\n".encode())
        for node in graph.nodes:
            does = op_spec_of(node).communicates
            if does is not None:
                num_calls += does.part != "wait"
                info = info_of(node)
                axes = "" if does.part == "wait" else node.args[does.axis]
                shapes = [
                    (value.dtype, tuple(value.shape)) for value in output_values(node) if isinstance(value, Tensor)
                ]
                text = f"{does.kind.title} {does.part} {axes} {info.num_bytes} {sorted(info.owner.items())} {shapes}\n"
                sums.update(text.encode())
    if pipeline is not None:
        sent = [value for value in pipeline.cells.values if value.stages()]  # what stays on a stage may be a tuple
        values = [(value.name, value.source, value.users, tuple(value.like.shape)) for value in sent]
        sums.update(f"{pipeline.schedule}\n{values}\n{sorted(pipeline.stages.items())}".encode())
    return f"{num_calls} collectives, checksum {sums.hexdigest()[:8]}"


def _runs(pipeline: Pipeline, cell: Cell) -> list[int]:
    """The number of microbatches on which a rank runs a cell before each update of a step."""
    if pipeline.schedule.asynchronous:
        return [num for _, num in sorted(set(pipeline.groups.values()))]
    return [max(pipeline.num_micro(cell), default=0)]


def _gathers_of_parts(program: RankProgram, names: Sequence[str], sizes: Mapping[str, int]) -> list[Collective]:
    """The all-gathers of parameters, one along each axis, after an update in which each rank has updated a part of
    them."""
    parameters = program.sharding.parameters
    found = []
    for axis in dict.fromkeys(parameters[name].cut_axis for name in names):
        mine = [name for name in names if parameters[name].cut_axis == axis]
        held = sum(
            math.prod(program.cuts[name].part_shape(0)) * dtype_named(parameters[name].compute.dtype).itemsize
            for name in mine
        )
        info = NodeInfo(phase="update", origin="zero")
        found.append(_collective(CollectiveKind.ALL_GATHER, axis, held, sizes, info, f"{len(mine)} parameters"))
    return found


def sent_by(node: Node, does: Communication, sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives of a call: its own over the first of its axes, and all-reduces over the others."""
    info = info_of(node)
    axes = node.args[does.axis]
    first, *others = [axes] if isinstance(axes, str) else [str(axis) for axis in axes]  # type: ignore[union-attr]
    if does.counted:
        held, value = info.num_bytes, info.what
    else:
        source = node.args[does.tensor]
        assert isinstance(source, Node)
        held, value = num_bytes(source.meta["val"]), info.source or source.name
    found = [_collective(does.kind, first, held, sizes, info, value)]
    held //= sizes[first] if does.kind is CollectiveKind.REDUCE_SCATTER else 1
    return found + [_collective(CollectiveKind.ALL_REDUCE, axis, held, sizes, info, value) for axis in others]


def _collective(
    kind: CollectiveKind, axis: str, held: int, sizes: Mapping[str, int], info: NodeInfo, value: str
) -> Collective:
    return Collective(
        kind=kind.title,
        axis=axis,
        tensor_bytes=held,
        sent_bytes=kind.sent_bytes(held, sizes[axis]),
        phase=info.phase,
        module=info.module,
        value=value,
        origin=info.origin,
    )
