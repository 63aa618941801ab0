"""The axes of a mesh: one row says all that the rest of plait asks of an axis. To add an axis, add its row.

An axis with a row is a key of the plan (`data=2`), whether or not `Plan` has a field for it. Nobody else knows an axis
by its name: `axis_kind(name)` answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import PlanError
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class AxisKind:
    """What the ranks along one axis of the mesh are to each other.

    doc            what the plan's key means, for an axis without a field in `Plan`
    order          axes are laid out in this order, the smallest first: a later one cuts the parts of an earlier one
    cuts_rows      each rank has its part of the rows of every batch, and gradients are summed over the axis
    cuts_weights   each rank has its part of weights, which a search chooses
    cuts_states    ZeRO cuts states over the axis, and central storage is what its ranks have in common
    has_stages     each rank has its stages of the layers
    per_stage      the ranks are those of one stage; the plan says for each stage which kind they are to each other
    without_graph  PyTorch's DDP can take the axis, for a model that cannot be captured
    """

    name: str
    doc: str = ""
    order: int = 0
    cuts_rows: bool = False
    cuts_weights: bool = False
    cuts_states: bool = False
    has_stages: bool = False
    per_stage: bool = False
    without_graph: bool = False


# The order of the rows is that of the mesh, outermost first: ranks that differ only on the last axis are neighbours.
# The batch is cut over `data` first: gradients, which ZeRO cuts over data, then are summed over replicas in parts.
AXES: tuple[AxisKind, ...] = (
    AxisKind("pipeline", order=0, has_stages=True),
    AxisKind("replica", order=20, cuts_rows=True),
    AxisKind("data", order=10, cuts_rows=True, cuts_states=True, without_graph=True),
    AxisKind("tensor", order=30, cuts_weights=True),
    AxisKind("inner", order=40, cuts_weights=True, per_stage=True),
)


def axis_kind(name: str) -> AxisKind:
    """The row of an axis; PlanError for one that has none."""
    for kind in AXES:
        if kind.name == name:
            return kind
    raise PlanError(f"unknown axis {name!r}; there are {', '.join(kind.name for kind in AXES)}")


def axes_in_order() -> tuple[AxisKind, ...]:
    """Every axis in the order in which a step is laid out along them."""
    return tuple(sorted(AXES, key=lambda kind: kind.order))


def batch_axes() -> tuple[str, ...]:
    """The axes that cut the rows of the batch, the outermost cut first."""
    return tuple(kind.name for kind in axes_in_order() if kind.cuts_rows)


def stage_axis() -> str:
    """The axis whose ranks have the stages of a pipeline."""
    return next(kind.name for kind in AXES if kind.has_stages)


def zero_axis() -> str:
    """The axis over which ZeRO cuts."""
    return next(kind.name for kind in AXES if kind.cuts_states)


def ddp_axis() -> str:
    """The axis along which a model that cannot be captured is trained."""
    return next(kind.name for kind in AXES if kind.without_graph)


def num_batch_parts(mesh: Mesh) -> int:
    """Into how many parts each microbatch is cut: the product of the batch axes."""
    return math.prod(size for axis, size in mesh.axes if axis_kind(axis).cuts_rows)


def parts_around(mesh: Mesh, axis: str) -> tuple[int, int]:
    """How many parts of the batch the batch axes make that cut it before `axis` does, and how many those after it.

    Part `p` of the axis's rank `i` of `n` is part `(p // after * n + i) * after + p % after` of the whole batch.
    """
    names = batch_axes()
    at = names.index(axis)
    sizes = dict(mesh.axes)
    before, after = (math.prod(sizes.get(name, 1) for name in some) for some in (names[:at], names[at + 1 :]))
    return before, after


def batch_part(mesh: Mesh, coordinates: Mapping[str, int]) -> int:
    """Which of the parts of each microbatch the rank at these coordinates has."""
    sizes = dict(mesh.axes)
    part = 0
    for axis in batch_axes():
        part = part * sizes.get(axis, 1) + coordinates.get(axis, 0)
    return part
