"""Which parameters a ZeRO stage splits over `data`, and how (Rajbhandari et al. 2020, "ZeRO").

zero=1  the optimizer's state; each rank updates its part of a parameter and the parts are gathered after that
zero=2  gradients too: each microbatch's are reduce-scattered as they come, and only the part is kept
zero=3  parameters too: a rank holds its part, and gathers the whole for each use (compile/passes/gather.py)

central=host cuts as zero=2 does; nothing is gathered, because all update their parts of the same tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plait.compile.capture.capture import Captured
from plait.compile.sharding.flat_shards import Cut
from plait.plan.plan import Plan
from plait.spec.layout import Layout, Only, Replicate, Shard


def state_layouts(
    captured: Captured, layouts: Mapping[str, Layout], plan: Plan, frozen: Collection[str] | None = None
) -> dict[str, Layout]:
    """The layout in which the optimizer holds each parameter. `frozen` are those that did not train when an earlier
    capture of the model decided it."""
    names = [i.name for i in captured.inputs if i.kind == "parameter"]
    if plan.zero_stage == 0 or plan.data == 1:
        return {name: layouts[name] for name in names}
    frozen = (captured.frozen if frozen is None else frozen) if plan.zero_stage < 3 else ()
    return {name: layouts[name] if name in frozen else split_over_data(layouts[name], plan) for name in names}


def split_over_data(layout: Layout, plan: Plan) -> Layout:
    """The layout with one more dim cut over `data`: the first that divides evenly, or else the longest.

    Scalars stay whole, and so does what lies on one rank of an axis only, and a dim that another axis cuts.
    """
    taken = {p.dim for _, p in layout.placements if isinstance(p, Shard)}
    free = [dim for dim, n in enumerate(layout.shape) if dim not in taken and n > 1]
    if not free or any(isinstance(p, Only) and axis != "pipeline" for axis, p in layout.placements) or _is_cut(layout):
        return layout
    dim = next((d for d in free if layout.shape[d] % plan.data == 0), max(free, key=lambda d: layout.shape[d]))
    others = tuple((axis, p) for axis, p in layout.placements if axis != "data")
    return Layout(layout.dtype, layout.shape, (*others, ("data", Shard(dim))))


def cut_of(layout: Layout, state: Layout, plan: Plan) -> Cut | None:
    """How a rank's tensor of `layout` is cut over `data` to become the `state`; None where it is not."""
    placement = state.on("data")
    if layout == state or not isinstance(placement, Shard):
        return None
    return Cut(layout.local_shape(plan.mesh), placement.dim, plan.data)


def _is_cut(layout: Layout) -> bool:
    return not isinstance(layout.on("data"), Replicate)
