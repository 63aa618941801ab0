"""What a local graph sends: its collectives, with the bytes that each rank puts on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from plait.compile.ir.calls import num_bytes
from plait.compile.ir.node_info import NodeInfo, info_of
from plait.compile.lowered import Lowered
from plait.compile.ops import comm_ops
from plait.compile.passes.bucket import bucket_start, rows_start
from plait.compile.passes.gather import gather_start
from plait.compile.stages.split import Pipeline
from plait.schedule.readiness import Cell

_WAYS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}
_BUCKETS = {bucket_start: "all_reduce", rows_start: "reduce_scatter", gather_start: "all_gather"}


@dataclass(frozen=True)
class Collective:
    """One collective of a step. `sent_bytes` is what one rank sends, by the ring formula."""

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
    """Every collective of the graph in order. `sizes`: ranks along each axis."""
    found: list[Collective] = []
    for node in graph.nodes:
        if node.target in _BUCKETS:
            found += _bucket(node, sizes)
        elif node.target in comm_ops.COMMUNICATING and node.target is not comm_ops.wait:
            found.append(_single(node, sizes))
    return found


def step_collectives(lowered: Lowered) -> list[Collective]:
    """Every collective of a step: of all its microbatches, and of the update. Of a pipeline's stage those of one rank
    that has it."""
    sizes = dict(lowered.plan.mesh.axes)
    by_turn = {turn: collectives(graph, sizes) for turn, graph in lowered.graphs.items()}
    cuts = lowered.cuts
    gathers = cuts and lowered.plan.zero_stage < 3 and not lowered.plan.shares_parameters
    if lowered.pipeline is None:
        found = [one for turn in lowered.turns for one in by_turn[turn]]
        return found + ([_gather_of_parts(lowered, list(cuts), sizes)] if gathers else [])
    found = []
    for cell in lowered.pipeline.cells.graphs:
        turns = [turn for num in _runs(lowered.pipeline, cell) for turn in lowered.turns_of_cell(cell, num)]
        found += [replace(one, stage=cell[1]) for turn in turns for one in by_turn[turn]]
    for stage in range(lowered.pipeline.cells.num_stages) if gathers else ():
        names = [name for name in cuts if stage in lowered.pipeline.stages[name]]
        found += [replace(_gather_of_parts(lowered, names, sizes), stage=stage)] if names else []
    return found


def _runs(pipeline: Pipeline, cell: Cell) -> list[int]:
    """How many microbatches a rank runs a cell on, update after update."""
    if pipeline.schedule.asynchronous:
        return [num for _, num in sorted(set(pipeline.groups.values()))]
    return [max(pipeline.num_micro(cell), default=0)]


def _gather_of_parts(lowered: Lowered, names: Sequence[str], sizes: Mapping[str, int]) -> Collective:
    """After an update every rank gets the parameters of which it has updated a part."""
    held = 0
    for name in names:
        dtype = getattr(torch, lowered.dtypes[name]) if name in lowered.dtypes else lowered.dtype_of(name)
        held += math.prod(lowered.cuts[name].part_shape(0)) * dtype.itemsize
    return _collective(
        "all_gather", "data", held, sizes, phase="update", value=f"{len(names)} parameters", origin="zero"
    )


def _bucket(node: Node, sizes: Mapping[str, int]) -> list[Collective]:
    kind = _BUCKETS[node.target]  # type: ignore[index]
    info = info_of(node)
    if kind == "all_gather":
        return [_collective(kind, str(node.args[1]), info.num_bytes, sizes, node=node, value=info.what)]
    first, *others = node.args[2]  # type: ignore[misc,str-unpack]
    value = info.what
    found = [_collective(kind, str(first), info.num_bytes, sizes, node=node, value=value)]
    held = info.num_bytes // (sizes[str(first)] if kind == "reduce_scatter" else 1)
    return found + [_collective("all_reduce", str(axis), held, sizes, node=node, value=value) for axis in others]


def _single(node: Node, sizes: Mapping[str, int]) -> Collective:
    source = node.args[1]
    assert isinstance(source, Node)
    kind = node.target.__name__.removesuffix("_start")  # type: ignore[union-attr]
    value = info_of(node).source or source.name
    return _collective(kind, str(node.args[2]), num_bytes(_value(source)), sizes, node=node, value=value)


def _collective(
    kind: str, axis: str, held: int, sizes: Mapping[str, int], *, node: Node | None = None, value: str = "",
    phase: str = "", origin: str = "",
) -> Collective:  # fmt: skip
    size = sizes[axis]
    info = info_of(node) if node is not None else NodeInfo(phase=phase, origin=origin)
    whole = held * size if kind in ("all_gather", "all_to_all") else held
    sent = _WAYS[kind] * whole * (size - 1) / size
    return Collective(
        kind=kind,
        axis=axis,
        tensor_bytes=held,
        sent_bytes=sent / size if kind == "all_to_all" else sent,
        phase=info.phase,
        module=info.module,
        value=value,
        origin=info.origin,
    )


def _value(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
