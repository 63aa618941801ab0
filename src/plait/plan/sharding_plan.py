"""The sharding plan: for every parameter its layouts, the sums of its gradient, and the memory that keeps it.

    plan, layouts in which the graph reads parameters, facts -> sharding_plan -> ShardingPlan

It is made once, when a step is compiled. Passes, backends and the engine read it, and none of them asks for keys of the
plan again:

zero=1        the optimizer's state is cut; each rank updates its part of a parameter, and the parts are gathered
zero=2        gradients too: each microbatch's are reduce-scattered as they come, and only the part is kept
zero=3        parameters too: a rank holds its part, and gathers the whole for each use (compile/passes/zero.py)
central=host  cuts as zero=2 does; nothing is gathered, because all update their parts of the same tensors
home.*        large parameters, and their gradients, are kept on the host or on disk between their uses

(Rajbhandari et al. 2020, "ZeRO"; Rajbhandari et al. 2021, "ZeRO-Infinity".)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from plait.plan import axes
from plait.plan.axes import axis_kind
from plait.plan.plan import Plan
from plait.spec.layout import Layout, Only, Replicate, Shard
from plait.spec.mesh import JOIN, Mesh

DEVICE, HOST, DISK = "device", "host", "disk"  # kinds of memory, as home.* names them
SMALL = 1 << 14  # elements; a smaller tensor stays where it is: moving it takes as long as moving one of this size


class ZeroStage(NamedTuple):
    """What a stage of ZeRO cuts over ranks."""

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


ZERO_STAGES = {0: ZeroStage(), 1: ZeroStage(True), 2: ZeroStage(True, True), 3: ZeroStage(True, True, True)}


class Gather(Enum):
    """When the ranks that hold parts of a parameter gather the whole."""

    NEVER = "never"
    USE = "for each use"
    UPDATE = "after each update"


@dataclass(frozen=True)
class ParameterSharding:
    """How the ranks hold one parameter.

    compute          the layout in which the graph reads it, once it is gathered
    state            the layout in which the optimizer holds it, its gradient and its optimizer state
    cut_dim          the dim along which a rank's tensor of `compute` is cut to become that of `state`; None: it is not
    cut_axis         the axis, or the joined axes, over whose ranks it is cut
    gather           when the parts are gathered
    reduce_axes      the axes over which ranks sum their terms of its gradient
    frozen           whether it did not train when training began
    shared           whether its ranks have the tensor of `compute` in common, in host memory
    memory           the kind of memory that keeps it between its uses
    gradient_memory  the kind of memory that keeps its gradient until the update
    """

    compute: Layout
    state: Layout
    cut_dim: int | None = None
    cut_axis: str = ""
    gather: Gather = Gather.NEVER
    reduce_axes: tuple[str, ...] = ()
    frozen: bool = False
    shared: bool = False
    memory: str = DEVICE
    gradient_memory: str = DEVICE

    @property
    def held(self) -> Layout:
        """The layout of what a rank stores from one step to the next."""
        return self.state if self.gather is Gather.USE else self.compute

    @property
    def narrow(self) -> str | None:
        """The dtype in which the graph reads it, if the optimizer has a wider one."""
        return None if self.compute.dtype == self.state.dtype else self.compute.dtype

    def __str__(self) -> str:
        facts = {
            "state": "" if self.state == self.compute else str(self.state),
            "gathered": "" if self.gather is Gather.NEVER else self.gather.value,
            "summed over": ", ".join(self.reduce_axes),
            "on": "" if self.memory == DEVICE else self.memory,
            "gradient on": "" if self.gradient_memory == DEVICE else self.gradient_memory,
        }
        words = [f"{key} {value}" for key, value in facts.items() if value]
        words += ["shared"] * self.shared + ["frozen"] * self.frozen
        return "; ".join([str(self.compute), *words])


@dataclass(frozen=True)
class ShardingPlan:
    """How the ranks of a plan hold the parameters of a step.

    mesh                  the plan's mesh
    axis                  the axis over whose ranks states are cut, or the joined axes over which most are; empty where
                          each rank has all of them
    parameters            by name, in the order of the step's inputs
    sums_each_microbatch  whether gradients are summed over ranks at every microbatch, and a rank keeps its part
    updates_on_host       whether the optimizer's step runs on the host beside a device that computes
    activation_memory     the kind of memory that keeps large values of the forward pass until the backward pass
    """

    mesh: Mesh
    axis: str
    parameters: Mapping[str, ParameterSharding]
    sums_each_microbatch: bool = False
    updates_on_host: bool = False
    activation_memory: str = DEVICE

    @cached_property
    def states(self) -> dict[str, Layout]:
        """The layout in which the optimizer holds each parameter, by name."""
        return {name: each.state for name, each in self.parameters.items()}

    @cached_property
    def away(self) -> frozenset[str]:
        """The names of parameters that are fetched for each use."""
        return frozenset(name for name, each in self.parameters.items() if each.memory != DEVICE)

    @cached_property
    def gradients_away(self) -> frozenset[str]:
        """The names of parameters whose gradients leave the device."""
        return frozenset(name for name, each in self.parameters.items() if each.gradient_memory != DEVICE)

    def gathered(self, when: Gather) -> list[str]:
        """The names of parameters that are gathered at that time."""
        return [name for name, each in self.parameters.items() if each.gather is when]

    def read_as(self, dtypes: Mapping[str, str]) -> ShardingPlan:
        """This plan for graphs that read the named parameters in these dtypes."""
        found = dict(self.parameters)
        for name, dtype in dtypes.items():
            found[name] = replace(found[name], compute=replace(found[name].compute, dtype=dtype))
        return replace(self, parameters=found)

    def __str__(self) -> str:
        width = max(map(len, self.parameters), default=0)
        return "\n".join(f"{name:{width}}  {each}" for name, each in self.parameters.items())


def sharding_plan(
    plan: Plan,
    layouts: Mapping[str, Layout],
    *,
    frozen: Collection[str] = (),
    reduce_axes: Mapping[str, tuple[str, ...]] | None = None,
    device: str = "cpu",
) -> ShardingPlan:
    """How the ranks of a plan hold the parameters of a step.

    Args:
        plan: the plan of ranks that agree at every step.
        layouts: the layout in which the graph reads each parameter, by name.
        frozen: the names of parameters that do not train.
        reduce_axes: by name, the axes over which the terms of a gradient are summed.
        device: the type of device that computes.
    """
    cuts = ZERO_STAGES[2 if plan.central == "host" else plan.zero]
    over = state_axes(plan.mesh) if cuts.optimizer else ()
    shares = plan.shares_parameters
    gather = Gather.NEVER if shares else Gather.USE if cuts.parameters else Gather.UPDATE
    on_host = updates_on_host(plan, device)
    memory = _memory(plan.home_parameters, device)
    gradient_memory = HOST if on_host and memory == DEVICE else memory
    found = {}
    for name, compute in layouts.items():
        is_frozen, large = name in frozen, is_large(math.prod(compute.shape))
        axis, cut_dim = _state_cut(compute, plan.mesh, over)
        if is_frozen and not cuts.parameters:
            cut_dim = None
        found[name] = ParameterSharding(
            compute,
            compute if cut_dim is None else _cut(compute, axis, cut_dim),
            cut_dim,
            "" if cut_dim is None else axis,
            Gather.NEVER if cut_dim is None else gather,
            (reduce_axes or {}).get(name, ()),
            is_frozen,
            shares and (cut_dim is not None or (is_frozen and not compute.placements)),
            memory if large else DEVICE,
            gradient_memory if large else DEVICE,
        )
    activation_memory = _memory(plan.home_activations, device)
    return ShardingPlan(plan.mesh, JOIN.join(over), found, cuts.gradients, on_host, activation_memory)


def state_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes with several ranks over which ZeRO cuts."""
    return tuple(name for name in axes.state_axes() if mesh.axis_size(name) > 1)


def _state_cut(layout: Layout, mesh: Mesh, among: Sequence[str]) -> tuple[str, int | None]:
    """The axis `among` some, or the joined axes, over which a parameter's state is cut, and the dim. Joined axes cut
    evenly."""
    free = [axis for axis in among if isinstance(layout.on(axis), Replicate)]
    if (joined := JOIN.join(free)) in mesh.joined:
        dim = state_dim(layout, mesh, joined)
        if dim is not None and layout.local_shape(mesh)[dim] % mesh.axis_size(joined) == 0:
            return joined, dim
    axis = free[0] if free else ""
    return axis, state_dim(layout, mesh, axis)


def state_dim(layout: Layout, mesh: Mesh, axis: str) -> int | None:
    """The dim of a parameter that is cut over the axis, or joined axes, along which ranks have the same: the first that
    divides evenly, or else the longest.

    None without an axis. Scalars stay whole, and so does a dim that another axis cuts, and what the user put on one
    rank of an axis only.
    """
    if not axis or not all(isinstance(layout.on(name), Replicate) for name in axis.split(JOIN)):
        return None
    taken = {p.dim for _, p in layout.placements if isinstance(p, Shard)}
    free = [dim for dim, n in enumerate(layout.shape) if dim not in taken and n > 1]
    kinds = [axis_kind(name) for name, p in layout.placements if isinstance(p, Only)]
    on_one = any(not kind.has_stages and not kind.cuts_experts for kind in kinds)
    if not free or on_one:
        return None
    even = (dim for dim in free if layout.shape[dim] % mesh.axis_size(axis) == 0)
    return next(even, max(free, key=lambda each: layout.shape[each]))


def _cut(layout: Layout, axis: str, dim: int) -> Layout:
    names = axis.split(JOIN)
    others = tuple((other, p) for other, p in layout.placements if other not in names)
    return replace(layout, placements=(*others, *((name, Shard(dim)) for name in names)))


def is_large(num_elements: int) -> bool:
    """Whether a tensor is worth moving to another kind of memory and back."""
    return num_elements >= SMALL


def parameters_away(plan: Plan, device: str) -> bool:
    """Whether large parameters are fetched for each use, on a type of device."""
    return _memory(plan.home_parameters, device) != DEVICE


def updates_on_host(plan: Plan, device: str) -> bool:
    """Whether the optimizer's step runs on the host beside a device that computes."""
    return device != "cpu" and (plan.home_optimizer != DEVICE or plan.central == "host")


def _memory(home: str, device: str) -> str:
    """The kind of memory that a home is for a type of device: the host's is the memory of a CPU."""
    return DEVICE if home == HOST and device == "cpu" else home
