"""The axes of a mesh. Each has one row, with every fact that other files ask for. To add an axis, add a row.

An axis with a row is a key of the plan (`data=2`), whether or not `Plan` has a field for it. Other files do not name
axes; they ask `axis_kind(name)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import PlanError
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class AxisKind:
    """What the ranks along one axis of the mesh share.

    doc            the meaning of the plan's key, for an axis without a field in `Plan`
    order          the order in which axes cut tensors, smallest first: a later axis cuts the parts of an earlier one
    cuts_rows      each rank has a part of the rows of every batch, and gradients are summed over the axis
    cuts_weights   each rank has a part of each weight that auto sharding chooses
    cuts_sequence  each rank has a part of the sequence of every row, through the whole model
    cuts_experts   each rank has a part of the experts of every mixture of experts
    within         the axis that it subdivides: the sizes of both keys are not multiplied
    cuts_states    ZeRO cuts optimizer states over the axis, and central storage is shared by its ranks
    states_with    an axis whose ranks and those of this axis form one group: over it ZeRO cuts the states of parameters
                   that all of them have, and gradients of these are summed
    has_stages     each rank has stages of the model
    per_stage      the ranks have the same stage, and `stages=` says for each stage which kind the axis is
    without_graph  PyTorch's DDP supports the axis, for a model that cannot be captured
    """

    name: str
    doc: str = ""
    order: int = 0
    cuts_rows: bool = False
    cuts_weights: bool = False
    cuts_sequence: bool = False
    cuts_experts: bool = False
    within: str = ""
    cuts_states: bool = False
    states_with: str = ""
    has_stages: bool = False
    per_stage: bool = False
    without_graph: bool = False


# The order of the rows is that of the mesh, outermost first: ranks that differ only on the last axis are neighbours.
# The batch is cut over `data` first, so that gradients that ZeRO cuts over data are summed over replicas in parts.
AXES: tuple[AxisKind, ...] = (
    AxisKind("pipeline", order=0, has_stages=True),
    AxisKind("replica", order=20, cuts_rows=True),
    AxisKind("data", order=10, cuts_rows=True, cuts_states=True, without_graph=True),
    AxisKind("context", order=50, cuts_sequence=True, states_with="data"),
    AxisKind("expert", order=60, cuts_rows=True, cuts_experts=True, within="data", states_with="data"),
    AxisKind("tensor", order=30, cuts_weights=True),
    AxisKind("inner", order=40, cuts_weights=True, per_stage=True),
)


def axis_kind(name: str) -> AxisKind:
    """The row of an axis. Raises PlanError if there is none of this name."""
    for kind in AXES:
        if kind.name == name:
            return kind
    raise PlanError(f"unknown axis {name!r}; there are {', '.join(kind.name for kind in AXES)}")


def axes_in_order() -> tuple[AxisKind, ...]:
    """All axes, in the order in which they cut tensors."""
    return tuple(sorted(AXES, key=lambda kind: kind.order))


def batch_axes() -> tuple[str, ...]:
    """The axes that cut the rows of the batch, in the order in which they cut."""
    return tuple(kind.name for kind in axes_in_order() if kind.cuts_rows)


def stage_axis() -> str:
    """The axis whose ranks have the stages of a pipeline."""
    return next(kind.name for kind in AXES if kind.has_stages)


def zero_axis() -> str:
    """The axis over which ZeRO cuts."""
    return next(kind.name for kind in AXES if kind.cuts_states)


def state_axes() -> tuple[str, ...]:
    """The axes over which ZeRO cuts, outermost first: its own, and those whose ranks are one group with its."""
    own = zero_axis()
    return tuple(kind.name for kind in AXES if own in (kind.name, kind.states_with))


def ddp_axis() -> str:
    """The axis along which a model that cannot be captured is trained."""
    return next(kind.name for kind in AXES if kind.without_graph)


def num_batch_parts(mesh: Mesh) -> int:
    """The number of parts into which each microbatch is cut: the product of the sizes of the batch axes."""
    return math.prod(size for axis, size in mesh.axes if axis_kind(axis).cuts_rows)


def parts_around(mesh: Mesh, axis: str) -> tuple[int, int]:
    """The numbers of parts into which the axes before and after `axis` cut the batch.

    Part `p` of rank `i` along the axis, of `n` ranks, is part `(p // after * n + i) * after + p % after` of the batch.
    """
    names = batch_axes()
    at = names.index(axis)
    sizes = dict(mesh.axes)
    before, after = (math.prod(sizes.get(name, 1) for name in some) for some in (names[:at], names[at + 1 :]))
    return before, after


def batch_part(mesh: Mesh, coordinates: Mapping[str, int]) -> int:
    """The index of the part of each microbatch that the rank at `coordinates` has."""
    sizes = dict(mesh.axes)
    part = 0
    for axis in batch_axes():
        part = part * sizes.get(axis, 1) + coordinates.get(axis, 0)
    return part
