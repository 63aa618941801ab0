"""Local tensors and their layouts: a rank's part of a whole tensor, and the whole from the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.backends.eager.collectives import all_gather, broadcast
from plait.comm.protocol import World
from plait.compile.ops.comm_ops import take
from plait.spec.layout import Layout, Only, Replicate, Shard, part_bounds


def lies_here(layout: Layout, world: World) -> bool:
    """Whether this rank holds any part of the tensor."""
    return layout.lies_at(world.mesh.coordinates(world.rank))


def counts_here(layout: Layout, world: World) -> bool:
    """Whether a sum over ranks includes this rank's part: of ranks that hold the same part, only the first counts."""
    here = world.mesh.coordinates(world.rank)
    return all(here[axis] == p.index for axis, p in layout.placements if isinstance(p, Only))


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds the whole tensor."""
    return all(isinstance(p, Replicate) for _, p in layout.placements)


def local_part(whole: Tensor, layout: Layout, world: World) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own unless it is the whole."""
    here = world.mesh.coordinates(world.rank)
    part = whole
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            part = _take(part, here[axis], world.mesh.axis_size(axis), placement)
    return part if part is whole else part.clone(memory_format=torch.contiguous_format)


def gather_whole(local: Tensor | None, layout: Layout, world: World, dtype: torch.dtype) -> Tensor:
    """The whole tensor on every rank, from the parts; `local` is None on a rank without a part. All ranks must call
    it."""
    tensor = local
    here = world.mesh.coordinates(world.rank)
    for index, (axis, placement) in reversed(list(enumerate(layout.placements))):
        if isinstance(placement, Shard):
            if tensor is not None:  # otherwise the ranks along this axis have nothing either
                tensor = _gather(world, tensor, axis, placement, layout)
        elif isinstance(placement, Only):
            if tensor is None:
                outer = Layout(layout.dtype, layout.shape, layout.placements[:index])
                tensor = torch.zeros(outer.local_shape(world.mesh, here), dtype=dtype, device=world.device)
            tensor = broadcast(world, tensor, axis, placement.index)
    assert tensor is not None
    return tensor


def _take(whole: Tensor, rank: int, size: int, placement: Shard) -> Tensor:
    """Part `rank` of `size`. A dim that does not divide evenly is cut as spec.layout.part_bounds says."""
    num = whole.shape[placement.dim]
    if num % (size * placement.num_units) == 0:
        return take(whole, rank, size, placement.dim, placement.blocks)
    start, stop = part_bounds(num, size, rank)
    return whole.narrow(placement.dim, start, stop - start)


def _gather(world: World, part: Tensor, axis: str, placement: Shard, layout: Layout) -> Tensor:
    """The inverse of `_take`, on every rank. No other axis may cut an uneven dim."""
    dim, size, num = placement.dim, world.mesh.axis_size(axis), layout.shape[placement.dim]
    if num % (size * placement.num_units) == 0:
        return all_gather(world, part, axis, dim, placement.blocks)
    longest = part_bounds(num, size, 0)[1]
    padding = part.new_zeros((*part.shape[:dim], longest - part.shape[dim], *part.shape[dim + 1 :]))
    rows = world.comm(axis).all_gather(torch.cat([part, padding], dim)).wait()
    return torch.cat(list(rows), dim).narrow(dim, 0, num)


def summed_square_axes(layouts: Mapping[str, Layout]) -> dict[str, tuple[str, ...]]:
    """For each parameter, the axes over which the squares of local parts are added to get those of the whole."""
    return {
        name: tuple(axis for axis, p in layout.placements if isinstance(p, (Shard, Only)))
        for name, layout in layouts.items()
    }


class LaidOutParts:
    """Parts of tensors as their layouts say. `layouts` has every parameter that this rank holds a part of."""

    def __init__(self, layouts: Mapping[Tensor, Layout], world: World) -> None:
        self._layouts = layouts
        self._world = world
        self._axes = [axis for axis in world.mesh.names if world.mesh.axis_size(axis) > 1]
        self._found: dict[tuple[Tensor, int], Tensor] = {}

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self._layouts[parameter].shape

    def sums(self, terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        # Ranks along an axis have the same parameters: a parameter that an axis cuts is on all of its ranks.
        """For each (parameter, term), the sum of the term over the ranks that hold other parts of the parameter."""
        found = [term for _, term in terms]
        for axis in self._axes:
            cut = [i for i, (p, _) in enumerate(terms) if isinstance(self._layouts[p].on(axis), Shard)]
            for dtype in dict.fromkeys(found[i].dtype for i in cut):
                members = [i for i in cut if found[i].dtype == dtype]
                flat = torch.cat([found[i].reshape(-1) for i in members])
                flat = self._world.comm(axis).all_reduce(flat, consume=True).wait()
                sizes = [found[i].numel() for i in members]
                for i, total in zip(members, torch.split(flat, sizes), strict=True):
                    found[i] = total.view(found[i].shape)
        return found

    def place(self, parameter: Tensor, part: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """The part at its place in a tensor of zeros of the parameter's shape; `summed` are negative dims that are
        left alone."""
        whole = part
        for dim, here in self._cuts(parameter, summed):
            shape = (*whole.shape[:dim], self.shape(parameter)[dim], *whole.shape[dim + 1 :])
            whole = whole.new_zeros(shape).index_copy_(dim, here, whole)
        return whole

    def take(self, parameter: Tensor, whole: Tensor, summed: tuple[int, ...] = ()) -> Tensor:
        """This rank's part of a whole tensor; `summed` are negative dims that are left alone."""
        part = whole
        for dim, here in self._cuts(parameter, summed):
            part = part.index_select(dim, here)
        return part

    def _cuts(self, parameter: Tensor, summed: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """The cut dims that are not in `summed`, each with the indices of this rank's elements along it."""
        layout = self._layouts[parameter]
        cut = {p.dim for _, p in layout.placements if isinstance(p, Shard)}
        dims = sorted(cut - {dim + len(layout.shape) for dim in summed})
        return [(dim, self._places(parameter, dim)) for dim in dims]

    def _places(self, parameter: Tensor, dim: int) -> Tensor:
        if (parameter, dim) not in self._found:
            layout, num = self._layouts[parameter], self.shape(parameter)[dim]
            cuts = [(axis, p) for axis, p in layout.placements if isinstance(p, Shard) and p.dim == dim]
            along = Layout("i64", (num,), tuple((axis, Shard(0, p.blocks)) for axis, p in cuts))
            self._found[parameter, dim] = local_part(torch.arange(num, device=self._world.device), along, self._world)
        return self._found[parameter, dim]
