"""What zero= and central= mean, in facts: who keeps which part of a parameter, its gradient and its optimizer state.

zero=1  the optimizer's state is cut; each rank updates its part of a parameter and the parts are gathered after that
zero=2  gradients too: each microbatch's are reduce-scattered as they come, and only the part is kept
zero=3  parameters too: a rank holds its part, and gathers the whole for each use (compile/passes/gather.py)

central=host cuts as zero=2 does; nothing is gathered, because all update their parts of the same tensors.
(Rajbhandari et al. 2020, "ZeRO".)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.plan.axes import axis_kind, zero_axis
from plait.spec.layout import Layout, Only, Replicate, Shard
from plait.spec.mesh import Mesh


@dataclass(frozen=True)
class ShardingPlan:
    """From the layout in which the graph reads a parameter to the one in which the optimizer holds it.

    axis                  the axis over whose ranks optimizer state is cut; empty where each has all of it
    sums_each_microbatch  gradients are summed over ranks at every microbatch, and a rank keeps its part of the sums
    cuts_parameters       a rank holds its part of parameters, and the graph gathers the whole for each use
    gathers_updates       a rank holds parameters whole and updates its part; the parts are gathered after an update
    shares_parameters     the ranks of the axis have whole parameters in memory in common, and each updates its part
    narrows_parameters    whole parameters may be of a narrower dtype than the part that the optimizer has
    """

    mesh: Mesh
    axis: str = ""
    sums_each_microbatch: bool = False
    cuts_parameters: bool = False
    gathers_updates: bool = False
    shares_parameters: bool = False
    narrows_parameters: bool = False

    @classmethod
    def make(cls, mesh: Mesh, zero: int, central: str) -> ShardingPlan:
        """That of a plan with this mesh and these values of `zero` and `central`."""
        shares = central == "host"
        stage = 2 if shares else zero
        axis = zero_axis()
        several = mesh.axis_size(axis) > 1
        return cls(
            mesh,
            axis if stage and several else "",
            sums_each_microbatch=stage >= 2,
            cuts_parameters=stage == 3,
            gathers_updates=not shares and stage in (1, 2),
            shares_parameters=shares and several,
            narrows_parameters=stage in (1, 2),
        )

    @property
    def num_parts(self) -> int:
        """Into how many parts states are cut."""
        return self.mesh.axis_size(self.axis) if self.axis else 1

    def state_layouts(self, layouts: Mapping[str, Layout], frozen: Collection[str]) -> dict[str, Layout]:
        """The layout in which the optimizer holds each parameter, by name. `frozen` are those that do not train."""
        whole = () if self.cuts_parameters else frozen
        return {name: each if name in whole else self.state_layout(each) for name, each in layouts.items()}

    def state_layout(self, layout: Layout) -> Layout:
        """The layout with one more dim cut over the axis: the first that divides evenly, or else the longest.

        Scalars stay whole, and so does what lies on one rank of an axis only, and a dim that another axis cuts.
        """
        if not self.axis:
            return layout
        taken = {p.dim for _, p in layout.placements if isinstance(p, Shard)}
        free = [dim for dim, n in enumerate(layout.shape) if dim not in taken and n > 1]
        on_one = any(isinstance(p, Only) and not axis_kind(axis).has_stages for axis, p in layout.placements)
        if not free or on_one or not isinstance(layout.on(self.axis), Replicate):
            return layout
        even = (dim for dim in free if layout.shape[dim] % self.num_parts == 0)
        dim = next(even, max(free, key=lambda each: layout.shape[each]))
        others = tuple((axis, p) for axis, p in layout.placements if axis != self.axis)
        return Layout(layout.dtype, layout.shape, (*others, (self.axis, Shard(dim))))

    def cut_dim(self, layout: Layout, state: Layout) -> int | None:
        """The dim along which a rank's tensor of `layout` is cut to become the `state`; None where it is not."""
        placement = state.on(self.axis)
        return placement.dim if layout != state and isinstance(placement, Shard) else None
