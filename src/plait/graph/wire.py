"""What a local graph sends: its collectives, with the bytes that each rank puts on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from plait.graph import ops
from plait.graph.bucket import bucket_start
from plait.graph.calls import num_bytes

_WAYS = {ops.all_reduce: 2.0, ops.all_reduce_start: 2.0, bucket_start: 2.0}


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


def collectives(graph: Graph, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of the graph in order. `sizes`: ranks along each axis."""
    return [_describe(node, sizes) for node in graph.nodes if _is_start(node)]


def _is_start(node: Node) -> bool:
    return node.target is bucket_start or (node.target in ops.COMMUNICATING and node.target is not ops.wait)


def _describe(node: Node, sizes: Mapping[str, int]) -> Collective:
    if node.target is bucket_start:
        axis, held = str(node.args[2]), int(node.meta["bytes"])
        value = f"{node.meta['num']} gradients"
    else:
        axis = str(node.args[2])
        source = node.args[1]
        assert isinstance(source, Node)
        held = num_bytes(_value(source))
        value = str(node.meta.get("source", source.name))
    size = sizes[axis]
    kind = node.target.__name__.removesuffix("_start")  # type: ignore[union-attr]
    whole = held * size if node.target in (ops.all_gather, ops.all_to_all) else held
    sent = _WAYS.get(node.target, 1.0) * whole * (size - 1) / size  # type: ignore[arg-type]
    if node.target is ops.all_to_all:
        sent /= size
    return Collective(
        kind="all_reduce" if kind == "bucket" else kind,
        axis=axis,
        tensor_bytes=held,
        sent_bytes=sent,
        phase=node.meta.get("phase", ""),
        module=node.meta.get("module", "") or "",
        value=value,
        origin=node.meta.get("origin", "") or "",
    )


def _value(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
