"""NodeInfo: what plait knows of a node of a graph besides its op and its value, as one typed record on each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from plait.spec.layout import Placement

_KEY = "plait"  # in the meta of a node
_EVERYWHERE: Mapping[str, int] = {}


class NodeInfo(NamedTuple):
    """Facts of one node. Passes replace the record as a whole; copies of a node share it.

    It is a tuple because passes write a hundred thousand of them, and `_replace` of a tuple takes a third of the time
    of a dataclass's.
    """

    # of a placeholder
    kind: str = ""  # parameter, buffer, batch, constant, ... of a captured step's Input; value, sum, offload, saved
    name: str = ""  # of the parameter, buffer, leaf of the batch or value of another cell that it brings
    stored_dtype: torch.dtype | None = None  # of a parameter that the graph reads in another dtype than it is kept in

    # of a call, where it comes from
    phase: str = ""  # forward or backward
    module: str = ""  # path of the module that made it; empty for the loss
    position: int | None = None  # among the calls of the captured step; a backward call has that of its forward call
    recomputed: bool = False  # in the backward pass, by a copy of the forward call
    auxiliary: bool = False  # whether neither the loss nor a gradient depends on it
    formats: tuple[Any, Mapping[int, Any]] | None = None  # the op, and the memory formats of its inputs at capture

    # of a call, where it runs
    stage: int | None = None  # of a pipeline
    role: str = ""  # how its stage is spread, where stages differ in that
    owner: Mapping[str, int] = _EVERYWHERE  # coordinates of the ranks that have the value; empty: all

    # of a value that is sharded along some axes
    gathered: tuple[str, ...] = ()  # axes along which it is gathered for all of its readers (narrow_gathers.py)

    # for what is shown to users
    global_shape: tuple[int, ...] | None = None
    placements: tuple[tuple[str, Placement], ...] = ()  # by axis
    origin: str = ""  # the annotation, search or rule that a placement or a collective comes from
    source: str = ""  # the value that a collective brings to another placement

    # of a collective that moves several tensors at once
    num_bytes: int = 0
    what: str = ""  # those tensors, in words


_NOTHING = NodeInfo()


def info_of(node: Node) -> NodeInfo:
    """The record of a node; an empty one if it has none."""
    return node.meta.get(_KEY, _NOTHING)  # type: ignore[no-any-return]


def set_info(node: Node, **changes: Any) -> None:
    """Replace some facts of a node."""
    node.meta[_KEY] = info_of(node)._replace(**changes)


def describe(node: Node, info: NodeInfo, value: object) -> None:
    """Set the record and the value, one or several fake tensors, of a new node."""
    meta = node.meta  # fx does much for an attribute of a node that is set
    meta.clear()
    meta["val"], meta[_KEY] = value, info


def position_of(node: Node) -> int:
    """The position of a call that is known to have one."""
    position = info_of(node).position
    assert position is not None, f"{node} has no position"
    return position


def stage_of(node: Node) -> int:
    """The stage of a call that is known to have one."""
    stage = info_of(node).stage
    assert stage is not None, f"{node} has no stage"
    return stage


def is_backward(node: Node) -> bool:
    """Whether the call belongs to the backward pass."""
    return info_of(node).phase == "backward"


def is_forward(node: Node) -> bool:
    """Whether the call belongs to the forward pass."""
    return info_of(node).phase == "forward"


def phase_of(node: Node) -> str:
    """The pass that the call belongs to, forward or backward; backward if it has none."""
    return "forward" if is_forward(node) else "backward"
